"""What a document of a packed sequence costs: a part for each of its tokens, and attention, which grows with the square of its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from xtf.model import Model
    from xtf.run.flops import ModelFlops

Floats = npt.NDArray[np.float64]

CostFunction = Callable[[npt.NDArray[np.int64]], Floats]
"""``cost(lengths) -> cost of each document``, (documents,) float64, finite and not negative, in any one unit; a `Cost` is one."""


@dataclass(frozen=True)
class Cost:
    """Cost of a document of n tokens: ``linear × n + quadratic × n² + Σ coefficient × pairs(n, window)``.

    ``pairs`` counts the pairs of a token and one that it sees in attention over a sliding window. Documents of a packed sequence
    do not see each other, so the cost of a pack is the sum over its documents. The unit is any: FLOPs, seconds.

    Args:
        linear: for each token.
        quadratic: for each token squared.
        windows: (window in tokens, coefficient for each pair) of attention that looks no further back.

    Raises:
        ValueError: for a number that is negative or not finite, a window under 1, or a cost that is 0 whatever the document.

    Example:
        >>> Cost(linear=2.0, quadratic=0.5)([1, 4]).tolist()
        [2.5, 16.0]
        >>> Cost(windows=((2, 1.0),))([1, 2, 4]).tolist()
        [1.0, 3.0, 7.0]
    """

    linear: float = 0.0
    quadratic: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        parts = (self.linear, self.quadratic, *(coefficient for _, coefficient in self.windows))
        if not all(np.isfinite(part) and part >= 0 for part in parts) or not any(parts):
            raise ValueError(f"{self!r}: expected finite coefficients, none negative, and at least one above 0")
        if any(window < 1 for window, _ in self.windows):
            raise ValueError(f"{self!r}: a window has at least 1 token, the one that looks")

    @staticmethod
    def attention() -> Cost:
        """Full attention alone, in units of a token squared.

        Example:
            >>> Cost.attention()([3]).tolist()
            [9.0]
        """
        return Cost(quadratic=1.0)

    def __call__(self, lengths: Sequence[int] | npt.NDArray[Any]) -> Floats:
        """Cost of each document, (documents,) float64."""
        tokens = np.asarray(lengths, np.float64)
        total = self.linear * tokens + self.quadratic * tokens * tokens
        for window, coefficient in self.windows:
            inside = np.minimum(tokens, window)  # the first tokens see all before them
            total = total + coefficient * (inside * (inside + 1) / 2 + (tokens - inside) * inside)
        return total


def document_cost(model: Model | ModelFlops) -> Cost:
    """FLOPs of a training step for each document, forward and backward, as `xtf.run.flops` counts a model: exact, sliding windows included.

    Args:
        model: the model, or what `xtf.run.flops.model_flops` counted of it.

    Example:
        >>> from xtf.run.flops import step_flops
        >>> from xtf.testing import small_models
        >>> model = small_models()["llama"]
        >>> float(document_cost(model)([5, 9]).sum()) == step_flops(model, [5, 9])
        True
    """
    from xtf.run.flops import ModelFlops, attention_flops, model_flops  # here: xtf.run reads its data through xtf.data

    counted = model if isinstance(model, ModelFlops) else model_flops(model)
    widths: dict[int | None, float] = {}
    for call in counted.attention:  # one token sees one pair: itself
        widths[call.window] = widths.get(call.window, 0.0) + attention_flops(ModelFlops(0, (call,)), [1])
    full = widths.pop(None, 0.0) / 2  # n (n + 1) / 2 pairs
    windows = tuple((window, coefficient) for window, coefficient in widths.items() if window is not None)
    return Cost(counted.per_token + full, full, windows)


def fit_cost(lengths: Sequence[int | Sequence[int] | npt.NDArray[Any]], seconds: Sequence[float]) -> Cost:
    """Calibration: the linear and the quadratic coefficient that explain measured times best, by least squares, neither negative.

    Args:
        lengths: of each measurement, the tokens of its one document, or of the documents of its pack.
        seconds: of each measurement.

    Returns:
        A cost in seconds.

    Raises:
        ValueError: for measurements that are not as many as times, a length or a time that is not possible, or fewer than two
            measurements that tell the two coefficients apart (packs of one document each, all of the same length, do not).

    Example:
        >>> cost = fit_cost([100, 200, [100, 100]], [1.0 + 0.5, 2.0 + 2.0, 2.0 + 1.0])
        >>> round(cost.linear, 9), round(cost.quadratic, 9)
        (0.01, 5e-05)
    """
    packs = [np.atleast_1d(np.asarray(pack)) for pack in lengths]
    times = np.asarray(seconds, np.float64)
    if times.ndim != 1 or len(packs) != len(times):
        raise ValueError(f"{len(packs)} measurements have times of the shape {times.shape}: expected one time for each")
    if not (np.isfinite(times).all() and (times >= 0).all() and times.any()):
        raise ValueError(f"seconds are {times.tolist()}: expected finite times, none negative, not all 0")
    for pack in packs:
        if pack.ndim != 1 or not len(pack) or not np.issubdtype(pack.dtype, np.integer) or int(pack.min()) < 1:
            raise ValueError(f"a measurement has the lengths {pack.tolist()}: expected the tokens of its documents, each at least 1")
    sums = np.array([[float(pack.sum()), float((pack.astype(np.float64) ** 2).sum())] for pack in packs]).reshape(-1, 2)
    scale = np.maximum(sums.max(axis=0, initial=1.0), 1.0)  # so that both columns are near 1, whatever the lengths
    columns = sums / scale
    if np.linalg.matrix_rank(columns, tol=1e-6) < 2:
        raise ValueError(
            f"{len(packs)} measurements do not tell the linear from the quadratic cost: measure documents of at least two lengths"
        )
    found = np.asarray(np.linalg.lstsq(columns, times, rcond=None)[0], np.float64)
    if found.min() < 0:  # then the best one has one coefficient alone: the squared error is convex
        alone = [max(0.0, float(column @ times / (column @ column))) for column in columns.T]
        errors = [float(((times - a * column) ** 2).sum()) for a, column in zip(alone, columns.T, strict=True)]
        keep = int(np.argmin(errors))
        found = np.array([alone[k] if k == keep else 0.0 for k in range(2)])
    linear, quadratic = found / scale
    return Cost(float(linear), float(quadratic))
