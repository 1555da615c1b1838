"""The parts that `chain` makes optimizers of.

Each takes updates (the gradients, for the first one) and returns updates. Signs: what comes before `scale_by_learning_rate`
points along the gradient, what comes after it is added to the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xtf import tree
from xtf.backends import backend_of
from xtf.optim import leaves
from xtf.optim.core import Fused, Optimizer, or_old
from xtf.optim.leaves import Mask
from xtf.optim.placement import UNPLACED, Placement
from xtf.optim.schedules import Schedule, as_schedule
from xtf.tree import Path, Tree


class ClipState(NamedTuple):
    """The norm before clipping in the last update: shape (), float32."""

    norm: Tensor


class ScheduleState(NamedTuple):
    """The number of updates so far."""

    steps: Tensor


class AdamState(NamedTuple):
    """Number of updates so far, and means of the gradient and of its square: trees, at least float32."""

    steps: Tensor
    mean: Tree
    square: Tree


class AdamKernel(Protocol):
    """What Adam does to a leaf or a part of it; `adam_kernel`, or that under ``torch.compile``."""

    def __call__(
        self,
        g: Tensor,
        mean: Tensor,
        square: Tensor,
        p: Tensor,
        beta1: float,
        beta2: float,
        scale: Tensor,
        eps: Tensor,
        decay: Tensor | None,
    ) -> None: ...


def adam_kernel(
    g: Tensor, mean: Tensor, square: Tensor, p: Tensor, beta1: float, beta2: float, scale: Tensor, eps: Tensor, decay: Tensor | None
) -> None:
    """Adam on tensors of one shape, in place: the gradient becomes the update.

    ``mean ← β₁ mean + (1 - β₁) g``, ``square ← β₂ square + (1 - β₂) g²``, ``g ← mean · scale / (√square + eps) + decay · p``.

    What changes from step to step is given as tensors of shape () on the CPU, so that a compiled kernel is compiled once.

    Args:
        g: the gradient, overwritten with the update.
        mean: mean of the gradient, overwritten. Its dtype is that of the arithmetic.
        square: mean of the squared gradient, overwritten.
        p: the parameter; only read.
        beta1: decay of ``mean``.
        beta2: decay of ``square``.
        scale: factor on the quotient, with the sign, the rate and the bias corrections in it.
        eps: summand of the denominator, with the bias correction in it.
        decay: factor on the parameter, with the sign and the rate in it; ``None`` for no decay.
    """
    u = g.to(mean.dtype)
    mean.lerp_(u, 1 - beta1)
    square.mul_(beta2).addcmul_(u, u, value=1 - beta2)
    if decay is None:
        torch.div(mean, square.sqrt().add_(eps), out=u).mul_(scale)
    else:
        # The rate divides the denominator, as addcdiv takes no tensor as its factor. A rate of 0 gives mean / infinity = 0.
        torch.mul(p.to(u.dtype), decay, out=u).addcdiv_(mean, square.sqrt().add_(eps).div_(scale))
    if u is not g:
        g.copy_(u)


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``, the formula of ``torch.nn.utils.clip_grad_norm_``.

    The norm is over all leaves and ranks (`Placement.norm`), and is the metric ``"grad_norm"``. After Pascanu et al. 2013, "On
    the difficulty of training recurrent neural networks".

    Raises:
        ValueError: if ``max_norm`` is not positive.
    """
    leaves.check("clip_by_global_norm", "max_norm", max_norm, 0, low_open=True)

    def init(params: Tree, placement: Placement = UNPLACED) -> ClipState:
        devices = [p.device for p in tree.leaves(params) if p is not None]
        return ClipState(torch.zeros((), dtype=torch.float32, device=devices[0] if devices else "cpu"))

    def update(grads: Tree, state: ClipState, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, ClipState]:
        norm = placement.norm(grads)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)

        def clip(path: Path, g: Tensor, p: Tensor) -> tuple[Tensor]:
            return (leaves.own_update(g, p, placement).mul_(factor.to(g.device)),)

        updates, _ = leaves.leafwise(clip, grads, params)
        return updates, ClipState(leaves.own(state.norm, placement).copy_(norm))

    def metrics(state: ClipState) -> dict[str, Tensor]:
        return {"grad_norm": state.norm}

    return Optimizer(init, update, metrics)


