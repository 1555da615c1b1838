"""What an optimizer is, and how optimizers are combined.

An optimizer is three pure functions over trees (after optax). Every one walks its leaves with `leafwise` and writes only into
tensors that `own` gave it: that is all there is to donation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xtf import tree
from xtf.optim.leaves import check_structure, leafwise, per_leaf
from xtf.optim.placement import UNPLACED, Placement
from xtf.tree import Path, Tree


class InitFn(Protocol):
    """``init(params, placement) -> state``. ``params`` has ``None`` at leaves that are not trained; they have no state."""

    def __call__(self, params: Tree, placement: Placement = UNPLACED) -> Any: ...


class UpdateFn(Protocol):
    """``update(grads, state, params, placement) -> (updates, state)``.

    A leaf whose gradient is ``None`` has the update ``None`` and keeps its state. An update has the wider dtype of gradient
    and parameter. Where ``placement.donate``, the new state is in the old one's memory and an update in its gradient's (unless
    the gradient is of a narrower dtype, or not contiguous); else nothing given is modified. The values are the same bits.
    """

    def __call__(self, grads: Tree, state: Any, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, Any]: ...


class AdvanceFn(Protocol):
    """``advance(grads, state, params, placement) -> (params, state)``: an update and `apply_updates` in one pass over memory.

    The same to rounding. Where ``placement.donate``, the new parameters are in the old ones' memory; gradients are only read.
    """

    def __call__(self, grads: Tree, state: Any, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, Any]: ...


@dataclass(frozen=True)
class Fused:
    """An `UpdateFn` with an `AdvanceFn`. They are one object, so that who replaces an optimizer's update replaces both.

    Args:
        update: the update.
        advance: what `advance` does in its place.
    """

    update: UpdateFn
    advance: AdvanceFn

    def __call__(self, grads: Tree, state: Any, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, Any]:
        """The update."""
        return self.update(grads, state, params, placement)


class JudgeFn(Protocol):
    """``judge(state, seen) -> (accepted, state)``, before an update: whether the step is made, () bool, and the state it is made with.

    ``seen`` are the step's metrics, ``"loss"`` and ``"grad_norm"`` among them, the same on every rank. Nothing given is modified: of a step
    that is refused nothing is kept.
    """

    def __call__(self, state: Any, seen: Mapping[str, Tensor]) -> tuple[Tensor, Any]: ...


class Optimizer(NamedTuple):
    """An optimizer: three pure functions, and where it has one a rule that refuses steps.

    Args:
        init: see `InitFn`.
        update: see `UpdateFn`; its updates are added to the parameters (`apply_updates`), if it is not `Fused`.
        metrics: ``metrics(state) -> {name: value}``, values of shape (): what the last update used (``"lr"``), or what the first
            one will use, before it.
        judge: see `JudgeFn`; ``None`` accepts every step.

    Example:
        >>> import torch
        >>> from xtf.optim import adamw
        >>> params = {"w": torch.ones(2, 2)}
        >>> optimizer = adamw(lr=0.1)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update({"w": torch.full((2, 2), 3.0)}, state, params)
        >>> apply_updates(params, updates)["w"][0, 0].item()
        0.8999999761581421
        >>> optimizer.metrics(state)["lr"].item()
        0.1
    """

    init: InitFn
    update: UpdateFn
    metrics: Callable[[Any], dict[str, Tensor]]
    judge: JudgeFn | None = None


def advance(optimizer: Optimizer, grads: Tree, state: Any, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, Any]:
    """The parameters and the state after an update, in the fastest way that the optimizer has.

    Example:
        >>> import torch
        >>> from xtf.optim import sgd
        >>> params = {"w": torch.ones(2)}
        >>> advance(sgd(lr=0.5), {"w": torch.ones(2)}, sgd(lr=0.5).init(params), params)[0]
        {'w': tensor([0.5000, 0.5000])}
    """
    if isinstance(optimizer.update, Fused):
        return optimizer.update.advance(grads, state, params, placement)
    updates, state = optimizer.update(grads, state, params, placement)
    return apply_updates(params, updates, placement), state


def apply_updates(params: Tree, updates: Tree, placement: Placement = UNPLACED) -> Tree:
    """Parameters plus updates, leaf by leaf; in the parameters' memory where ``placement.donate``.

    The sum is formed in the wider dtype and rounded once to the parameter's. A leaf whose update is ``None`` is returned as it is.

    Raises:
        ValueError: if the trees or the shapes of two leaves differ.

    Example:
        >>> import torch
        >>> apply_updates({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "b": None})
        {'a': tensor([2.]), 'b': tensor([1.])}
    """

    def apply(path: Path, u: Tensor, p: Tensor) -> tuple[Tensor]:
        return ((p if placement.donate else p.clone()).add_(u),)

    return or_old(leafwise(apply, updates, params)[0], params)


def placed_by(optimizer: Optimizer, change: Callable[[Placement], Placement]) -> Optimizer:
    """The same optimizer, given a placement that is changed first."""

    def init(params: Tree, placement: Placement = UNPLACED) -> Any:
        return optimizer.init(params, change(placement))

    def update(grads: Tree, state: Any, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, Any]:
        return optimizer.update(grads, state, params, change(placement))

    def advanced(grads: Tree, state: Any, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, Any]:
        return advance(optimizer, grads, state, params, change(placement))

    return optimizer._replace(init=init, update=Fused(update, advanced))


def or_old(new: Tree, params: Tree) -> Tree:
    """The new leaves, and where there is ``None`` the parameters."""
    pairs = zip(tree.leaves(params), tree.leaves(new), strict=True)
    return tree.unflatten(params, [old if one is None else one for old, one in pairs])


def chain(*optimizers: Optimizer) -> Optimizer:
    """One optimizer after another, each given the updates of the one before as its gradients. None at all changes nothing.

    The state is the tuple of their states; their metrics are joined. A step is made if none of them refuses it.

    Raises:
        ValueError: (of ``metrics``) if two of them report the same name.

    Example:
        >>> import torch
        >>> from xtf.optim import clip_by_global_norm, scale_by_learning_rate
        >>> optimizer = chain(clip_by_global_norm(1.0), scale_by_learning_rate(0.5))
        >>> grads = {"w": torch.tensor([3.0, 4.0])}
        >>> optimizer.update(grads, optimizer.init(grads), grads)[0]
        {'w': tensor([-0.3000, -0.4000])}
    """

    def init(params: Tree, placement: Placement = UNPLACED) -> tuple[Any, ...]:
        return tuple(optimizer.init(params, placement) for optimizer in optimizers)

    def update(grads: Tree, state: tuple[Any, ...], params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, tuple[Any, ...]]:
        states: list[Any] = []
        for optimizer, part in zip(optimizers, state, strict=True):
            grads, part = optimizer.update(grads, part, params, placement)
            states.append(part)
        return grads, tuple(states)

    def metrics(state: tuple[Any, ...]) -> dict[str, Tensor]:
        joined: dict[str, Tensor] = {}
        for optimizer, part in zip(optimizers, state, strict=True):
            new = optimizer.metrics(part)
            if both := joined.keys() & new.keys():
                raise ValueError(f"chain: metric {min(both)!r} is reported twice: give one of the two another name")
            joined |= new
        return joined

    def all_but_last(grads: Tree, state: tuple[Any, ...], params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, tuple[Any, ...]]:
        grads, states = chain(*optimizers[:-1]).update(grads, state[:-1], params, placement)
        params, last = advance(optimizers[-1], grads, state[-1], params, placement)
        return params, (*states, last)

    def judge(state: tuple[Any, ...], seen: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
        accepted, states = torch.tensor(True), list[Any]()
        for optimizer, part in zip(optimizers, state, strict=True):
            if optimizer.judge is not None:
                fine, part = optimizer.judge(part, seen)
                accepted = accepted.to(fine.device) & fine
            states.append(part)
        return accepted, tuple(states)

    fused = bool(optimizers) and isinstance(optimizers[-1].update, Fused)
    judges = any(optimizer.judge is not None for optimizer in optimizers)
    return Optimizer(init, Fused(update, all_but_last) if fused else update, metrics, judge if judges else None)


def partition(labels: Callable[[Path, Tensor], Hashable] | Tree, optimizers: Mapping[Any, Optimizer]) -> Optimizer:
    """Route each leaf to one of several optimizers.

    Args:
        labels: ``(path, param) -> label``, or a tree of labels (a tree of bools, say) of the parameters' structure.
        optimizers: the optimizer of each label. Its state has ``None`` at leaves that are not its own. A norm taken inside one
            is over its own leaves; to clip by the norm of all, put `clip_by_global_norm` before the partition.

    Returns:
        An optimizer with the state ``{label: state}`` and metrics named ``"label/name"``.

    Raises:
        ValueError: if ``optimizers`` is empty, or one of them has a ``judge``, which is of all leaves; (of ``init`` and ``update``) if a
            leaf's label has no optimizer.

    Example:
        >>> import torch
        >>> from xtf.optim import adamw, sgd
        >>> by_dims = partition(lambda path, p: p.ndim >= 2, {True: sgd(lr=1.0), False: adamw(lr=0.5)})
        >>> params = {"b": torch.ones(1), "w": torch.ones(1, 1)}
        >>> updates, state = by_dims.update(params, by_dims.init(params), params)
        >>> updates
        {'b': tensor([-0.5000]), 'w': tensor([[-1.]])}
    """
    if not optimizers:
        raise ValueError("partition: optimizers is empty: give an optimizer for each label")
    for label, optimizer in optimizers.items():
        if optimizer.judge is not None:
            raise ValueError(f"partition: the optimizer of {label!r} refuses steps, which are of all leaves: chain it before the partition")

    def label_leaves(params: Tree) -> list[Any]:
        found = tree.leaves(per_leaf(labels, params, "partition: labels"))
        for path, label, p in zip(tree.paths(params), found, tree.leaves(params), strict=True):
            if p is not None and label not in optimizers:
                raise ValueError(f"partition: leaf {path!r} has the label {label!r}, but optimizers are given for {list(optimizers)}")
        return found

    def select(of: Tree, found: list[Any], label: Any) -> Tree:
        return tree.unflatten(of, [leaf if own == label else None for leaf, own in zip(tree.leaves(of), found, strict=True)])

    def init(params: Tree, placement: Placement = UNPLACED) -> dict[Any, Any]:
        found = label_leaves(params)
        return {label: optimizer.init(select(params, found, label), placement) for label, optimizer in optimizers.items()}

    def update(grads: Tree, state: dict[Any, Any], params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, dict[Any, Any]]:
        check_structure(grads, params, "grads")
        found = label_leaves(params)
        updates: list[Tensor | None] = [None] * len(found)
        states: dict[Any, Any] = {}
        for label, optimizer in optimizers.items():
            part, states[label] = optimizer.update(select(grads, found, label), state[label], select(params, found, label), placement)
            updates = [new if own == label else old for old, new, own in zip(updates, tree.leaves(part), found, strict=True)]
        return tree.unflatten(params, updates), states

    def metrics(state: dict[Any, Any]) -> dict[str, Tensor]:
        return {f"{label}/{name}": value for label, opt in optimizers.items() for name, value in opt.metrics(state[label]).items()}

    return Optimizer(init, update, metrics)
