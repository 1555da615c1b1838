"""Rate of the whole way from data files to cached tokens, against `tokenizers`' own batch encoding of the same texts.

    python benchmarks/tokenize_files.py --inputs real_inputs --rounds 5

Ours reads, parses, renders, finds what is learned, encodes and writes the cache; theirs is handed the finished texts. Each run starts
with a tokenizer just loaded (a used one remembers words); that time is taken off. Prints the median seconds of each, by the clock and
of the processors, runs of the two taking turns, and ours as a multiple of their rate: above 1 is faster. On a machine that is busy only the
processors' time says something. With --fresh each run has a process of its own; without, it works in memory that the runs before it left in
pieces, which costs both some time. A last line says what the steps of ours take of the processors, one after another: theirs only encodes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from xtf.data import ChatEncoder, TextEncoder, parse_row, read_rows, tokenize_files


def rendered(tokenizer: Any, files: list[Path]) -> list[str]:
    """The finished texts of all rows."""
    chat, text = ChatEncoder(tokenizer), TextEncoder(tokenizer)
    found: list[str] = []
    for file in files:
        for row in read_rows(file):
            parsed = parse_row(row.value)
            segments = text.segments(parsed) if isinstance(parsed, str) else chat.segments(parsed)
            found.append("".join(segment.text for segment in segments))
    return found


def steps(tokenizer: Any, files: list[Path]) -> dict[str, float]:
    """Seconds of the processors for each step, all files together."""
    begin = time.process_time()
    chat, text = ChatEncoder(tokenizer), TextEncoder(tokenizer)
    made = time.process_time()
    parsed = [parse_row(row.value) for file in files for row in read_rows(file)]
    read = time.process_time()
    plain = [text.segments(row) for row in parsed if isinstance(row, str)]
    chats = [chat.segments(row) for row in parsed if not isinstance(row, str)]
    cut = time.process_time()
    text.codec.encode(plain)
    chat.codec.encode(chats)
    return {"preparing": made - begin, "reading and parsing": read - made, "rendering": cut - read, "encoding": time.process_time() - cut}


def runs_of(files: list[Path], folder: Path, texts: list[str]) -> dict[str, Callable[[], object]]:
    """What is measured: loading the tokenizer, and ours and theirs, which load it too."""

    def loading() -> Any:
        return AutoTokenizer.from_pretrained(folder)

    def ours() -> None:
        with tempfile.TemporaryDirectory() as cache:
            tokenize_files(files, folder, cache_dir=cache)

    def theirs() -> None:
        loading().backend_tokenizer.encode_batch(texts, add_special_tokens=False)

    return {"loading": loading, "ours": ours, "theirs": theirs}


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of the processors."""
    begin = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def alone(name: str, files: list[Path], folder: Path) -> tuple[float, float]:
    """One run in a process that has done nothing but read the files and import what rendering needs."""
    return measured(runs_of(files, folder, rendered(AutoTokenizer.from_pretrained(folder), files))[name])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=Path, default=Path(os.environ.get("REAL_INPUTS", "real_inputs")))
    parser.add_argument("--tokenizer", default="qwen3-tokenizer", help="folder under inputs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fresh", action="store_true", help="each run in a process of its own")
    args = parser.parse_args()
    files = sorted([*(args.inputs / "text").iterdir(), *(args.inputs / "chat").iterdir()])
    folder = args.inputs / args.tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = rendered(tokenizer, files)

    runs = runs_of(files, folder, texts)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(args.rounds + (not args.fresh)):
        for name, run in runs.items():
            if args.fresh:
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    times[name].append(process.submit(alone, name, files, folder).result())
            elif (spent := measured(run)) and turn:  # the first warms up
                times[name].append(spent)
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts)} documents, {size:.1f} MB of text, {os.cpu_count()} cores")
    for k, clock in enumerate(("clock", "processors")):
        load, mine, other = (statistics.median(spent[k] for spent in times[name]) for name in runs)
        mine, other = mine - load, other - load
        rates = f"ours {size / mine:.2f} MB/s, tokenizers {size / other:.2f} MB/s"
        print(f"{clock}: ours {mine:.2f} s, tokenizers {other:.2f} s, loading {load:.2f} s; {rates}; ratio of rates {other / mine:.2f}")
    spent = [steps(AutoTokenizer.from_pretrained(folder), files) for _ in range(args.rounds)]
    print("steps: " + ", ".join(f"{name} {statistics.median(each[name] for each in spent):.3f} s" for name in spent[0]))


if __name__ == "__main__":
    main()
