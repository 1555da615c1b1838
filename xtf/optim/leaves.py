"""How optimizers walk trees and get the tensors they write into: each writes only into what `own` returned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from xtf import tree
from xtf.optim.placement import UNPLACED, Placement, StateHost, host_of
from xtf.tree import Path, Tree

_CPU_BLOCK = 1 << 20  # elements: the few tensors of a block stay in the last cache between one operation and the next
_BLOCK = 1 << 26  # elements elsewhere: bounds temporaries to a few hundred MB

Mask = Callable[[Path, Tensor], bool] | Tree | None
"""Which leaves: ``(path, param) -> bool``, a tree of bools, or ``None`` for all."""


def leafwise(
    fn: Callable[..., tuple[Any, ...]],
    grads: Tree,
    params: Tree,
    states: Sequence[Tree] = (),
    extras: Sequence[Tree] = (),
    placement: Placement = UNPLACED,
) -> tuple[Tree, tuple[Tree, ...]]:
    """Walk the leaves: ``fn(path, grad, param, *states, *extras) -> (update, *states)`` for each that has a gradient.

    State that ``placement.host`` holds is brought to the leaf's device for ``fn``, the next leaf's while this one is updated, and put
    back.

    Returns:
        (updates, states). A leaf without gradient has the update ``None`` and keeps its states.

    Raises:
        ValueError: if trees or shapes differ, or if a leaf has a gradient but no parameter or state.
    """
    check_structure(grads, params, "grads")
    for state in states:
        check_structure(state, params, "state")
    rows = list(zip(tree.paths(params), *(tree.leaves(t) for t in (grads, params, *states, *extras)), strict=True))
    stream, outputs = _Stream(placement, [(row[1], row[3 : 3 + len(states)]) for row in rows]), list[tuple[Any, ...]]()
    for at, (path, g, p, *rest) in enumerate(rows):
        own_states = rest[: len(states)]
        if g is None:
            outputs.append((None, *own_states))
            continue
        if p is None or any(s is None for s in own_states):
            raise ValueError(
                f"leaf {path!r} has a gradient, but no {'parameter' if p is None else 'optimizer state'}: "
                "give init the parameter of each leaf that is trained, and None as the gradient of each other"
            )
        if g.shape != p.shape:
            raise ValueError(f"leaf {path!r}: the gradient has shape {tuple(g.shape)}, the parameter {tuple(p.shape)}; they must be equal")
        update, *new = fn(path, g, p, *stream.bring(at), *rest[len(states) :])
        outputs.append((update, *stream.put(at, new)))
    stream.settle()
    trees = [tree.unflatten(params, [row[i] for row in outputs]) for i in range(1 + len(states))]
    return trees[0], tuple(trees[1:])


class _Stream:
    """The state of leaves, leaf by leaf: as it is, or to and from the host with the next leaf's under way.

    Args:
        placement: says where state lives.
        rows: the gradient and the states of each leaf.
    """

    def __init__(self, placement: Placement, rows: list[tuple[Any, tuple[Any, ...]]]) -> None:
        self._placement, self._rows = placement, rows
        self._coming: dict[int, list[tuple[Tensor, Any]]] = {}

    def _start(self, at: int, host: StateHost) -> None:
        grad, states = self._rows[at]
        if at not in self._coming:
            self._coming[at] = [host.bring(state, grad.device) for state in states]

    def bring(self, at: int) -> Sequence[Any]:
        """The states of a leaf on its device."""
        host = host_of(self._placement)
        if host is None:
            return self._rows[at][1]
        self._start(at, host)
        arrived = [host.arrive(tensor, done) for tensor, done in self._coming.pop(at)]
        ahead = next((i for i in range(at + 1, len(self._rows)) if self._rows[i][0] is not None and None not in self._rows[i][1]), None)
        if ahead is not None:
            self._start(ahead, host)
        return arrived

    def put(self, at: int, new: Sequence[Tensor]) -> Sequence[Tensor]:
        """The new states of a leaf, where state lives."""
        host = host_of(self._placement)
        if host is None:
            return new
        return [host.put(state, old if self._placement.donate else None) for state, old in zip(new, self._rows[at][1], strict=True)]

    def settle(self) -> None:
        """Wait until everything is where it lives."""
        host = host_of(self._placement)
        if host is not None:
            for device in {grad.device for grad, _ in self._rows if grad is not None}:
                host.settle(device)


def check_structure(given: Tree, params: Tree, name: str) -> None:
    """Raise ValueError, with the paths that only one of them has, if ``given`` is not of the structure of ``params``."""
    if not tree.same_structure(given, params):
        mine, theirs = set(tree.paths(given)), set(tree.paths(params))
        raise ValueError(
            f"{name} is not of the structure of params: leaves only in {name}: {sorted(mine - theirs)[:5]}, "
            f"only in params: {sorted(theirs - mine)[:5]}; give trees with the same containers and keys"
        )


def per_leaf(choice: Callable[[Path, Tensor], Any] | Tree, params: Tree, name: str) -> Tree:
    """What a function of (path, param), or a tree, says of each leaf; a leaf that is ``None`` has ``None``."""
    if callable(choice):
        return tree.unflatten(params, [None if p is None else choice(path, p) for path, p in tree.items(params).items()])
    check_structure(choice, params, name)
    return choice


def masked(mask: Mask, params: Tree) -> Tree:
    """A tree of bools: `per_leaf` of a `Mask`."""
    return per_leaf((lambda path, p: True) if mask is None else mask, params, "mask")


def no_decay_1d(path: Path, param: Tensor) -> bool:
    """A mask for weight decay: only leaves of at least 2 dims decay, not norms, biases and other vectors.

    Biases of experts, stacked into a matrix (experts, size), do decay; give a mask that goes by path where that matters.
    """
    return param.ndim >= 2


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the optimizer state of a parameter: its own, but at least float32."""
    return torch.promote_types(dtype, torch.float32)


