"""`xtf plot`: the pictures of one run again, or one metric of several runs in one picture."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console

from xtf.run.figure import COLORS, INK, Series, mark_gaps, new_figure, plain_numbers, series, smooth, span, style, thinned, without_outliers
from xtf.run.figure import write_png as _write_png
from xtf.run.metrics import Row, read_metrics
from xtf.run.plot import names, plot_run, training_loss


@dataclass(frozen=True)
class PlotOptions:
    """Draw the pictures of a run again; of several runs, their losses in one picture."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Folders of runs, each with its metrics.jsonl."""
    metric: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Draw this metric instead of the losses; also of one run."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png")] = Path("compare.png")
    """The picture of several runs, or of a metric."""


def run(options: PlotOptions, *, console: Console | None = None) -> list[Path]:
    """Draw what is asked for and print where it stands.

    Args:
        options: what to draw.
        console: where paths are printed.

    Returns:
        The paths of the PNG files.

    Raises:
        ValueError: for no run, a folder without metrics, or a metric that a run does not have; before anything is written.
    """
    if not options.runs:
        raise ValueError("xtf plot needs the folder of at least one run, as xtf plot runs/first")
    first, *others = options.runs
    several = bool(others) or options.metric is not None
    drawn = [overlay(options.runs, options.out, metric=options.metric)] if several else plot_run(first)
    for path in drawn:
        (console or Console()).print(str(path), markup=False, highlight=False, soft_wrap=True)
    return drawn


def overlay(runs: Sequence[str | Path], out: str | Path = "compare.png", *, metric: str | None = None) -> Path:
    """Draw a metric of several runs over each other: thinly as it was, thickly smoothed, with the runs' names.

    Args:
        runs: folders of runs.
        out: the PNG file to write.
        metric: its name in ``metrics.jsonl``; of a list, as of one number per layer, the largest counts. By default the training
            loss (as `xtf.run.plot.plot_loss` reads it), with the held-out losses as points.

    Returns:
        The path of the PNG file.

    Raises:
        ValueError: for no run, a name that does not end in ``.png``, a folder without metrics, or a metric that a run does not
            have; it lists those that it has.
    """
    if not runs:
        raise ValueError("there is no run to draw: give at least one folder")
    if Path(out).suffix.lower() != ".png":
        raise ValueError(f"--out {out}: expected a file name that ends in .png")
    rows = {name: read_metrics(folder) for name, folder in zip(run_names(runs), runs, strict=True)}
    curves = {name: _curve(own, metric, folder) for (name, own), folder in zip(rows.items(), runs, strict=True)}
    held_out = {name: series(own, "held_out_loss") for name, own in rows.items()} if metric is None else {}
    gaps = any(not curve.finite.all() for curve in curves.values())
    columns = max(1, min(len(rows) + gaps, 4, 96 // (max(map(len, rows)) + 8)))
    figure = new_figure(8.5, 4.6 + 0.22 * -(-(len(rows) + gaps) // columns))
    axes = figure.subplots()
    style(axes)
    for (name, curve), color in zip(curves.items(), _colors(len(curves)), strict=True):
        few = len(curve.steps) <= 3
        if not few and len(curves) <= 6:
            axes.plot(*thinned(curve), color=color, alpha=0.2, linewidth=0.7)
        axes.plot(*(curve if few else smooth(curve)), color=color, linewidth=1.6, label=name, marker="o" if few else None, markersize=4)
        points = held_out.get(name)
        if points is not None and points.finite.any():
            size = 4.5 if len(points.steps) <= 60 else 2.5
            axes.plot(*points, "D", color=color, markersize=size, markeredgecolor="white", markeredgewidth=0.16 * size)
    if gaps:
        mark_gaps(axes, Series(*np.concatenate([np.stack(curve) for curve in curves.values()], 1)))
    seen = [*curves.values(), *(points for points in held_out.values() if points.finite.any())]
    span(axes, *seen)
    without_outliers(axes, *seen)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)" if metric is None else metric)
    plain_numbers(axes.yaxis)
    if any(points.finite.any() for points in held_out.values()):
        axes.set_title("line: training, smoothed; diamonds: held-out", loc="left", fontsize=9, color=INK)
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
    return _write_png(figure, out)


def _curve(rows: Sequence[Row], metric: str | None, folder: str | Path) -> Series:
    found = training_loss(rows) if metric is None else series(rows, metric)
    if not found.finite.any():
        known = names(rows)
        near = difflib.get_close_matches(metric or "loss", known, n=1)
        hint = f", but {near[0]!r}" if near else ""
        raise ValueError(f"{folder} has no metric {metric or 'loss'!r}{hint}. It has: {', '.join(known) or 'none'}")
    return found


def run_names(runs: Sequence[str | Path]) -> list[str]:
    """As short a name for each folder as tells all apart: its last parts.

    Example:
        >>> run_names(["a/run", "b/run"]), run_names(["a/one", "b/two/"])
        (['a/run', 'b/run'], ['one', 'two'])
    """
    parts: list[tuple[str, ...]] = [Path(os.path.abspath(folder)).parts for folder in runs]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        found = ["/".join(own[-depth:]) for own in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{''.join(own[-1:])} ({i})" for i, own in enumerate(parts, 1)]  # the same folder twice


def _colors(count: int) -> Sequence[object]:
    if count <= len(COLORS):
        return COLORS[:count]
    return list(import_module("matplotlib").colormaps["turbo"](np.linspace(0.05, 0.95, count)))
