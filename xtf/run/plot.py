"""The pictures of a run: its losses, how training went, and how evenly the experts were used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtf.files import parse_json
from xtf.run.experts import plot_experts
from xtf.run.figure import (
    BLUE,
    COLORS,
    GREEN,
    GRID,
    INK,
    LINE,
    ORANGE,
    Series,
    draw,
    largest,
    mark_gaps,
    new_figure,
    plain,
    plain_numbers,
    series,
    smoothed,
    span,
    style,
    thinned,
    without_outliers,
    write_png,
)
from xtf.run.metrics import Row, read_metrics

__all__ = ["plot_experts", "plot_loss", "plot_run", "plot_training", "smoothed"]


def plot_run(folder: str | Path, *, entropy: float | None = None, title: str | None = None) -> list[Path]:
    """Draw every picture that the metrics of a run's folder give: ``loss.png``, ``training.png`` and, with experts, ``experts.png``.

    Args:
        folder: the run's folder.
        entropy: see `plot_loss`; by default what the run's ``run.json`` says, if it does.
        title: see `plot_loss`; by default what ``run.json`` says, or the folder's name.

    Returns:
        The paths of the PNG files.

    Raises:
        ValueError: if the folder has no metrics, or none of them can be drawn.
    """
    folder = Path(folder)
    rows = read_metrics(folder)
    said = _described(folder)
    named, level = title or said[0], said[1] if entropy is None else entropy
    drawn = [
        plot_loss(folder, entropy=level, title=named, rows=rows) if training_loss(rows).finite.any() else None,
        plot_training(folder, title=named, rows=rows),
        plot_experts(folder, title=named, rows=rows),
    ]
    if not any(drawn):
        raise ValueError(f"{folder}: metrics.jsonl has no finite number: there is nothing to draw")
    return [path for path in drawn if path is not None]


def plot_loss(folder: str | Path, *, entropy: float | None = None, title: str | None = None, rows: Sequence[Row] | None = None) -> Path:
    """Draw ``loss.png`` from the ``metrics.jsonl`` of a run's folder.

    The training loss thinly as it was and thickly smoothed, the held-out loss as points, and a dashed line at
    the text's unigram entropy (`xtf.data.unigram_entropy`). A second panel shows the routers' maximal load violation where
    the run has it. All words stand above the panels, where no curve can run through them.

    Args:
        folder: the run's folder. Read are ``cross_entropy`` (the loss without auxiliary losses; ``loss`` where it is missing),
            ``held_out_loss`` and ``load_violation`` (of several layers, the largest), each in the rows that have it.
        entropy: nats per token of the dashed line, or ``None`` for no line.
        title: of the picture.
        rows: the run's metrics, where they have been read already.

    Returns:
        The path of the PNG file.

    Raises:
        ValueError: if the folder has no metrics, or no step with a loss.
    """
    rows = read_metrics(folder) if rows is None else rows
    train, held_out, load = training_loss(rows), series(rows, "held_out_loss"), series(rows, "load_violation")
    if not train.finite.any():
        raise ValueError(f"{folder}: metrics.jsonl has no step with a finite loss: there is nothing to draw")
    figure = new_figure(8, 5.4 if load.finite.any() else 4.5)
    if load.finite.any():
        top, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
        style(below)
        draw(below, load, GREEN)
        without_outliers(below, load, bottom=0)
        below.set_ylabel("load\nviolation")
        below.set_title("busiest expert over the mean, minus 1", loc="left", fontsize=9, color=LINE)
    else:
        top = figure.subplots()
    style(top)
    draw(top, train, BLUE, "training")
    if held_out.finite.any():
        top.plot(*held_out, color=ORANGE, linewidth=1, linestyle=(0, (1, 2)))
        last = f"held-out ({held_out.values[held_out.finite][-1]:.2f} at the end)"
        size = 5 if len(held_out.steps) <= 60 else 2.5
        top.plot(*held_out, "o", color=ORANGE, markersize=size, markeredgecolor="white", markeredgewidth=0.16 * size, label=last)
    if entropy is not None:
        top.axhline(entropy, color=LINE, linestyle="--", linewidth=1, label=f"unigram entropy ({entropy:.2f})")
    level = [] if entropy is None else [Series(np.zeros(1), np.array([entropy]))]
    without_outliers(top, train, Series(held_out.steps[held_out.finite], held_out.values[held_out.finite]), *level)
    top.set_ylabel("loss (nats per token)")
    top.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2, frameon=False, fontsize=9)
    if title:
        top.set_title(title, loc="left", pad=24, fontsize=11, color=INK)
    span(top, train, held_out)
    figure.axes[-1].set_xlabel("step")
    return write_png(figure, Path(folder) / "loss.png")


def training_loss(rows: Sequence[Row]) -> Series:
    """``cross_entropy`` over steps, or ``loss`` where there is none."""
    found = series(rows, "cross_entropy")
    return found if found.finite.any() else series(rows, "loss")


class _Panel(NamedTuple):
    """A panel of ``training.png``: metrics by the last part of their name, what it says above, a factor, its scale, where its axis
    begins, and a value that, where there is no other, makes no panel."""

    metric: str
    title: str
    factor: float = 1.0
    log: bool = False
    bottom: float | None = None
    dull: float | None = None


_PANELS = (
    _Panel("lr", "learning rate", bottom=0),
    _Panel("grad_norm", "gradient norm (log scale)", log=True),
    _Panel("tokens_per_second", "supervised tokens per second", bottom=0),
    _Panel("mfu", "model FLOPs utilisation (%)", 100, bottom=0),
    _Panel("padding", "padding (% of tokens)", 100, bottom=0, dull=0),
    _Panel("imbalance", "imbalance (slowest rank over the mean)", bottom=1, dull=1),
    _Panel("memory_bytes", "memory (GB)", 1e-9, bottom=0),
    _Panel("aux_loss", "auxiliary loss", bottom=0),
)


def plot_training(folder: str | Path, *, title: str | None = None, rows: Sequence[Row] | None = None) -> Path | None:
    """Draw ``training.png``: learning rate, gradient norm, rates, memory, padding and imbalance, a panel for each that the run has.

    A metric of several optimizers (``"muon/lr"``) has a curve for each. Single spikes may lie outside a panel.

    Args:
        folder: the run's folder.
        title: of the picture.
        rows: the run's metrics, where they have been read already.

    Returns:
        The path of the PNG file, or ``None`` if the run has none of these metrics.
    """
    rows = read_metrics(folder) if rows is None else rows
    known = names(rows)
    panels: list[tuple[_Panel, dict[str, Series]]] = []
    for panel in _PANELS:
        curves = {name: series(rows, name).scaled(panel.factor) for name in known if name.rpartition("/")[2] == panel.metric}
        curves = {name: curve for name, curve in curves.items() if (curve.values[curve.finite] != panel.dull).any()}
        if curves:
            panels.append((panel, curves))
    if not panels:
        return None
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(5.2 * columns, 0.5 + 2.2 * lines)
    grid: NDArray[Any] = figure.subplots(lines, columns, squeeze=False)
    for at, axes in enumerate(grid.flat):
        if at >= len(panels):
            axes.set_axis_off()
            continue
        panel, curves = panels[at]
        _draw_panel(axes, panel, curves)
        span(axes, *(curve for _, every in panels for curve in every.values()))
    figure.supxlabel("step", fontsize=10)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    return write_png(figure, Path(folder) / "training.png")


def _draw_panel(axes: Any, panel: _Panel, curves: dict[str, Series]) -> None:
    style(axes)
    axes.set_title(panel.title, loc="left", fontsize=9.5, color=INK)
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
        label = name.rpartition("/")[0] or None
        if panel.metric == "lr":  # as it is: a schedule has no noise
            axes.plot(*thinned(curve), color=color, linewidth=1.8, label=label, marker="o" if len(curve.steps) <= 3 else None, markersize=4)
            mark_gaps(axes, curve)
        else:
            draw(axes, curve, color, label)
    if panel.log and all((curve.values[curve.finite] > 0).all() for curve in curves.values()):
        axes.set_yscale("log")
        axes.grid(which="minor", color=GRID, linewidth=0.4)
        _log_ticks(axes)
    else:
        without_outliers(axes, *curves.values(), bottom=panel.bottom)
        plain_numbers(axes.yaxis)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, loc="best")


def _log_ticks(axes: Any) -> None:
    """Plain numbers on a logarithmic axis, also between powers of ten where it spans less than two of them."""
    ticker = import_module("matplotlib.ticker")
    low, high = axes.get_ylim()

    def text(x: float, _: object) -> str:
        return plain(x)

    as_text = ticker.FuncFormatter(text)
    axes.yaxis.set_major_formatter(as_text)
    axes.yaxis.set_minor_formatter(as_text if high / low < 100 else ticker.NullFormatter())
    if high / low < 100:
        axes.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5) if high / low > 8 else (1.5, 2, 3, 5, 7)))


def names(rows: Sequence[Row]) -> list[str]:
    """The metrics that the rows have with at least one number, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name, value in row.items() if name != "step" and largest(value) is not None))


def _described(folder: Path) -> tuple[str, float | None]:
    """The title and the unigram entropy of the text that the run's ``run.json`` says; else the folder's name, and ``None``."""
    title, entropy = folder.resolve().name, None
    try:
        found: Any = parse_json((folder / "run.json").read_text(encoding="utf-8"))
        title = str(found.get("title") or title)
        entropy = float(found["data"]["unigram_entropy"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # a run without a description, or another's: its metrics are drawn all the same
    return title, entropy
