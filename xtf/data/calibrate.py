"""What documents cost on this machine: the cost model fitted to a few measured packs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xtf.backends import backend_of
from xtf.data.cost import Cost, fit_cost
from xtf.data.plan_input import check_count

if TYPE_CHECKING:
    from xtf.step import TrainStep
    from xtf.tree import Tree


def measure_cost(
    step: TrainStep,
    params: Tree,
    *,
    max_tokens: int,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Cost:
    """Seconds of a document in forward and backward, measured: for ``balance_batch(cost=...)`` and `xtf.data.plan_batches`.

    Packs of ``max_tokens`` tokens run through the step, in documents of all of them, a half, a quarter, ..., down to a 64th: tokens are the
    same, attention differs. The medians of the times are averaged over the ranks that hold tokens, so that all have the same cost.
    On a machine that others use too, `xtf.data.document_cost`, which counts FLOPs, is the better choice.

    Args:
        step: the finished step, compiled or not. Nothing of it changes.
        params: this rank's parameters, as ``state.params``.
        max_tokens: of a pack, at least 8, as for the plan that the cost is for.
        repeats: measurements of each pack, after one that is not counted.
        clock: gives seconds.

    Raises:
        ValueError: for an argument out of range; if no pack took longer than nothing.
    """
    check_count("repeats", repeats)
    check_count("max_tokens", max_tokens)
    if max_tokens < 8:
        raise ValueError(f"max_tokens is {max_tokens}, expected at least 8: documents of several lengths are measured")
    packs = [_pieces(max_tokens, max_tokens // parts) for parts in (1, 2, 4, 8, 16, 64) if max_tokens // parts]
    ids = torch.randint(step.model.vocab, (1, max_tokens), generator=torch.Generator().manual_seed(0)).to(step.device)

    def seconds(pack: list[int]) -> float:
        owners = torch.repeat_interleave(torch.arange(len(pack)), torch.tensor(pack)).to(step.device)[None]
        batch: dict[str, Tensor] = {"input_ids": ids, "labels": ids, "document_ids": owners}
        times: list[float] = []
        for _ in range(repeats + 1):
            backend_of(step.device).synchronize(step.device)
            begin = clock()
            step.value_and_grad(params, batch)
            backend_of(step.device).synchronize(step.device)
            times.append(clock() - begin)
        return statistics.median(times[1:])

    measured = torch.tensor([seconds(pack) for pack in packs], dtype=torch.float64, device=step.device)
    axis = step.token_axis
    if axis is not None and axis.size > 1:
        measured = axis.start_all_reduce(measured, label="measure_cost").wait() / axis.size
    times: list[float] = [float(value) for value in measured]
    return fit_cost(packs, times)


def _pieces(tokens: int, each: int) -> list[int]:
    rest = tokens % each
    return [each] * (tokens // each) + ([rest] if rest else [])
