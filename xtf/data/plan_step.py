"""One step of documents that are all in it, whatever their number."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xtf.data.balance import plan_batches
from xtf.data.cost import CostFunction
from xtf.data.plan import Plan
from xtf.data.plan_input import TooLong, check_layout, cut


def plan_step(
    lengths: Sequence[int] | npt.NDArray[Any],
    *,
    max_tokens: int,
    data_ranks: int,
    seed: int = 0,
    cost: CostFunction | None = None,
    too_long: TooLong = "error",
) -> Plan:
    """A plan of one step that has every document: each rank has as few packs as documents allow, as many as every other, and packs
    and ranks cost as nearly the same as can be.

    Args:
        lengths: (documents,), tokens of each, integers of at least 1.
        max_tokens: that a pack, one micro-batch of one rank, may have.
        data_ranks: how many ranks share the documents. Where there are fewer documents than packs, some packs are empty.
        seed: of which rank has which packs, any integer.
        cost: of a document; full attention alone, if ``None``.
        too_long: see `xtf.data.plan_batches`.

    Returns:
        A plan of length 1; its ``accumulate`` is how many packs each rank has.

    Raises:
        ValueError: as `xtf.data.plan_batches`.

    Example:
        >>> plan = plan_step([4, 4, 3, 3, 2, 2, 1, 1], max_tokens=5, data_ranks=2)
        >>> len(plan), plan.accumulate, [int(n) for n in plan.totals(plan.flat.lengths).sum(axis=2)[0]]
        (1, 2, [10, 10])
    """
    check_layout(max_tokens, data_ranks, 1)
    pieces, _ = cut(lengths, max_tokens, too_long)
    tokens = pieces.lengths
    least = max(1, -(-int(tokens.sum()) // (data_ranks * max_tokens)), -(-int(np.sum(2 * tokens > max_tokens)) // data_ranks))
    for accumulate in itertools.count(least):  # with as many packs as pieces, each has room
        plan = plan_batches(
            lengths, max_tokens=max_tokens, data_ranks=data_ranks, accumulate=accumulate, seed=seed, cost=cost, too_long=too_long
        )
        if len(plan) == 1:
            return plan
    raise AssertionError
