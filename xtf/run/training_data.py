"""Data of the built-in recipe: files of conversations or text, and the text that ships with xtf."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from xtf.batch import cut_rows
from xtf.data import Documents, PackedBatches, Source, Tokens, batches, held_out_batches, unigram_entropy, windows
from xtf.data.batches import Packing, taught
from xtf.data.pipeline import Part, Tokenized, tokenize_files
from xtf.files import default_cache_dir
from xtf.mesh import Mesh
from xtf.run.ranks import say, together
from xtf.run.recipe import Opened

Learn = Literal["answers", "everything"]
"""What of a conversation is learned."""


@dataclass(frozen=True)
class FileData:
    """Files of conversations or of text, tokenised once, packed into rows.

    A conversation longer than a row loses its end; a text is split. What is held out is never trained on.

    With ``mix`` files are drawn from with these weights, each in its own epochs; without, every document of all files stands once
    in an epoch.

    Args:
        files: to train on: JSONL, JSON or Parquet (see `xtf.data`).
        tokenizer: the folder of the tokenizer.
        rows: of a global batch.
        seq: tokens of a row.
        seed: of the order.
        held_out: documents at the end of each file that are evaluated on, where ``eval_files`` has none.
        eval_files: to evaluate on.
        template: a chat template: a file, or the name of one that ships; by default the tokenizer's own.
        skip_bad_lines: whether lines that cannot be read are skipped, counted and listed.
        special_tokens_in_text: whether a text that looks like a special token becomes one.
        cache: the folder where tokens are kept.
        packing: how documents are laid into rows (`xtf.data.PackedBatches`).
        mix: how often each file is drawn from, a weight for each; none draws every document as often.
        loss_weights: what the loss weights of each file's documents are multiplied by; none leaves them.
        learn: what of each file is learned: what the assistant says (of a text, all), or everything; none is the former for all.
    """

    files: tuple[Path, ...]
    tokenizer: Path
    rows: int
    seq: int
    seed: int = 0
    held_out: int = 64
    eval_files: tuple[Path, ...] = ()
    template: str | None = None
    skip_bad_lines: bool = False
    special_tokens_in_text: bool = False
    cache: Path | None = None
    packing: Packing = "best_fit"
    mix: tuple[float, ...] = ()
    loss_weights: tuple[float, ...] = ()
    learn: tuple[Learn, ...] = ()

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("there is no data file to train on: give at least one")
        if self.rows < 1 or self.seq < 2 or self.held_out < 0:
            raise ValueError(f"rows={self.rows}, seq={self.seq}, held_out={self.held_out}: expected at least 1, 2 and 0")
        for name, given in (("mix", self.mix), ("loss-weights", self.loss_weights), ("learn", self.learn)):
            if given and len(given) != len(self.files):
                raise ValueError(
                    f"--{name} has {len(given)} values for {len(self.files)} data files: give one for each, in the order of --data"
                )
        for name, given in (("mix", self.mix), ("loss-weights", self.loss_weights)):
            if not all(0 < value < math.inf for value in given):
                raise ValueError(f"--{name} is {', '.join(map(str, given))}: expected finite numbers above 0")
        missing = [str(path) for path in (*self.files, *self.eval_files) if not path.is_file()]
        if missing:
            what = "is a folder" if Path(missing[0]).is_dir() else "does not exist"
            raise ValueError(f"the data file {missing[0]} {what}: give JSONL, JSON or Parquet files")

    def describe(self) -> dict[str, str]:
        """What ``xtf train --print`` says."""
        size = sum(path.stat().st_size for path in self.files)
        held = ", ".join(map(str, self.eval_files)) or f"the last {self.held_out} documents of each file"
        said = {"data": f"{', '.join(map(str, self.files))} ({size / 1e6:.1f} MB)"}
        if self.mix:
            shares = zip(self.files, self.mix, strict=True)
            said["mix"] = ", ".join(f"{weight / sum(self.mix):.1%} {path.name}" for path, weight in shares)
        return said | {"held out": held, "tokenizer": str(self.tokenizer)}

    def open(self, mesh: Mesh, console: Console) -> Opened:
        """Tokenise what is not in the cache yet, and pack. The first rank tokenises, the others then find its work."""
        first = together(mesh, lambda: self._tokenize(console), ranks=lambda rank: rank == 0)
        rest = together(mesh, lambda: self._tokenize(console), ranks=lambda rank: rank > 0)
        tokenized = first or rest
        assert tokenized is not None  # every rank is among the one or the others
        train, held = tokenized
        skipped = (*train.skipped, *(held.skipped if held is not None else ()))
        for item in skipped:
            say(console, f"skipped {item.path}, {item.unit} {item.line}: {item.reason}")
        kept, apart = self._parts(train, 0 if held is not None else self.held_out)
        useful = [self._useful(part) for part in kept]
        packed, lost = Documents.join([documents for documents, _ in useful]), sum(count for _, count in useful)
        documents = sum(len(part) for part in kept)
        outside = Documents.join(apart) if held is None else held.documents
        evaluated, missing = self._useful(outside)
        if lost or missing:
            where = f"nothing in the first {self.seq} tokens is learned"
            say(console, f"left out, because {where}: {lost:,} of {documents:,} documents, {missing:,} of {len(outside):,} held out")
        sources = self._sources([part for part, _ in useful]) if self.mix else ()
        chosen = PackedBatches(packed, rows=self.rows, seq=self.seq, seed=self.seed, packing=self.packing, sources=sources)
        about: dict[str, Any] = {
            "files": [str(path) for path in self.files],
            "documents": len(packed),
            "tokens": packed.tokens,
            "held_out_documents": len(evaluated),
            "held_out_tokens": evaluated.tokens,
            "skipped_lines": len(skipped),
            "left_out_documents": lost,
        }
        if sources:
            about["sources"] = [{"name": s.name, "documents": s.documents, "weight": s.weight} for s in sources]
        held_out_says = f"held out {len(evaluated):,} documents, {evaluated.tokens:,} tokens"
        say(console, f"{len(packed):,} documents, {packed.tokens:,} tokens; {held_out_says}")

        def held_out(rank: int, ranks: int) -> Iterable[Mapping[str, Tensor]]:
            return held_out_batches(evaluated, rows=self.rows, seq=self.seq, rank=rank, ranks=ranks)

        max_id = max(train.max_id, held.max_id if held is not None else 0)
        return Opened(chosen, held_out, max_id, about, partial(named_documents, chosen, train.parts))

    def _tokenize(self, console: Console) -> tuple[Tokenized, Tokenized | None]:
        def tokens(files: Sequence[Path]) -> Tokenized:
            with tokenizing(console) as progress:
                return tokenize_files(
                    files,
                    self.tokenizer,
                    cache_dir=self.cache or default_cache_dir(),
                    template=self.template,
                    skip_bad_lines=self.skip_bad_lines,
                    special_tokens_in_text=self.special_tokens_in_text,
                    progress=progress,
                )

        return tokens(self.files), tokens(self.eval_files) if self.eval_files else None

    def _parts(self, tokenized: Tokenized, count: int) -> tuple[list[Documents], list[Documents]]:
        """Of each file, its documents without the last ``count``, and these; with the file's own loss settings."""
        kept: list[Documents] = []
        apart: list[Documents] = []
        for index, part in enumerate(tokenized.parts):
            if part.documents <= count:
                raise ValueError(
                    f"{part.path} has {part.documents} documents, {count} are to be held out: give --held-out a smaller number"
                )
            factor = self.loss_weights[index] if self.loss_weights else 1.0
            everything = bool(self.learn) and self.learn[index] == "everything"
            end = part.first + part.documents
            for into, span in ((kept, range(part.first, end - count)), (apart, range(end - count, end))):
                into.append(tokenized.documents.select(span).weighted(factor, everything=everything))
        return kept, apart

    def _sources(self, parts: Sequence[Documents]) -> tuple[Source, ...]:
        """The files as sources; those of one name are told apart by their numbers."""
        names = [path.stem for path in self.files]
        names = [name if names.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(names, 1)]
        return tuple(Source(*of) for of in zip(names, map(len, parts), self.mix, strict=True))

    def _useful(self, documents: Documents) -> tuple[Documents, int]:
        """Documents that fit into a row, and how many have nothing to learn and are left out."""
        whole = documents.limited(self.seq, long="auto")
        useful = taught(whole)
        return whole.select(np.flatnonzero(useful)), int((~useful).sum())


