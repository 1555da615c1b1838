"""How pictures of runs are drawn: series out of metrics, thinned and smoothed; figures without a display; PNG files.

matplotlib is imported when something is drawn, and only its objects are used: pyplot would keep figures in a global state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib import import_module
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtf.files import write_atomically
from xtf.run.metrics import Row, Value

INK, GRID, LINE = "#2b2b2b", "#e6e6e6", "#777777"
BLUE, ORANGE, GREEN, RED = "#2f6db3", "#d1582a", "#3b8f6a", "#c0392b"
COLORS = (BLUE, ORANGE, GREEN, "#8656a8", "#b8860b", "#2a9db5", "#c2467e", "#6b6b6b")
"""Of curves that are drawn together, in order."""

MOST_POINTS = 2000
"""Of one curve: twice as many as a picture has columns for it."""


class Series(NamedTuple):
    """One metric over steps. A value is NaN where the metric was written but not finite: the curve has a gap there."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Where there is a number."""
        return np.isfinite(self.values)

    def scaled(self, factor: float) -> Series:
        """All values times a factor."""
        return Series(self.steps, self.values * factor)


def series(rows: Sequence[Row], name: str) -> Series:
    """A metric in the rows that have it; of a list, as of one number per layer, the largest.

    Example:
        >>> series([{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": None}], "loss").values.tolist()
        [2.0, nan]
    """
    found = [(row["step"], largest(row[name])) for row in rows if name in row]
    columns = np.array([(step, math.nan if value is None else value) for step, value in found], dtype=np.float64).reshape(-1, 2)
    return Series(columns[:, 0], columns[:, 1])


def largest(value: Value) -> float | None:
    """The largest number in nested lists; ``None`` if there is none."""
    if isinstance(value, list):
        return max((item for part in value if (item := largest(part)) is not None), default=None)
    return value


