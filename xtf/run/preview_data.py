"""``xtf data preview``: one packed sequence as text, with what is learned of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from xtf.data import Document, Documents, PackedBatches
from xtf.data.batches import Packing
from xtf.run.data_source import DataOptions, read, tokenizer_of, wide_console
from xtf.run.source import load_tokenizer

_LEARNED, _OTHER, _CONTEXT = "bold green", "bold yellow", "dim"


@dataclass(frozen=True)
class PreviewOptions(DataOptions):
    """A packed sequence as text: what is learned is coloured, or stands between ⟦ and ⟧ where there are no colours."""

    file: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """JSONL, JSON or Parquet of conversations or of texts, as for training."""
    row: Annotated[int, tyro.conf.arg(metavar="INT")] = 0
    """Which sequence, in the order of training."""
    document: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Instead of a sequence, the document of this number of FILE, from 0, whole: what skipped.jsonl of a run names."""
    packing: Packing = "best_fit"
    """How documents are laid into rows, as for training."""
    tokens: bool = False
    """Show where tokens begin and end."""

    def check(self) -> None:
        super().check()
        if self.row < 0:
            raise ValueError(f"--row is {self.row}, expected at least 0")
        if self.document is not None and self.document < 0:
            raise ValueError(f"--document is {self.document}, expected at least 0")


def run(options: PreviewOptions, *, console: Console | None = None) -> Text:
    """Print a packed sequence.

    Args:
        options: of which file, which one.
        console: where it is printed; by default standard output.

    Returns:
        What is printed between the first and the last line.

    Raises:
        ValueError: for options that are not possible, and a file or a tokenizer that cannot be read or used.
    """
    options.check()
    console = console or wide_console()
    if options.file is None:
        raise ValueError("there is no FILE to look at: give a JSONL, JSON or Parquet file")
    files = (options.file,)
    documents, members, name, seq = _chosen(options, read(options, files).documents)
    tokenizer = load_tokenizer(tokenizer_of(options, files))
    marks, shown = console.color_system is None, Text()
    used = learned = 0
    console.print(Rule(Text(f"{files[0].name}, {name} of {seq:,} tokens", "bold"), style="dim"))
    for document in documents.read(members):
        targets = int((document.weights[1:] > 0).sum())
        used, learned = used + len(document.ids), learned + targets
        text = painted(document, tokenizer, marks=marks, tokens=options.tokens)
        head = Text(f"▍{len(document.ids):,} tokens, {targets:,} learned", "cyan")
        console.print(head, soft_wrap=True)
        console.print(text, soft_wrap=True)
        console.print()
        shown = Text.assemble(shown, head, "\n", text, "\n")
    rest = seq - used
    console.print(Rule(style="dim"))
    said = f"{len(members):,} document{'s' * (len(members) != 1)}, {used:,} tokens ({used / max(1, seq):.1%} full): "
    shares = (f" {learned:,} ({learned / max(1, used):.0%}), ", ("context", _CONTEXT), f" {used - learned:,}; padding {rest:,}")
    console.print(Text.assemble(said, ("learned", _LEARNED), *shares), soft_wrap=True)
    return shown


def _chosen(options: PreviewOptions, documents: Documents) -> tuple[Documents, Sequence[int], str, int]:
    """Documents, the indices of those to be shown, what these are called, and the tokens there is room for."""
    if options.document is not None:
        if options.document >= len(documents):
            raise ValueError(f"--document is {options.document}, {options.file} has {len(documents)} documents: 0 to {len(documents) - 1}")
        return documents, [options.document], f"document {options.document:,}", int(documents.lengths[options.document])
    limited = documents.limited(options.seq, long="auto")
    chosen = PackedBatches(limited, rows=1, seq=options.seq, seed=options.seed, packing=options.packing)
    (members,) = chosen.members(options.row)
    return limited, members.tolist(), f"row {options.row:,}", options.seq


def painted(document: Document, tokenizer: Any, *, marks: bool = False, tokens: bool = False) -> Text:
    """A document as text: green and bold what is learned, yellow what is learned with a weight other than 1, dim what is not learned.

    Args:
        document: what to show.
        tokenizer: that its ids are of.
        marks: put what is learned between ⟦ and ⟧, with its weight where that is not 1.
        tokens: put a bar between tokens.
    """
    text = Text()
    for weight, part in _runs(document):
        words = [_visible(tokenizer.decode([i], skip_special_tokens=False)) for i in part] if tokens else []
        said = "│".join(words) if tokens else _visible(tokenizer.decode(part, skip_special_tokens=False))
        if marks and weight:
            said = f"⟦{said}⟧" + ("" if weight == 1 else f"×{weight:g}")
        if tokens and text.plain:
            text.append("│", _CONTEXT)
        text.append(said, _CONTEXT if not weight else _LEARNED if weight == 1 else _OTHER)
    return text


def _runs(document: Document) -> Iterator[tuple[float, list[int]]]:
    """Neighbours of one weight; the first token of a document is never a target."""
    weights = np.concatenate([np.zeros(1), document.weights[1:]]) if len(document.ids) else np.zeros(0)
    at = 0
    for weight, same in groupby(weights.tolist()):
        count = len(list(same))
        yield weight, document.ids[at : at + count].tolist()
        at += count


def _visible(text: str) -> str:
    """Nothing that would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