def scale_by_adam(*, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, kernel: AdamKernel = adam_kernel) -> Optimizer:
    """Adam's direction: the mean of the gradient over the root of the mean of its square, both with bias correction.

    After Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization". The number of updates that corrects the bias is one
    for all leaves.

    Args:
        betas: decay of the mean and of the mean square, each in [0, 1).
        eps: summand of the denominator, positive.
        kernel: the formula; give ``torch.compile(adam_kernel)`` for one pass over memory.

    Raises:
        ValueError: if an argument is outside its bounds.
    """
    return adam("scale_by_adam", betas, eps, 0.0, None, kernel, lambda step: -1.0, _no_metrics)


def adam(
    what: str,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    mask: Mask,
    kernel: AdamKernel,
    rate: Schedule,
    metrics: Callable[[AdamState], dict[str, Tensor]],
    *,
    fused: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay in one pass: the update is minus ``rate`` times direction plus decay.

    ``fused`` gives it an `xtf.optim.core.AdvanceFn` that runs torch's own fused kernel: one pass over memory instead of ten or more. It is
    of leaves whose gradient and state have the parameter's dtype, on devices that have the kernel; others are updated, then added to.
    """
    beta1, beta2 = betas
    leaves.check(what, "betas[0]", beta1, 0, 1)
    leaves.check(what, "betas[1]", beta2, 0, 1)
    leaves.check(what, "eps", eps, 0, low_open=True)
    leaves.check(what, "weight_decay", weight_decay, 0)

    def init(params: Tree, placement: Placement = UNPLACED) -> AdamState:
        leaves.masked(mask, params)  # a mask of another structure fails here, not after the first backward
        return AdamState(leaves.zero_count(), leaves.zeros_state(params, placement), leaves.zeros_state(params, placement))

    def one(
        step: int, placement: Placement, g: Tensor, p: Tensor, mean: Tensor, square: Tensor, decays: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update and states of a leaf."""
        lr, root = rate(step), math.sqrt(1 - beta2 ** (step + 1))
        # √(square / root²) + eps, times root, is √square + eps · root: the bias of the square is corrected in the factors.
        scale = _scalar(-lr * root / (1 - beta1 ** (step + 1)))
        scaled_eps, decay = _scalar(eps * root), _scalar(-lr * weight_decay)
        u, mean, square = leaves.own_update(g, p, placement), leaves.own(mean, placement), leaves.own(square, placement)
        for u_part, mean_part, square_part, p_part in leaves.blocks(u, mean, square, p):
            kernel(u_part, mean_part, square_part, p_part, beta1, beta2, scale, scaled_eps, decay if decays and weight_decay else None)
        return u, mean, square

    def update(grads: Tree, state: AdamState, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, AdamState]:
        step = leaves.as_int(state.steps)

        def leaf(path: Path, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
            return one(step, placement, *given)

        updates, (mean, square) = leaves.leafwise(
            leaf, grads, params, (state.mean, state.square), (leaves.masked(mask, params),), placement
        )
        return updates, AdamState(leaves.add_one(state.steps, placement), mean, square)

    def advance(grads: Tree, state: AdamState, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, AdamState]:
        step = leaves.as_int(state.steps)
        lr, counts = rate(step), dict[torch.device, Tensor]()

        def leaf(path: Path, g: Tensor, p: Tensor, mean: Tensor, square: Tensor, decays: bool) -> tuple[Tensor, Tensor, Tensor]:
            if not (g.dtype == p.dtype == mean.dtype and backend_of(g.device).fused_adamw and g.is_contiguous()):
                u, mean, square = one(step, placement, g, p, mean, square, decays)
                return (p if placement.donate else p.clone()).add_(u), mean, square
            p, mean, square = (leaves.own(t, placement) for t in (p, mean, square))
            if g.device not in counts:
                counts[g.device] = torch.tensor(step + 1.0, device=g.device)
            decay = weight_decay if decays else 0.0
            torch._fused_adamw_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                [p], [g], [mean], [square], [], [counts[g.device]],
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip
            return p, mean, square

        decays = (leaves.masked(mask, params),)
        new, (mean, square) = leaves.leafwise(leaf, grads, params, (state.mean, state.square), decays, placement)
        return or_old(new, params), AdamState(leaves.add_one(state.steps, placement), mean, square)

    return Optimizer(init, Fused(update, advance) if fused else update, metrics)


def add_decayed_weights(weight_decay: float, mask: Mask = None) -> Optimizer:
    """Add ``weight_decay`` times the parameter to the update of each leaf that ``mask`` picks.

    Before `scale_by_adam` that is L2 regularisation, between it and `scale_by_learning_rate` the decoupled decay of Loshchilov
    and Hutter 2019, "Decoupled Weight Decay Regularization".

    Args:
        weight_decay: the factor, at least 0.
        mask: ``(path, param) -> bool`` (`no_decay_1d`), a tree of bools, or ``None`` for all leaves.

    Raises:
        ValueError: if ``weight_decay`` is negative; (of ``init``) if ``mask`` is a tree of another structure.
    """
    leaves.check("add_decayed_weights", "weight_decay", weight_decay, 0)

    def init(params: Tree, placement: Placement = UNPLACED) -> tuple[()]:
        leaves.masked(mask, params)
        return ()

    def update(grads: Tree, state: tuple[()], params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, tuple[()]]:
        def add(path: Path, g: Tensor, p: Tensor, decays: bool) -> tuple[Tensor]:
            u = leaves.own_update(g, p, placement)
            return (u.add_(p, alpha=weight_decay) if decays else u,)

        return leaves.leafwise(add, grads, params, (), (leaves.masked(mask, params),))[0], ()

    return Optimizer(init, update, _no_metrics)


def scale_by_schedule(schedule: Schedule, *, name: str = "scale") -> Optimizer:
    """Multiply updates by ``schedule(step)``, which is the metric ``name``."""
    return _scale(schedule, 1.0, name)


def scale_by_learning_rate(lr: float | Schedule) -> Optimizer:
    """Multiply updates by minus the rate, which is the metric ``"lr"``: down the gradient.

    Raises:
        ValueError: if ``lr`` is a negative number.
    """
    return _scale(as_schedule("scale_by_learning_rate", lr), -1.0, "lr")


def last_rate(schedule: Schedule, name: str = "lr") -> Callable[[Any], dict[str, Tensor]]:
    """Metrics of a state with ``steps``: the rate of the last update, before it that of the first. Shape (), float64."""

    def metrics(state: Any) -> dict[str, Tensor]:
        return {name: _scalar(schedule(max(leaves.as_int(state.steps) - 1, 0)))}

    return metrics


def _no_metrics(state: Any) -> dict[str, Tensor]:
    return {}


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _scale(schedule: Schedule, sign: float, name: str) -> Optimizer:
    def init(params: Tree, placement: Placement = UNPLACED) -> ScheduleState:
        return ScheduleState(leaves.zero_count())

    def update(grads: Tree, state: Any, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, ScheduleState]:
        factor = sign * schedule(leaves.as_int(state.steps))

        def scale(path: Path, g: Tensor, p: Tensor) -> tuple[Tensor]:
            return (leaves.own_update(g, p, placement).mul_(factor),)

        updates, _ = leaves.leafwise(scale, grads, params)
        return updates, ScheduleState(leaves.add_one(state.steps, placement))

    return Optimizer(init, update, last_rate(schedule, name))
