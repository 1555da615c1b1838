"""The picture of a run: its losses over the steps, and how evenly the experts were used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from xtf.files import write_atomically
from xtf.run.metrics import Row, Value, read_metrics

Series = tuple[list[int], list[float]]

_INK, _GRID, _TRAIN, _HELD_OUT, _LOAD, _LINE = "#2b2b2b", "#e6e6e6", "#2f6db3", "#d1582a", "#3b8f6a", "#777777"


def plot_loss(folder: str | Path, *, entropy: float | None = None, title: str | None = None) -> Path:
    """Draw ``loss.png`` from the ``metrics.jsonl`` of a run's folder.

    The training loss thinly as it was and thickly smoothed, the held-out loss as points, and a dashed line at
    the text's unigram entropy (`xtf.data.unigram_entropy`). A second panel shows the routers' maximal load violation where
    the run has it. All words stand above the panels, where no curve can run through them.

    Args:
        folder: the run's folder. Read are ``cross_entropy`` (the loss without auxiliary losses; ``loss`` where it is missing),
            ``held_out_loss`` and ``load_violation`` (of several layers, the largest), each in the rows that have it.
        entropy: nats per token of the dashed line, or ``None`` for no line.
        title: of the picture.

    Returns:
        The path of the PNG file.

    Raises:
        ValueError: if the folder has no metrics, or no step with a loss.
    """
    rows = read_metrics(folder)
    train, held_out, load = (_series(rows, name) for name in ("cross_entropy", "held_out_loss", "load_violation"))
    if not train[0]:
        train = _series(rows, "loss")
    if not train[0]:
        raise ValueError(f"{folder}: metrics.jsonl has no step with a finite loss: there is nothing to draw")
    figure = _figure(bool(load[0]))
    top, *below = figure.axes
    smooth = smoothed(train[1])
    top.plot(*train, color=_TRAIN, alpha=0.3, linewidth=0.8)
    top.plot(train[0], smooth, color=_TRAIN, linewidth=1.8, label="training")
    if held_out[0]:
        top.plot(*held_out, color=_HELD_OUT, linewidth=1, linestyle=(0, (1, 2)))
        last = f"held-out ({held_out[1][-1]:.2f} at the end)"
        top.plot(*held_out, "o", color=_HELD_OUT, markersize=5, markeredgecolor="white", markeredgewidth=0.8, label=last)
    if entropy is not None:
        top.axhline(entropy, color=_LINE, linestyle="--", linewidth=1, label=f"unigram entropy ({entropy:.2f})")
    top.set_ylabel("loss (nats per token)")
    top.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, frameon=False, fontsize=9)
    if title:
        top.set_title(title, loc="left", pad=24, fontsize=11, color=_INK)
    first, end = min(train[0]), max(train[0][-1], held_out[0][-1] if held_out[0] else 0)
    margin = max(0.5, 0.02 * (end - first))
    top.set_xlim(first - margin, end + margin)
    for axes in below:
        axes.plot(*load, color=_LOAD, alpha=0.3, linewidth=0.8)
        axes.plot(load[0], smoothed(load[1]), color=_LOAD, linewidth=1.5)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("load\nviolation")
        axes.set_title("busiest expert over the mean, minus 1", loc="left", fontsize=9, color=_LINE)
    figure.axes[-1].set_xlabel("step")
    path = Path(folder) / "loss.png"
    data = BytesIO()
    figure.savefig(data, format="png", dpi=150)
    with write_atomically(path) as file:
        file.write(data.getvalue())
    return path


def smoothed(values: Sequence[float]) -> list[float]:
    """Each value averaged with its neighbours on both sides, with Gaussian weights over about a twentieth of the run, so that
    the curve does not lag behind what it smooths.

    Example:
        >>> smoothed([2.0, 2.0, 2.0])
        [2.0, 2.0, 2.0]
    """
    width = max(1.0, len(values) / 80)
    weights = [math.exp(-0.5 * (d / width) ** 2) for d in range(math.ceil(3 * width) + 1)]
    out: list[float] = []
    for i in range(len(values)):
        near = range(max(0, i - len(weights) + 1), min(len(values), i + len(weights)))
        mass = sum(weights[abs(j - i)] for j in near)
        out.append(sum(weights[abs(j - i)] * values[j] for j in near) / mass)
    return out


def _series(rows: Sequence[Row], name: str) -> Series:
    """The steps at which a metric is finite, and its values there; of a list, as of one number per layer, the largest."""
    found = [(step, value) for row in rows if isinstance(step := row["step"], int) and (value := _largest(row.get(name))) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _largest(value: Value) -> float | None:
    if isinstance(value, list):
        return max((item for part in value if (item := _largest(part)) is not None), default=None)
    return value


def _figure(panels: bool) -> Any:
    """A figure of one or two panels, drawn without a display and without touching pyplot's global state."""
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(8, 5.4 if panels else 4.5), layout="constrained")
    ratios = {"height_ratios": [4, 1]} if panels else {}
    figure.subplots(2 if panels else 1, 1, sharex=True, gridspec_kw=ratios)
    for axes in figure.axes:
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, labelsize=9, length=0)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_LINE)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure
