"""The picture of a step's memory: what it holds over time, in stacked areas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtf.memory import HOST, KINDS, Moment, Timeline
from xtf.run.figure import GRID, INK, LINE, new_figure, write_png

SHADES: Mapping[str, str] = {
    "parameters": "#33475b",
    "optimizer": "#6f8aa5",
    "gradients": "#a9bfd3",
    "batch": "#cfd8cf",
    "activations": "#e8894a",
    "communication": "#5aa78a",
    "logits": "#9a6fb8",
    "workspace": "#e8b923",
}
"""Of the kinds, from the bottom up: what stays is cold, what comes and goes is warm."""

_THIN: Mapping[str, str] = {"communication": "#3f8a6e", "logits": "#7d4f9c", "workspace": "#b8890b"}
"""Outlines of the kinds that come and go within a stage: of many stages each is narrower than a pixel."""

_BETWEEN = 0.1  # width of what lies between two stages that run, which are 1 wide
_OUTLINED = 400  # moments, at most
_MOST_LABELS = 18  # of layers along the time axis


@dataclass(frozen=True)
class _Stretch:
    """A moment on the time axis."""

    moment: Moment
    begin: float
    end: float


def draw_memory(line: Timeline, path: str | Path, *, title: str = "", scale: Any = None) -> Path:
    """Draw a timeline: bytes of each kind, stacked, while each stage runs and between stages.

    Time is the order of the schedule: every stage is as wide as every other. Its height is the most that it has at once. The peak is
    marked. What waits in host memory is a number in the legend: it is mostly a pool of one size, and would flatten the rest.

    Args:
        line: what to draw.
        path: the PNG file to write.
        title: what stands above it.
        scale: ``(bytes) -> (divisor, unit)``; by default GB, MB or kB by the peak.

    Raises:
        ValueError: for a name that does not end in ``.png``.
    """
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"{path}: expected a file name that ends in .png")
    stretches = _laid_out(line.moments)
    divisor, unit = (scale or unit_of)(line.peak.peak)
    figure = new_figure(11.0, 5.0)
    axes: Any = figure.subplots()
    x, rows = _steps(stretches, divisor)
    shown = [kind for kind in KINDS if rows[kind].max() > 0]
    top_of = np.zeros_like(x)
    for kind in shown:
        below, top_of = top_of, top_of + rows[kind]
        edge: dict[str, Any] = {"edgecolor": _THIN[kind], "linewidth": 0.8} if kind in _THIN else {"linewidth": 0}
        axes.fill_between(x, below, top_of, where=rows[kind] > 0, facecolor=SHADES[kind], **edge)
    if len(stretches) <= _OUTLINED:  # of many stages, a line around each would cover their colours
        axes.plot(x, top_of, color=INK, linewidth=0.5)
    top = line.peak.peak / divisor
    _frame(axes, x, top)
    _mark_peak(axes, line, stretches, top, unit)
    _name_time(axes, stretches)
    axes.set_ylabel(unit, color=INK)
    _legend(figure, axes, line, shown, divisor, unit)
    if title:
        axes.set_title(title, loc="left", fontsize=11, color=INK, pad=26)
    return write_png(figure, path)


def unit_of(bytes: int) -> tuple[int, str]:
    """The unit that sizes up to ``bytes`` are said in.

    Example:
        >>> unit_of(3 * 10**9), unit_of(5)
        ((1000000000, 'GB'), (1000, 'kB'))
    """
    return next(((10**p, unit) for p, unit in ((9, "GB"), (6, "MB")) if bytes >= 10**p), (1000, "kB"))


def _laid_out(moments: Sequence[Moment]) -> list[_Stretch]:
    found, at = list[_Stretch](), 0.0
    for moment in moments:
        width = 1.0 if moment.event.act == "run" else _BETWEEN
        found.append(_Stretch(moment, at, at + width))
        at += width
    return found


def _steps(stretches: Sequence[_Stretch], divisor: int) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Corners of the steps: of a stage that runs, the most it has; of what is between, the same."""
    x = np.array([edge for s in stretches for edge in (s.begin, s.end)])
    rows = {kind: np.repeat([s.moment.most[kind] / divisor for s in stretches], 2) for kind in KINDS}
    return x, rows


def _frame(axes: Any, x: NDArray[np.float64], top: float) -> None:
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(0, 1.16 * top)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE)


