"""``xtf data inspect``: how long documents are, and what packing makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tyro
from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import xtf
from xtf.data import (
    Documents,
    Plan,
    best_fit_packing,
    concatenate_and_cut,
    document_cost,
    greedy_packing,
    length_grouped,
    plan_batches,
)
from xtf.data.cost import Cost
from xtf.run.data_source import DataOptions, read, wide_console
from xtf.run.figure import BLUE, COLORS, GREEN, INK, LINE, ORANGE, new_figure, style, write_png
from xtf.run.standard import is_preset

METHODS: dict[str, Callable[..., Plan]] = {
    "concatenate and cut": concatenate_and_cut,
    "greedy": greedy_packing,
    "best fit": best_fit_packing,
    "length grouped": length_grouped,
    "balanced": plan_batches,
}
"""How documents can be packed, by what the table calls it."""


_MOST_RANKS = 16_384


@dataclass(frozen=True)
class InspectOptions(DataOptions):
    """Lengths of documents, and what packing will do: how full rows are, and how long ranks wait for the slowest."""

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="")] = ()
    """JSONL, JSON or Parquet of conversations or of texts, as for training."""
    ranks: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT [INT ...]")] = (2, 8, 64)
    """Numbers of ranks to plan for, each with one row in a step."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = Path("lengths.png")
    """The picture of lengths and waits."""

    def check(self) -> None:
        super().check()
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"--ranks is {', '.join(map(str, self.ranks)) or 'empty'}: expected numbers of at least 1")
        if max(self.ranks) > _MOST_RANKS:
            raise ValueError(f"--ranks is {max(self.ranks)}: plans are shown for up to {_MOST_RANKS:,} ranks")
        if self.out is not None and self.out.suffix.lower() != ".png":
            raise ValueError(f"--out {self.out}: expected a file name that ends in .png")


class FileLengths(NamedTuple):
    """The documents of one file.

    Args:
        name: of the file.
        lengths: (documents,), tokens of each.
        learned: tokens that are targets with a weight.
        longer: documents with more tokens than a row.
    """

    name: str
    lengths: npt.NDArray[np.int64]
    learned: int
    longer: int


class Waits(NamedTuple):
    """A way to pack, for one number of ranks.

    Args:
        steps: that are full.
        fill: tokens ÷ what the rows of these steps could hold.
        imbalance: mean over these steps of the slowest rank ÷ the mean rank.
        bubble: the share of all ranks' time that is spent waiting for the slowest of each step, from 0 to 1.
    """

    steps: int
    fill: float
    imbalance: float
    bubble: float


def waits(plan: Plan, cost: Cost) -> Waits:
    """What a plan of one pack for each rank makes ranks wait.

    Example:
        >>> waits(plan_batches([4, 4, 2, 2], max_tokens=4, data_ranks=2), Cost(1.0))
        Waits(steps=1, fill=1.0, imbalance=1.0, bubble=0.0)
    """
    if not plan.full:
        return Waits(0, 0.0, 1.0, 0.0)
    found, ranks = plan.balance(cost), plan.totals(cost(plan.flat.lengths))[: plan.full].sum(axis=2)
    return Waits(found.steps, found.fill, found.imbalance, 1 - float(ranks.mean(axis=1).sum() / ranks.max(axis=1).sum()))


def run(options: InspectOptions, *, console: Console | None = None) -> dict[str, dict[int, Waits]]:
    """Print what files hold and what packing makes of them, and draw it.

    Args:
        options: what to look at.
        console: where tables are printed; by default standard output.

    Returns:
        Of each method of `METHODS`, and each number of ranks, how much is waited.

    Raises:
        ValueError: for options that are not possible, and files, a model or a tokenizer that cannot be read or used.
    """
    options.check()
    console = console or wide_console()
    tokenized = read(options, options.files)
    model = xtf.models.preset(options.model) if is_preset(options.model) else xtf.models.from_hf(options.model)
    cost = document_cost(model)
    spans = [tokenized.documents.select(range(part.first, part.first + part.documents)) for part in tokenized.parts]
    files = [_lengths(Path(part.path).name, of, options.seq) for part, of in zip(tokenized.parts, spans, strict=True)]
    pieces = Documents.join([of.limited(options.seq, long="auto") for of in spans]).lengths
    pieces = pieces[pieces > 1]
    if not len(pieces):
        raise ValueError("no document has at least 2 tokens: there is nothing to train on")
    found: dict[str, dict[int, Waits]] = {}
    for name, method in METHODS.items():
        found[name] = {}
        for ranks in options.ranks:
            more: dict[str, Any] = {"cost": cost} if method is plan_batches else {}
            plan = method(pieces, max_tokens=options.seq, data_ranks=ranks, seed=options.seed, **more)
            found[name][ranks] = waits(plan, cost)
    cost_of = f"FLOPs of {options.model if is_preset(options.model) else Path(options.model).name}"
    console.print(_headed("Documents", "in tokens", _documents_table(files, options.seq)))
    console.print(_headed("Packing", f"rows of {options.seq:,} tokens, one for each rank and step", _packing_table(found, options)))
    missing = any(not of.steps for by in found.values() for of in by.values())
    console.print(Padding(Text(_LEGEND.format(cost_of) + ("; – less than one full step" if missing else ""), "dim italic"), (0, 2)))
    console.print(_advice(found))
    if tokenized.skipped:
        console.print(Text(f"  {len(tokenized.skipped):,} lines were skipped: they cannot be read", "yellow"))
    if options.out is not None:
        draw(files, found, options.seq, options.out)
        console.print(Text.assemble("\n  ", (str(options.out), "bold"), ("  lengths and waits as a picture", "dim")), soft_wrap=True)
    return found


def _lengths(name: str, documents: Documents, seq: int) -> FileLengths:
    learned = sum(int((documents[index].weights[1:] > 0).sum()) for index in range(len(documents)))
    return FileLengths(name, documents.lengths, learned, int((documents.lengths > seq).sum()))


_LEGEND = (
    "full: tokens ÷ room in the rows. For each number of ranks: slowest ÷ mean rank of a step, and the share of all ranks' time that is "
    "spent waiting for the slowest. Cost of a document: {}"
)


def _headed(title: str, about: str, table: Table) -> Padding:
    return Padding(Group(Text.assemble((title, "bold"), ("  " + about, "dim")), table), (1, 0, 0, 2))


def _documents_table(files: Sequence[FileLengths], seq: int) -> Table:
    table = _table()
    table.add_column("file", no_wrap=True, overflow="ellipsis")
    for name in ("documents", "tokens", "learned", "median", "mean", "longest", f"over {seq:,}"):
        table.add_column(name, justify="right", no_wrap=True)
    every = [*files]
    if len(files) > 1:
        joined = np.concatenate([file.lengths for file in files])
        every.append(FileLengths("all", joined, sum(f.learned for f in files), sum(f.longer for f in files)))
    for file in every:
        lengths, tokens = file.lengths, int(file.lengths.sum())
        numbers = [f"{len(lengths):,}", f"{tokens:,}", f"{file.learned / max(1, tokens):.0%}", f"{np.median(lengths):,.0f}"]
        numbers += [f"{lengths.mean():,.0f}", f"{int(lengths.max()):,}", f"{file.longer:,}" if file.longer else "–"]
        if file.name == "all" and len(files) > 1:
            table.add_section()
        table.add_row(Text(file.name), *numbers, style="bold" if file.name == "all" and len(files) > 1 else "")
    return table


def _packing_table(found: dict[str, dict[int, Waits]], options: InspectOptions) -> Table:
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("full", justify="right", no_wrap=True)
    for ranks in options.ranks:
        table.add_column(f"{ranks} rank{'s' * (ranks > 1)}", justify="right", no_wrap=True)
        table.add_column("waits", justify="right", no_wrap=True)
    for name, by_ranks in found.items():
        fills = [of.fill for of in by_ranks.values() if of.steps]
        cells: list[Text] = [Text(_floored(float(np.mean(fills))) if fills else "–")]
        for of in by_ranks.values():
            cells.append(Text(f"{of.imbalance:.3f}" if of.steps else "–"))
            cells.append(Text(f"{of.bubble:.1%}", _colour(of.bubble)) if of.steps else Text("–"))
        table.add_row(Text(name), *cells, style="bold" if name == "balanced" else "")
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="dim")


