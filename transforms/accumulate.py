"""`accumulate`: one update from several micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from xtf.batch import cut_rows
from xtf.step import TrainStep


def accumulate(n: int) -> Callable[[TrainStep], TrainStep]:
    """Split this rank's batch by rows into ``n`` micro-batches and sum their gradients before the update.

    The loss is that of the whole batch, Σ weight × cross-entropy ÷ Σ weight over all micro-batches and ranks, however unequal
    they are. Where the rows do not divide, ignored rows are added.

    Args:
        n: number of micro-batches, at least 1.

    Raises:
        ValueError: if ``n`` is less than 1.
    """
    if not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"accumulate({n!r}): expected an integer number of micro-batches, at least 1")

    def transform(step: TrainStep) -> TrainStep:
        inner = step.split

        def split(given: Any) -> list[dict[str, Tensor]]:
            return [micro for outer in inner(given) for micro in (cut_rows(outer, n, i) for i in range(n))]

        return step.replace(f"accumulate({n})", split=split)

    return transform
