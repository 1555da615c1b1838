"""Rate of the whole way from data files to cached tokens, against `tokenizers`' own batch encoding of the same texts.

    python benchmarks/tokenize_files.py --inputs real_inputs --rounds 5

Ours reads, parses, renders, finds what is learned, encodes and writes the cache; theirs is handed the finished texts. Each run starts
with a tokenizer just loaded (a used one remembers words); that time is taken off. Prints the median seconds of each, by the clock and
of the processors, runs of the two taking turns, and ours as a multiple of their rate: above 1 is faster. On a machine that is busy only the
processors' time says something.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=Path, default=Path(os.environ.get("REAL_INPUTS", "real_inputs")))
    parser.add_argument("--tokenizer", default="qwen3-tokenizer", help="folder under inputs")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    files = sorted([*(args.inputs / "text").iterdir(), *(args.inputs / "chat").iterdir()])
    folder = args.inputs / args.tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = rendered(tokenizer, files)

    def loading() -> None:
        AutoTokenizer.from_pretrained(folder)

    def ours() -> None:
        with tempfile.TemporaryDirectory() as cache:
            tokenize_files(files, folder, cache_dir=cache)

    def theirs() -> None:
        AutoTokenizer.from_pretrained(folder).backend_tokenizer.encode_batch(texts, add_special_tokens=False)

    runs: dict[str, Callable[[], None]] = {"loading": loading, "ours": ours, "theirs": theirs}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(args.rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter(), time.process_time()
            run()
            if turn:  # the first warms up
                times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts)} documents, {size:.1f} MB of text, {os.cpu_count()} cores")
    for k, clock in enumerate(("clock", "processors")):
        load, mine, other = (statistics.median(spent[k] for spent in times[name]) for name in runs)
        mine, other = mine - load, other - load
        rates = f"ours {size / mine:.2f} MB/s, tokenizers {size / other:.2f} MB/s"
        print(f"{clock}: ours {mine:.2f} s, tokenizers {other:.2f} s, loading {load:.2f} s; {rates}; ratio of rates {other / mine:.2f}")


if __name__ == "__main__":
    main()
