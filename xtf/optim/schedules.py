"""Learning rates over time: functions from the number of updates made so far to the rate of the next one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from xtf.optim.leaves import as_int, check

Schedule = Callable[[int | Tensor], float]
"""``schedule(step) -> rate``; ``step`` is an int or an int tensor of shape (), 0 for the first update."""


def constant(lr: float) -> Schedule:
    """The same rate at every step.

    Example:
        >>> constant(0.1)(7)
        0.1
    """
    check("constant", "lr", lr, 0)
    return lambda step: lr


def warmup_constant(peak: float, warmup: int) -> Schedule:
    """Up linearly for ``warmup`` steps, then constant.

    Step 0 has ``peak / warmup``, step ``warmup - 1`` and all after it have ``peak``. ``warmup=0`` is constant.

    Example:
        >>> [warmup_constant(1.0, 4)(step) for step in range(6)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    return _warmup("warmup_constant", peak, warmup, lambda step: peak)


def warmup_linear(peak: float, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Up linearly for ``warmup`` steps, then down linearly to ``final``.

    Step 0 has ``peak / warmup``, steps ``warmup - 1`` and ``warmup`` have ``peak``, step ``total`` and all after it have
    ``final``. A run of ``total`` updates makes steps 0 to ``total - 1``.

    Raises:
        ValueError: if a rate or ``warmup`` is negative, if ``warmup > total`` or if ``total < 1``.

    Example:
        >>> [warmup_linear(1.0, 2, 6)(step) for step in range(8)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return _decay("warmup_linear", peak, warmup, total, final, lambda progress: 1 - progress)


def warmup_cosine(peak: float, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Up linearly for ``warmup`` steps, then down to ``final`` along half a period of a cosine.

    The edges are those of `warmup_linear`. After Loshchilov and Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm
    Restarts", without restarts.

    Raises:
        ValueError: if a rate or ``warmup`` is negative, if ``warmup > total`` or if ``total < 1``.

    Example:
        >>> [round(warmup_cosine(1.0, 2, 6, final=0.1)(step), 3) for step in range(8)]
        [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1, 0.1]
    """
    return _decay("warmup_cosine", peak, warmup, total, final, lambda progress: (1 + math.cos(math.pi * progress)) / 2)


def as_schedule(what: str, lr: float | Schedule) -> Schedule:
    """A rate as a schedule; ``what`` is the optimizer that an error names."""
    if callable(lr):
        return lr
    check(what, "lr", lr, 0)
    return lambda step: lr


def _warmup(what: str, peak: float, warmup: int, after: Callable[[int], float]) -> Schedule:
    check(what, "peak", peak, 0)
    _check_steps(what, "warmup", warmup, 0)

    def schedule(step: int | Tensor) -> float:
        step = as_int(step) if isinstance(step, Tensor) else step
        if step < 0:
            raise ValueError(f"{what}: step must be at least 0, got {step}")
        return peak * ((step + 1) / warmup) if step < warmup else after(step)

    return schedule


def _decay(what: str, peak: float, warmup: int, total: int, final: float, shape: Callable[[float], float]) -> Schedule:
    _check_steps(what, "total", total, 1)
    check(what, "final", final, 0)
    _check_steps(what, "warmup", warmup, 0)
    if warmup > total:
        raise ValueError(f"{what}: warmup must be at most total, got warmup={warmup} and total={total}")

    def after(step: int) -> float:
        return final if step >= total else final + (peak - final) * shape((step - warmup) / (total - warmup))

    return _warmup(what, peak, warmup, after)


def _check_steps(what: str, name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or value < low:
        raise ValueError(f"{what}: {name} must be a whole number of steps, at least {low}, got {value!r}")
