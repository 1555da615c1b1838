"""The picture of a run's experts: how evenly they were used, over the steps and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from xtf.run.figure import BLUE, COLORS, INK, ORANGE, Series, new_figure, series, smooth, span, style, thinned, without_outliers, write_png
from xtf.run.metrics import Row, Value, read_metrics


def plot_experts(folder: str | Path, *, title: str | None = None, rows: Sequence[Row] | None = None) -> Path | None:
    """Draw ``experts.png``: how uneven each layer's load was over the steps, and each expert's load at the end.

    The load of an expert is the share of slots that it got, here over the mean: 1 is even. The violation is the largest load of a
    layer over the mean, minus 1. Layers are the sparse ones, counted from 0.

    Args:
        folder: the run's folder; read are ``load_violation`` (layers,) and ``expert_load`` (layers, experts).
        title: of the picture.
        rows: the run's metrics, where they have been read already.

    Returns:
        The path of the PNG file, or ``None`` if the run has no such metrics.
    """
    rows = read_metrics(folder) if rows is None else rows
    by_layer, load = _violations(rows), _final_load(rows)
    if not by_layer and load is None:
        return None
    tall = 2.6 if load is None else min(6.0, 1.4 + 0.22 * len(load[0]))
    figure = new_figure(9, (3.2 if by_layer else 0) + (tall if load is not None else 0))
    panels = [panel for panel in ("violation" if by_layer else "", "load" if load is not None else "") if panel]
    ratios = [{"violation": 3.2, "load": tall}[panel] for panel in panels]
    parts: NDArray[Any] = figure.subfigures(len(panels), 1, squeeze=False, height_ratios=ratios)  # each with a width of its own
    if by_layer:
        _draw_violations(parts[0, 0], by_layer)
    if load is not None:
        _draw_load(parts[-1, 0], *load)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    return write_png(figure, Path(folder) / "experts.png")


def _violations(rows: Sequence[Row]) -> list[Series]:
    """``load_violation`` of each layer."""
    layers = max((len(value) for row in rows if isinstance(value := row.get("load_violation"), list)), default=0)
    found: list[Series] = []
    for layer in range(layers):
        own: list[Row] = []
        for row in rows:
            value = row.get("load_violation")
            if isinstance(value, list) and layer < len(value):
                own.append({"step": row["step"], "violation": value[layer]})
        found.append(series(own, "violation"))
    return [curve for curve in found if curve.finite.any()]


def _final_load(rows: Sequence[Row]) -> tuple[NDArray[np.float64], int, int] | None:
    """(layers, experts) load over the mean, averaged over the last twentieth of the steps that have it; the first and last of
    these steps."""
    having = [row for row in rows if isinstance(row.get("expert_load"), list)]
    last = having[-max(1, min(len(having) // 20, 100)) :]
    shape = _matrix(last[-1]["expert_load"]).shape if last else (0,)
    if len(shape) != 2 or not all(shape):
        return None
    same = [row for row in last if _matrix(row["expert_load"]).shape == shape]
    mean = np.mean([_matrix(row["expert_load"]) for row in same], axis=0) * shape[1]
    return mean, int(cast(int, same[0]["step"])), int(cast(int, same[-1]["step"]))


def _matrix(value: Value) -> NDArray[np.float64]:
    return np.asarray(value, dtype=np.float64)


def _draw_violations(figure: Any, by_layer: list[Series]) -> None:
    axes = figure.subplots()
    style(axes)
    axes.set_title("load violation of each layer: its busiest expert over the mean, minus 1", loc="left", fontsize=9.5, color=INK)
    few = len(by_layer) <= len(COLORS)
    colors = COLORS[: len(by_layer)] if few else import_module("matplotlib").colormaps["viridis"](np.linspace(0, 0.9, len(by_layer)))
    for layer, (curve, color) in enumerate(zip(by_layer, colors, strict=True)):
        if len(curve.steps) <= 3:
            axes.plot(*curve, color=color, marker="o", markersize=4, linewidth=1.4, label=f"layer {layer}")
        else:
            if len(by_layer) <= 4:
                axes.plot(*thinned(curve), color=color, alpha=0.25, linewidth=0.8)
            axes.plot(*smooth(curve), color=color, linewidth=1.4, label=f"layer {layer}")
    span(axes, *by_layer)
    without_outliers(axes, *by_layer, bottom=0)
    axes.set_xlabel("step")
    if few:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, borderaxespad=0)
    else:
        matplotlib = import_module("matplotlib")
        shades = matplotlib.colors.ListedColormap(colors)
        scale = matplotlib.colors.Normalize(-0.5, len(by_layer) - 0.5)
        bar = figure.colorbar(matplotlib.cm.ScalarMappable(scale, shades), ax=axes, label="layer", pad=0.01)
        _plain_bar(bar)


def _draw_load(figure: Any, load: NDArray[np.float64], first: int, last: int) -> None:
    """White is an even load, orange more, blue less."""
    matplotlib, axes = import_module("matplotlib"), figure.subplots()
    shades = matplotlib.colors.LinearSegmentedColormap.from_list("load", [BLUE, "#ffffff", ORANGE])
    top = max(2.0, float(np.nanpercentile(load, 99.5)) if load.size > 400 else float(np.nanmax(load)))
    scale = matplotlib.colors.TwoSlopeNorm(1.0, 0.0, top)
    image = axes.imshow(load, aspect="auto", cmap=shades, norm=scale, interpolation="nearest")
    when = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
    axes.set_title(f"load of each expert over the mean, {when}", loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.tick_params(colors=INK, labelsize=9, length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 4, 5, 8, 10], min_n_ticks=1))
    for spine in axes.spines.values():
        spine.set_visible(False)
    if load.size <= 160:  # numbers in the cells say it all: no scale beside them
        for (layer, expert), value in np.ndenumerate(load):
            dark = abs(float(scale(value)) - 0.5) > 0.3
            axes.text(expert, layer, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if dark else INK)
        return
    bar = figure.colorbar(image, ax=axes, label="load over the mean", pad=0.01, extend="max" if np.nanmax(load) > top else "neither")
    bar.set_ticks(sorted({0.0, 0.5, 1.0, *np.linspace(1, top, 3).round(1).tolist()}))
    _plain_bar(bar)


def _plain_bar(bar: Any) -> None:
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=INK, labelsize=8, length=0)