def thinned(curve: Series, most: int = MOST_POINTS) -> Series:
    """At most about ``most`` points that look the same: of each stretch of steps, the least and the greatest value.

    Example:
        >>> spike = Series(np.arange(10_000.0), np.where(np.arange(10_000) == 5_003, 9.0, 1.0))
        >>> few = thinned(spike, 100)
        >>> len(few.steps), few.values.max().item(), few.steps[few.values.argmax()].item()
        (100, 9.0, 5003.0)
    """
    if len(curve.steps) <= most:
        return curve
    kept: list[int] = []
    edges = np.linspace(0, len(curve.steps), most // 2 + 1).astype(int)
    for begin, end in pairwise(edges.tolist()):
        part = curve.values[begin:end]
        if np.isfinite(part).any():
            pair = sorted({int(np.nanargmin(part)), int(np.nanargmax(part))})
            kept += [begin + i for i in (pair if len(pair) == 2 else pair * 2)]
        else:
            kept.append(begin)
    return Series(curve.steps[kept], curve.values[kept])


def smooth(curve: Series, most: int = MOST_POINTS) -> Series:
    """The curve `smoothed`; of a long one, the means of stretches are."""
    if len(curve.steps) <= most:
        return Series(curve.steps, np.asarray(smoothed(curve.values)))
    edges = np.linspace(0, len(curve.steps), most + 1).astype(int)[:-1]
    finite, counts = curve.finite, np.diff([*edges, len(curve.steps)])
    numbers = np.add.reduceat(finite.astype(np.float64), edges)
    sums = np.add.reduceat(np.where(finite, curve.values, 0.0), edges)
    means = np.divide(sums, numbers, out=np.full(most, math.nan), where=numbers > 0)
    return Series(np.add.reduceat(curve.steps, edges) / counts, np.asarray(smoothed(means)))


def smoothed(values: Iterable[float]) -> list[float]:
    """Each value averaged with its neighbours on both sides, with Gaussian weights over about a twentieth of the run, so that
    the curve does not lag behind what it smooths. NaN stays NaN and has no weight.

    Example:
        >>> smoothed([2.0, 2.0, 2.0])
        [2.0, 2.0, 2.0]
    """
    given = np.asarray(list(values), dtype=np.float64)
    if not len(given):
        return []
    width = max(1.0, len(given) / 80)
    reach = math.ceil(3 * width)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    finite = np.isfinite(given)
    mass = np.convolve(finite.astype(np.float64), weights)[reach : reach + len(given)]
    sums = np.convolve(np.where(finite, given, 0.0), weights)[reach : reach + len(given)]
    return np.where(finite, sums / np.where(finite, mass, 1.0), math.nan).tolist()


# Figures ------------------------------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches, that lays itself out."""
    return import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def style(axes: Any) -> None:
    """The look of every panel with curves: a light grid, one line below, whole steps with thousands set apart."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE)
    ticker = import_module("matplotlib.ticker")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))


def plain_numbers(axis: Any) -> None:
    """Ticks of an axis as `plain` writes them, all with as many decimals as one of them needs."""

    def text(x: float, _: object) -> str:
        ticks = [plain(tick) for tick in axis.get_majorticklocs()]
        return plain(x) if any("e" in tick for tick in ticks) else f"{x:,.{max(len(tick.partition('.')[2]) for tick in ticks)}f}"

    axis.set_major_formatter(import_module("matplotlib.ticker").FuncFormatter(text))


def plain(x: float) -> str:
    """A number in as few signs as say it, thousands set apart.

    Example:
        >>> plain(12_000.0), plain(0.25), plain(5e-5), plain(0.30000000000000004)
        ('12,000', '0.25', '5e-5', '0.3')
    """
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.6g}".replace("e-0", "e-")


def span(axes: Any, *curves: Series) -> None:
    """Limit the steps to those of the curves, with a margin that leaves points at the ends whole."""
    steps = np.concatenate([curve.steps for curve in curves if len(curve.steps)])
    first, last = float(steps.min()), float(steps.max())
    margin = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)


def draw(axes: Any, curve: Series, color: str, label: str | None = None) -> None:
    """A noisy curve: thinly as it was, thickly smoothed; steps without a finite number are marked at the bottom."""
    few = len(curve.steps) <= 3
    if not few:
        axes.plot(*thinned(curve), color=color, alpha=0.3, linewidth=0.8)
    axes.plot(*(curve if few else smooth(curve)), color=color, linewidth=1.8, label=label, marker="o" if few else None, markersize=4)
    mark_gaps(axes, curve)


def mark_gaps(axes: Any, curve: Series) -> None:
    """Crosses along the bottom where a metric was not finite."""
    lost = curve.steps[~curve.finite]
    if len(lost):
        lost = lost[:: max(1, len(lost) // 200)]
        axes.plot(lost, np.full(len(lost), 0.02), "x", color=RED, markersize=4, transform=axes.get_xaxis_transform(), label="not finite")


def without_outliers(axes: Any, *curves: Series, bottom: float | None = None) -> None:
    """Limit the values so that single spikes do not flatten all else.

    Inside is what 98 of 100 points span, a quarter more on both sides where there are points, and every curve smoothed.

    Args:
        axes: the panel.
        curves: what it shows.
        bottom: where the axis begins, unless there are lower values.
    """
    low, high = math.inf, -math.inf
    for curve in curves:
        numbers = curve.values[curve.finite]
        if len(numbers):
            first, last = np.percentile(numbers, [1, 99])
            even = smooth(curve).values
            low = min(low, max(float(numbers.min()), first - 0.25 * (last - first)), float(np.nanmin(even)))
            high = max(high, min(float(numbers.max()), last + 0.25 * (last - first)), float(np.nanmax(even)))
    if low <= high:
        start = low if bottom is None else min(bottom, low)
        margin = 0.06 * (high - start) or 0.05 * abs(high) or 0.5
        axes.set_ylim(start if start == bottom else start - margin, high + margin)


def write_png(figure: Any, path: str | Path) -> Path:
    """Write a figure at 150 dots per inch."""
    data = BytesIO()
    figure.savefig(data, format="png", dpi=150, facecolor="white")
    with write_atomically(path) as file:
        file.write(data.getvalue())
    return Path(path)
