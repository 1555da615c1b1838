"""What any plan of batches costs at least, and whether a plan's order is random."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xtf.data.cost import Cost, CostFunction
from xtf.data.plan import Plan


def least_time(
    lengths: npt.NDArray[Any], *, max_tokens: int, data_ranks: int, accumulate: int = 1, cost: CostFunction | None = None
) -> float:
    """What the slowest ranks of all steps together cost at least, in any plan of these documents, remainder included.

    The first bound is the total cost ÷ ranks: in each step the slowest rank costs at least the mean rank. The second: a pack holds
    at most one document of more than half of ``max_tokens``, so a step holds at most P = ranks × accumulate of them. Sort the steps
    by the heaviest such document that they hold, and these documents by cost, both falling: the first j steps hold at most j × P of
    them, so the heaviest one outside, which step j + 1 holds, is at least document j × P (counted from 0). The slowest rank of a step
    costs at least its heaviest document; so all together cost at least the sum of documents 0, P, 2 P, ...

    Args:
        lengths: (documents,), none longer than ``max_tokens``.
        max_tokens: that a pack may have.
        data_ranks: as for `xtf.data.plan_batches`.
        accumulate: likewise.
        cost: of a document; full attention alone, if ``None``.

    Example:
        >>> least_time(np.array([4, 4, 4, 1]), max_tokens=4, data_ranks=2)
        32.0
    """
    tokens = np.asarray(lengths, np.int64)
    each = (cost or Cost.attention())(tokens)
    heavy = np.sort(each[2 * tokens > max_tokens])[::-1]
    return max(float(each.sum()) / data_ranks, float(heavy[:: data_ranks * accumulate].sum()))


def independence(plan: Plan, values: npt.NDArray[Any] | None = None, bins: int = 8) -> float:
    """Whether the step of a document depends on its length, or on another number: chi-square of a table of both ÷ its degrees of freedom.

    Full steps are cut into ``bins`` stretches, documents into ``bins`` classes by ``values``, as equally large as ties allow. Near 1
    where the two are independent; the larger, the more a stretch of training prefers a class.

    Args:
        plan: with at least ``bins`` full steps.
        values: (documents,) of each document, as its place in the source (``np.arange``); the length of each piece, if ``None``.
        bins: at least 2.

    Raises:
        ValueError: for fewer than 2 bins, or fewer full steps than bins.
    """
    if not 2 <= bins <= plan.full:
        raise ValueError(f"bins is {bins}, expected from 2 to the {plan.full} full steps of the plan")
    end = int(plan.offsets[plan.full * plan.ranks * plan.accumulate])
    shown = (plan.flat.lengths if values is None else np.asarray(values)[plan.flat.documents])[:end]
    edges = np.unique(np.quantile(shown, np.arange(1, bins) / bins))
    table = np.bincount((plan.steps[:end] * bins // plan.full) * bins + np.searchsorted(edges, shown, "right"), minlength=bins * bins)
    seen = table.reshape(bins, bins).astype(np.float64)
    seen = seen[:, seen.sum(axis=0) > 0]
    if seen.shape[1] < 2:
        return 1.0  # one class: nothing can depend on it
    expected = seen.sum(axis=1, keepdims=True) * seen.sum(axis=0, keepdims=True) / seen.sum()
    return float(((seen - expected) ** 2 / expected).sum()) / ((bins - 1) * (seen.shape[1] - 1))