def zeros_state(params: Tree, placement: Placement = UNPLACED) -> Tree:
    """Zeros of each parameter's shape and device, in at least float32, or in ``placement.host``; ``None`` where the parameter is
    ``None``.

    Raises:
        ValueError: if a parameter is not a tensor of floating point numbers.
    """

    host = host_of(placement)

    def zeros(path: Path, p: Any) -> Tensor | None:
        if p is None:
            return None
        if not isinstance(p, Tensor) or not p.is_floating_point():
            kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
            raise ValueError(f"leaf {path!r} is {kind}, not a floating point tensor: give None for a leaf that is not trained")
        if host is not None:
            return host.zeros(p.shape, wide(p.dtype), p.device)
        return torch.zeros(p.shape, dtype=wide(p.dtype), device=p.device)

    return tree.map_with_path(zeros, params)


def own(t: Tensor, placement: Placement, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor with the values of ``t`` that may be overwritten: ``t`` itself where it may be donated, else a copy."""
    dtype = t.dtype if dtype is None else dtype
    if placement.donate and t.dtype == dtype and t.is_contiguous():
        return t
    return t.to(dtype, copy=True, memory_format=torch.contiguous_format)


def own_update(g: Tensor, p: Tensor, placement: Placement) -> Tensor:
    """A tensor to overwrite with the update, holding the gradient: in the wider dtype of gradient and parameter."""
    return own(g, placement, torch.promote_types(g.dtype, p.dtype))


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat views of tensors of one shape, the same range of each at a time.

    Several operations on a block run at the speed of the caches, and their temporaries are small. All but contiguous tensors
    are copied: they may be read, not written.
    """
    flat = [t.reshape(-1) for t in tensors]
    size = _CPU_BLOCK if flat[0].device.type == "cpu" else _BLOCK
    n = flat[0].numel()
    if n <= size:
        if n:
            yield tuple(flat)
        return
    for begin in range(0, n, size):
        yield tuple(t[begin : begin + size] for t in flat)


def zero_count() -> Tensor:
    """Number of updates so far: shape (), int64, on the CPU."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


def add_one(count: Tensor, placement: Placement) -> Tensor:
    """``count + 1``, in its memory where that may be overwritten."""
    return count.add_(1) if placement.donate else count + 1


def as_int(count: Tensor) -> int:
    """The value of a count."""
    # A planned rank has fake tensors, which hold no values. What an update costs does not depend on its number.
    return 0 if isinstance(count, FakeTensor) else int(count)


def check(what: str, name: str, value: Any, low: float, high: float = math.inf, *, low_open: bool = False) -> None:
    """Raise ValueError unless ``value`` is in [low, high), or in (low, high)."""
    if not (isinstance(value, int | float) and (low < value if low_open else low <= value) and value < high):
        raise ValueError(f"{what}: {name} must be a number in {'(' if low_open else '['}{low:g}, {high:g}), got {value!r}")
