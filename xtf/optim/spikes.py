"""A rule for steps that should not be made: those whose gradient norm is far above what it has been."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from xtf import tree
from xtf.optim import leaves
from xtf.optim.core import Optimizer
from xtf.optim.placement import UNPLACED, Placement
from xtf.tree import Tree


class SpikeState(NamedTuple):
    """Gradient norms of the last accepted steps, (window,) float32 in no order that matters, and how many steps were accepted, () int64."""

    norms: Tensor
    accepted: Tensor


def skip_spikes(factor: float, window: int = 128) -> Optimizer:
    """Skip a step whose gradient norm is more than ``factor`` times the median norm of the last ``window`` steps that were accepted.

    A block for `chain`; put it before the others. Gradients pass through it unchanged. A skipped step is like one that is not finite: it
    counts in ``state.step`` and ``state.skipped`` and changes nothing else, neither parameters, nor the state of any optimizer, nor a
    router's correction, nor this history. The first ``window`` steps are never skipped. The history is part of the state, the norm is the
    global one: a resumed run, and every rank, decides alike.

    After the practice of skipping what precedes a spike (Chowdhery et al. 2022, "PaLM", who went back and left out batches by hand), made a
    rule over a moving window as in OLMo-core's ``SkipStepOptimizer`` (OLMo team 2025, "2 OLMo 2 Furious") and ZClip (Kumar et al. 2025,
    "ZClip: Adaptive Spike Mitigation for LLM Pre-Training"). Those judge by mean and standard deviation; a median does not move when a
    spike was accepted. Where norms have risen for good every later step is skipped: `xtf train` then stops (``--stop-after-skips``).

    Args:
        factor: above 1. 5 to 20 leaves ordinary noise alone.
        window: steps, at least 1.

    Returns:
        An optimizer with the metric ``"spike_limit"``: the norm above which the next step is skipped, infinite while none is.

    Raises:
        ValueError: if an argument is outside its bounds.

    Example:
        >>> from xtf.optim import chain, sgd
        >>> optimizer, params = chain(skip_spikes(4.0, window=2), sgd(lr=1.0)), {"w": torch.zeros(1)}
        >>> state = optimizer.init(params)
        >>> for norm in (1.0, 1.5, 4.1):
        ...     accepted, seen = optimizer.judge(state, {"grad_norm": torch.tensor(norm)})
        ...     state = seen if accepted else state
        >>> bool(accepted), optimizer.metrics(state)["spike_limit"].item()
        (False, 4.0)
    """
    leaves.check("skip_spikes", "factor", factor, 1, low_open=True)
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"skip_spikes: window must be a number of steps of at least 1, got {window!r}")

    def init(params: Tree, placement: Placement = UNPLACED) -> SpikeState:
        devices = [p.device for p in tree.leaves(params) if p is not None]
        device = devices[0] if devices else torch.device("cpu")
        return SpikeState(torch.zeros(window, device=device), torch.zeros((), dtype=torch.int64, device=device))

    def update(grads: Tree, state: SpikeState, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, SpikeState]:
        return grads, state

    def limit(state: SpikeState) -> Tensor:
        return torch.where(state.accepted < window, torch.inf, factor * state.norms.median())

    def judge(state: SpikeState, seen: Mapping[str, Tensor]) -> tuple[Tensor, SpikeState]:
        norm = seen["grad_norm"].to(state.norms)
        oldest = torch.arange(window, device=state.norms.device) == state.accepted % window
        return norm <= limit(state), SpikeState(torch.where(oldest, norm, state.norms), state.accepted + 1)

    def metrics(state: SpikeState) -> dict[str, Tensor]:
        return {"spike_limit": limit(state)}

    return Optimizer(init, update, metrics, judge)
