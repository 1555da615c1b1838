"""Stochastic gradient descent."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from xtf import tree
from xtf.optim import leaves
from xtf.optim.blocks import last_rate
from xtf.optim.core import Optimizer
from xtf.optim.leaves import Mask
from xtf.optim.placement import UNPLACED, Placement
from xtf.optim.schedules import Schedule, as_schedule
from xtf.tree import Path, Tree


class SgdState(NamedTuple):
    """Number of updates so far, and the momentum: a tree, at least float32; ``None`` at every leaf if there is none."""

    steps: Tensor
    momentum: Tree


def sgd(
    lr: float | Schedule,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Mask = None,
) -> Optimizer:
    """Gradient descent with momentum; the arithmetic of ``torch.optim.SGD``.

    ``g ← g + weight_decay · p``; ``b ← momentum · b + (1 - dampening) · g`` (``b ← g`` in the first update); ``p ← p - lr · b``,
    or ``p ← p - lr · (g + momentum · b)`` with ``nesterov``. The momentum is that of Sutskever et al. 2013, "On the importance
    of initialization and momentum in deep learning".

    Args:
        lr: learning rate, or a schedule of it; the one used last is the metric ``"lr"``.
        momentum: in [0, 1).
        dampening: in [0, 1].
        nesterov: look one step ahead; needs momentum and no dampening.
        weight_decay: at least 0; added to the gradient (L2), not decoupled.
        mask: which leaves decay: ``(path, param) -> bool`` (`no_decay_1d`), a tree of bools, or ``None`` for all.

    Raises:
        ValueError: if an argument is outside its bounds; (of ``init``) if ``mask`` is a tree of another structure, or a leaf
            is not a floating point tensor.
    """
    rate = as_schedule("sgd", lr)
    leaves.check("sgd", "momentum", momentum, 0, 1)
    leaves.check("sgd", "weight_decay", weight_decay, 0)
    if not 0 <= dampening <= 1:
        raise ValueError(f"sgd: dampening must be a number in [0, 1], got {dampening!r}")
    if nesterov and (momentum == 0 or dampening != 0):
        raise ValueError(f"sgd: nesterov needs momentum > 0 and dampening = 0, got momentum={momentum!r} and dampening={dampening!r}")

    def init(params: Tree, placement: Placement = UNPLACED) -> SgdState:
        leaves.masked(mask, params)
        return SgdState(
            leaves.zero_count(),
            leaves.zeros_state(params, placement) if momentum else tree.unflatten(params, [None] * len(tree.leaves(params))),
        )

    def update(grads: Tree, state: SgdState, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, SgdState]:
        step = leaves.as_int(state.steps)
        minus_lr = -rate(step)

        def leaf(path: Path, g: Tensor, p: Tensor, *rest: Tensor | bool) -> tuple[Tensor, ...]:
            *buffers, decays = rest
            u = leaves.own_update(g, p, placement)
            owned = [leaves.own(b, placement) for b in buffers if isinstance(b, Tensor)]
            for part, p_part, *b_part in leaves.blocks(u, p, *owned):
                direction = part.to(leaves.wide(p.dtype))
                if decays and weight_decay:
                    direction.add_(p_part, alpha=weight_decay)
                for b in b_part:
                    if step == 0:
                        b.copy_(direction)
                    else:
                        b.mul_(momentum).add_(direction, alpha=1 - dampening)
                    direction = direction.add_(b, alpha=momentum) if nesterov else direction.copy_(b)
                part.copy_(direction.mul_(minus_lr))
            return u, *owned

        buffers = (state.momentum,) if momentum else ()
        updates, new = leaves.leafwise(leaf, grads, params, buffers, (leaves.masked(mask, params),), placement)
        return updates, SgdState(leaves.add_one(state.steps, placement), new[0] if momentum else state.momentum)

    return Optimizer(init, update, last_rate(rate))