def _mark_peak(axes: Any, line: Timeline, stretches: Sequence[_Stretch], top: float, unit: str) -> None:
    at = stretches[line.moments.index(line.peak)]
    middle, share = (at.begin + at.end) / 2, at.begin / stretches[-1].end
    axes.axhline(top, color=INK, linewidth=0.8, linestyle=(0, (5, 4)), alpha=0.6)
    axes.plot([middle], [top], marker="v", markersize=7, color=INK, clip_on=False, zorder=5)
    side = "left" if share < 0.6 else "right"
    text = f" {_number(top)} {unit} in {line.peak} "
    axes.text(middle, 1.035 * top, text, ha=side, va="bottom", fontsize=9.5, color=INK, fontweight="bold")


def _name_time(axes: Any, stretches: Sequence[_Stretch]) -> None:
    """Directions above, stages below: layers by their numbers, as many as there is room for."""
    runs = [s for s in stretches if s.moment.event.act == "run"]
    micros, width = 1 + max(s.moment.event.micro for s in runs), stretches[-1].end
    parts = [list(group) for _, group in groupby(runs, lambda s: (s.moment.event.direction, s.moment.event.micro))]
    begins = [0.0, *(part[0].begin for part in parts[1:]), width]
    for part, begin, end in zip(parts, begins, begins[1:], strict=False):
        if begin > 0:
            axes.axvline(begin, color=INK, linewidth=0.7, alpha=0.7)
        event, wide = part[0].moment.event, (end - begin) / width
        if wide > 0.03:
            said = f"{event.direction} {event.micro + 1}" if micros > 1 and event.what != "update" and wide > 0.08 else event.direction
            axes.annotate(said, ((begin + end) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 5), textcoords="offset points",
                          ha="center", va="bottom", fontsize=9, color=LINE)  # fmt: skip
    _label_stages(axes, [s for s in runs if s.moment.event.direction != "update"], width)


def _label_stages(axes: Any, runs: Sequence[_Stretch], width: float) -> None:
    groups = [list(group) for _, group in groupby(runs, lambda s: (s.moment.event.micro, s.moment.event.direction, _place(s)))]
    layers = [group for group in groups if _place(group[0]).isdigit()]
    every = -(-len(layers) // _MOST_LABELS)
    every = next((nice for nice in (1, 2, 4, 8, 16, 32, 64, 128) if nice >= every), every)
    taken: list[tuple[float, float]] = []
    order = [group for group in layers if int(_place(group[0])) % every == 0]
    order += sorted((group for group in groups if group not in layers), key=lambda group: group[0].moment.kind != "loss")
    for group in order:  # what matters most takes its room first
        place, middle = _place(group[0]), (group[0].begin + group[-1].end) / 2
        half = width * (0.004 + 0.0038 * len(place))
        if any(middle + half > left and middle - half < right for left, right in taken):
            continue
        taken.append((middle - half, middle + half))
        axes.annotate(place, (middle, 0), xycoords=("data", "axes fraction"), xytext=(0, -6), textcoords="offset points",
                      ha="center", va="top", fontsize=8.5, color=INK if place.isdigit() else LINE)  # fmt: skip
    axes.set_xticks([])
    if layers:
        axes.set_xlabel("stages in the order in which they run; numbers are layers", fontsize=9, color=LINE, labelpad=18)


def _place(s: _Stretch) -> str:
    """The layer's number, or the stage's kind."""
    numbers = [part for part in s.moment.event.stage.partition("#")[0].split(".") if part.isdigit()]
    return numbers[0] if numbers else s.moment.kind or s.moment.event.stage


def _legend(figure: Any, axes: Any, line: Timeline, shown: Sequence[str], divisor: int, unit: str) -> None:
    """The kinds in the order of the stack, with what each has at the peak."""
    from matplotlib.patches import Patch  # as all of matplotlib, when something is drawn

    handles: list[Any] = [Patch(color=SHADES[k], label=f"{k}  {_number(line.peak.most[k] / divisor)}") for k in reversed(shown)]
    if line.most[HOST]:  # no part of the device's axis
        handles.append(Patch(alpha=0, label=f"host memory, up to {_number(line.most[HOST] / divisor)} {unit}"))
    legend = figure.legend(
        handles=handles, loc="outside right center", frameon=False, fontsize=9.5, labelcolor=INK, title=f"at the peak, {unit}",
        title_fontsize=9.5, alignment="left", handlelength=1.2, labelspacing=0.7,
    )  # fmt: skip
    legend.get_title().set_color(LINE)


def _number(value: float) -> str:
    """With three digits that say something.

    Example:
        >>> _number(123.4), _number(12.34), _number(0.01234), _number(0.0001)
        ('123', '12.3', '0.01', '0')
    """
    return f"{value:,.0f}" if value >= 100 or value < 0.005 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
