"""``xtf eval``: the loss of a checkpoint on files, and the log-probability of every token that it had to predict."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from xtf.data import Documents, default_cache_dir, tokenize_files
from xtf.files import write_atomically
from xtf.run.scoring import Long, Result, Scored, check_sizes, evaluate_documents
from xtf.run.source import DtypeName, Loaded, Prefer, find, load_checkpoint, load_tokenizer, note


@dataclass(frozen=True)
class EvalOptions:
    """Loss, perplexity and token log-probabilities of a checkpoint on files of text or conversations."""

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """A Hugging Face folder, the folder of a run, or a training checkpoint."""
    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")]
    """JSONL or Parquet of conversations or of texts, as for training."""
    batch_tokens: int = 4096
    """Tokens that go through the model at a time: less needs less memory."""
    seq: int | None = None
    """The longest piece of a document, in tokens. By default the model's context, at most --batch-tokens."""
    long: Long = "split"
    """What happens to longer documents: split into pieces that do not see each other, or cut."""
    logprobs: Annotated[Path | None, tyro.conf.arg(metavar="OUT.jsonl")] = None
    """Also write a line per document: its file, number, ids, and the log-probability (nats) of each id, null where it is no
    target."""
    json: bool = False
    """Print the result as JSON instead of a table."""
    template: str | None = None
    """Chat template: a .jinja file or the name of one that ships with xtf. By default the tokenizer's own."""
    skip_bad_lines: bool = False
    """Skip lines that cannot be read; they are listed."""
    special_tokens_in_text: bool = False
    """Let texts that look like special tokens become these."""
    cache: Path | None = None
    """Folder where tokenised files are kept. By default in the user's cache folder."""
    prefer: Prefer = "best"
    """Which checkpoint of a run's folder: the one of the lowest held-out loss, or the last."""
    dtype: DtypeName | None = None
    """Of the parameters. By default float32 on a CPU, and the checkpoint's own on a GPU."""
    device: str | None = None
    """As cpu, cuda or cuda:1. By default a GPU where there is one."""

    def check(self) -> None:
        """Raise `ValueError` for options that are not possible."""
        if not self.files:
            raise ValueError("there is no FILE to evaluate: give at least one")
        check_sizes(self.batch_tokens, self.seq, ("--batch-tokens", "--seq"))
        if self.logprobs is not None and any(self.logprobs.resolve() == file.resolve() for file in self.files):
            raise ValueError(f"--logprobs {self.logprobs} would overwrite a file that is evaluated: give another path")


def run(options: EvalOptions, *, console: Console | None = None) -> dict[str, Result]:
    """Evaluate files and print what was found.

    Args:
        options: what to do.
        console: where the table is printed; by default standard output.

    Returns:
        The result of each file, and of all under ``"total"``.

    Raises:
        ValueError: for options that are not possible, and files, a checkpoint or a tokenizer that cannot be read or used.
    """
    options.check()
    folder = find(options.checkpoint, options.prefer)
    if folder != options.checkpoint:
        note(f"checkpoint {folder}")
    tokenizer = load_tokenizer(folder)
    sets = _read(options, folder)
    loaded = load_checkpoint(folder, dtype=options.dtype, device=options.device)
    results: dict[str, Result] = {}
    with ExitStack() as stack:
        out = None if options.logprobs is None else stack.enter_context(write_atomically(options.logprobs))
        progress = stack.enter_context(_progress())
        task = progress.add_task("documents", total=sum(len(part.documents) for part in sets))
        for part in sets:

            def each(done: Scored, name: str = part.name) -> None:
                if out is not None:
                    _write_line(out, name, done)
                progress.advance(task)

            results[part.name] = _evaluate(loaded, part, options, tokenizer, each)
    total = sum(results.values(), Result())
    if not total.weight:
        raise ValueError(
            "no document has a token to predict, so there is no loss: give files with text of at least 2 tokens, or with answers"
        )
    if options.json:
        shown = {"checkpoint": str(folder), "files": {name: result.row() for name, result in results.items()}, "total": total.row()}
        sys.stdout.write(json.dumps(shown, indent=2, allow_nan=False) + "\n")
    else:
        (console or Console()).print(_table(results, total))
    return results | {"total": total}


class _File(NamedTuple):
    name: str
    documents: Documents


def _read(options: EvalOptions, tokenizer: Path) -> list[_File]:
    """The documents of each file, tokenised once and kept in the cache."""
    found = tokenize_files(
        options.files,
        tokenizer,
        cache_dir=options.cache or default_cache_dir(),
        template=options.template,
        skip_bad_lines=options.skip_bad_lines,
        special_tokens_in_text=options.special_tokens_in_text,
    )
    for row in found.skipped:
        note(f"skipped {row.path}, {row.unit} {row.line}: {row.reason}")
    return [_File(part.path, found.documents.select(range(part.first, part.first + part.documents))) for part in found.parts]


def _evaluate(loaded: Loaded, part: _File, options: EvalOptions, tokenizer: Any, each: Callable[[Scored], object]) -> Result:
    def text(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    return evaluate_documents(
        loaded.model,
        loaded.params,
        part.documents,
        batch_tokens=options.batch_tokens,
        seq=options.seq,
        long=options.long,
        text=text,
        each=each,
    )


def _write_line(out: BinaryIO, name: str, done: Scored) -> None:
    values = [float(f"{value:.9g}") if target else None for value, target in zip(done.logprobs, done.targets, strict=True)]
    row = {"file": name, "document": done.number, "ids": done.ids.tolist(), "logprobs": values}
    out.write((json.dumps(row, allow_nan=False) + "\n").encode())


def _progress() -> Progress:
    """A live line in a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _table(results: dict[str, Result], total: Result) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("file", overflow="fold")
    for name in ("loss", "perplexity", "bits/byte", "supervised", "tokens", "documents"):
        table.add_column(name, justify="right", no_wrap=True)
    short = [Path(name).name for name in results]
    names = short if len(set(short)) == len(short) else list(results)
    rows = [*zip(names, results.values(), strict=True), *([("total", total)] if len(results) > 1 else [])]
    for name, result in rows:
        per_byte = result.bits_per_byte
        table.add_row(
            name,
            f"{result.loss:.4f}" if result.weight else "-",
            f"{result.perplexity:,.2f}" if result.weight else "-",
            "-" if per_byte is None else f"{per_byte:.4f}",
            f"{result.tokens:,}",
            f"{result.all_tokens:,}",
            f"{result.documents:,}",
            style="bold" if name == "total" else None,
        )
    return table