def named_documents(batches: PackedBatches, parts: Sequence[Part], step: int, rank: int, ranks: int) -> dict[str, list[int]]:
    """The documents that a rank has in a step, in their order: the numbers of each file's own."""
    members, each = batches.members(step), -(-batches.rows // ranks)
    own = np.concatenate([np.zeros(0, np.int64), *members[rank * each : (rank + 1) * each]])
    numbers, firsts = batches.documents.origin(own), [part.first for part in parts]
    found: dict[str, list[int]] = {}
    for number in map(int, numbers):
        at = bisect_right(firsts, number) - 1
        found.setdefault(parts[at].path, []).append(number - firsts[at])
    return found


@contextlib.contextmanager
def tokenizing(console: Console) -> Generator[Callable[[int, int], None]]:
    """A progress bar for tokenising, which appears with the first news of it; none where nothing is said."""
    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=None)

    def progress(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        bar.stop()


class _Windows:
    """Random windows of one text (`xtf.data.batches`), for each rank its rows."""

    def __init__(self, tokens: Tensor, rows: int, seq: int, seed: int) -> None:
        self._tokens, self._rows, self._seq = len(tokens), rows, seq
        self._at = batches(tokens, batch=rows, seq=seq, seed=seed)

    def __call__(self, step: int, rank: int = 0, ranks: int = 1) -> Mapping[str, Tensor]:
        return cut_rows(self._at(step), ranks, rank)

    def lengths(self, step: int, ranks: int = 1) -> list[npt.NDArray[np.int64]]:
        each = -(-self._rows // ranks)
        counts = [max(0, min(each, self._rows - rank * each)) for rank in range(ranks)]
        return [np.full(count, self._seq, np.int64) for count in counts]

    def epoch(self, step: int) -> float:
        return step * self._rows * self._seq / self._tokens

    def epochs(self, step: int) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class DemoText:
    """ "Pride and Prejudice", which ships with xtf: random windows of it, its last twentieth held out.

    Args:
        rows: of a global batch.
        seq: tokens of a row.
        seed: of the windows.
    """

    rows: int
    seq: int
    seed: int = 0

    def describe(self) -> dict[str, str]:
        """What ``xtf train --print`` says."""
        text = '"Pride and Prejudice", which ships with xtf'
        return {"data": text, "held out": "its last 5 %", "tokenizer": "the one that ships with xtf"}

    def open(self, mesh: Mesh, console: Console) -> Opened:
        """Tokenise the text."""
        tokens = Tokens.demo()
        chosen = _Windows(tokens.train, self.rows, self.seq, self.seed)

        def held_out(rank: int, ranks: int) -> Iterable[Mapping[str, Tensor]]:
            return (cut_rows(batch, ranks, rank) for batch in windows(tokens.held_out, batch=self.rows, seq=self.seq))

        about: dict[str, Any] = {
            "tokens": len(tokens.train),
            "held_out_tokens": len(tokens.held_out),
            "vocab": tokens.vocab,
            "unigram_entropy": unigram_entropy(tokens.held_out, tokens.train, tokens.vocab),
        }
        say(console, f"{len(tokens.train):,} tokens of text, {len(tokens.held_out):,} held out")
        return Opened(chosen, held_out, tokens.vocab - 1, about)