def _floored(share: float) -> str:
    """A share that says 100% only where nothing is missing."""
    return f"{np.floor(share * 1000 + 1e-9) / 10:.1f}%"


def _colour(bubble: float) -> str:
    return "green" if bubble < 0.02 else "yellow" if bubble < 0.1 else "red"


def _advice(found: dict[str, dict[int, Waits]]) -> Padding:
    """What balanced rows gain over those of ``xtf train`` by default, or that there is too little for a step."""
    before, after = found["best fit"], found["balanced"]
    shown = [ranks for ranks in after if after[ranks].steps and before[ranks].steps]
    if not shown:
        said = Text("too few documents for a full step: fewer ranks, or shorter rows (--seq), would fill one", "yellow")
    else:
        ranks = max(shown)
        more = (1 - after[ranks].bubble) / (1 - before[ranks].bubble) - 1
        what = f"{ranks} rank{'s' * (ranks > 1)} with balanced rows do "
        flag = ("xtf train --packing balanced", "bold")
        said = Text.assemble(what, (f"{more:.1%} more", "bold"), " in the same time than with those of best fit:\n", flag)
    return Padding(said, (1, 0, 0, 2))


def draw(files: Sequence[FileLengths], found: dict[str, dict[int, Waits]], seq: int, out: Path) -> Path:
    """The picture: on the left how tokens are spread over lengths, on the right how long ranks wait."""
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    longest = max(int(file.lengths.max()) for file in files)
    shortest = max(1, min(int(file.lengths.min()) for file in files))
    edges = np.geomspace(shortest, max(longest, shortest + 1) * 1.001, 49)
    for axes in (left, right):
        style(axes)
    shown = [(file.lengths, file.name, color) for file, color in zip(files, COLORS, strict=False)]
    if len(files) > len(COLORS):
        shown = [(np.concatenate([file.lengths for file in files]), f"{len(files)} files", BLUE)]
    left.hist(
        [lengths for lengths, _, _ in shown], bins=edges, stacked=True, color=[color for _, _, color in shown],
        label=[name for _, name, _ in shown], edgecolor="white", linewidth=0.4,
    )  # fmt: skip
    left.set_xscale("log")
    left.axvline(seq, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    left.annotate(
        f" row: {seq:,}", (seq, 1), (0, -3), xycoords=("data", "axes fraction"), textcoords="offset points", va="top", fontsize=8.5
    )
    left.set_title("documents by length (tokens)", loc="left", fontsize=10, color=INK)
    left.legend(frameon=False, fontsize=8.5, loc="upper left")
    _log_ticks(left, (1, 2, 5) if longest < 300 * shortest else (1, 3))
    names = [name for name in found if any(of.steps for of in found[name].values())]
    for name, color in zip(names, (LINE, ORANGE, GREEN, "#b8860b", BLUE), strict=False):
        points = [(ranks, 100 * of.bubble) for ranks, of in sorted(found[name].items()) if of.steps]
        width = 2.6 if name == "balanced" else 1.5
        right.plot(*zip(*points, strict=True), marker="o", markersize=5, linewidth=width, color=color, label=name, clip_on=False)
    right.set_xscale("log", base=2)
    ranks = sorted({ranks for by in found.values() for ranks in by})
    right.set_xticks(ranks, [f"{n:,}" for n in ranks])
    right.minorticks_off()
    right.set_ylim(bottom=0)
    right.set_xlabel("ranks", fontsize=9, color=INK)
    right.set_title("time waited for the slowest rank (%)", loc="left", fontsize=10, color=INK)
    if names:
        right.legend(frameon=False, fontsize=8.5, loc="best")
    return write_png(figure, out)


def _log_ticks(axes: Any, steps: Sequence[int]) -> None:
    low, high = axes.get_xlim()
    ticks = [m * 10**e for e in range(9) for m in steps if low <= m * 10**e <= high]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
