"""The differentiable forms of the collectives: linear maps over all ranks, each with its transpose.

One ``autograd.Function`` serves all of them. Its forward runs below every ``torch.func`` transform, on plain tensors, so it may
call the primitives; its backward is the same Function with the transposed map, so gradients of any order exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from xtf.collectives import Axis


class _Map(Protocol):
    """A linear map of the ranks' tensors to the ranks' tensors."""

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def transpose(self) -> _Map: ...


class _Apply(torch.autograd.Function):
    """``apply(x, map) -> map(x)``."""

    @staticmethod
    def forward(x: Tensor, map: _Map) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return map(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.map = inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _apply(dy, ctx.map.transpose), None


def _apply(x: Tensor, map: _Map) -> Tensor:
    return _Apply.apply(x, map)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class _Sizes(torch.autograd.Function):
    """``apply(x, axis, dim, label)``: the size of ``dim`` on each rank. A Function only to run below ``torch.func`` transforms,
    inside of which no number can be read from a tensor."""

    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int, label: str) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        own = torch.tensor([x.shape[dim]], device=x.device)
        return tuple(int(size) for size in axis.start_all_gather(own, [1] * axis.size, label=label).wait())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: None) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, None, None


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Blocks along ``dim``, one per rank, ``sizes`` wide: gathered, or summed and scattered."""

    axis: Axis
    dim: int
    sizes: tuple[int, ...]
    label: str

    def elements(self, rest: Sequence[int]) -> list[int]:
        return [size * math.prod(rest) for size in self.sizes]


class _AllGather(_Blocks):
    def __call__(self, x: Tensor) -> Tensor:
        rows = x.movedim(self.dim, 0)
        rest = rows.shape[1:]
        whole = self.axis.start_all_gather(rows.reshape(-1), self.elements(rest), label=self.label).wait()
        return whole.view(sum(self.sizes), *rest).movedim(0, self.dim)

    @property
    def transpose(self) -> _Map:
        return _ReduceScatter(self.axis, self.dim, self.sizes, self.label)


class _ReduceScatter(_Blocks):
    def __call__(self, x: Tensor) -> Tensor:
        rows = x.movedim(self.dim, 0)
        rest = rows.shape[1:]
        piece = self.axis.start_reduce_scatter(rows.reshape(-1), self.elements(rest), label=self.label).wait()
        return piece.view(self.sizes[self.axis.index], *rest).movedim(0, self.dim)

    @property
    def transpose(self) -> _Map:
        return _AllGather(self.axis, self.dim, self.sizes, self.label)


@dataclass(frozen=True, eq=False)
class _AllReduce:
    axis: Axis
    label: str

    def __call__(self, x: Tensor) -> Tensor:
        return self.axis.start_all_reduce(x, label=self.label).wait()

    @property
    def transpose(self) -> _Map:
        return self


@dataclass(frozen=True, eq=False)
class _Copy:
    axis: Axis
    label: str

    def __call__(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    @property
    def transpose(self) -> _Map:
        return _Sum(self.axis, self.label)


class _Sum(_AllReduce):
    @property
    def transpose(self) -> _Map:
        return _Copy(self.axis, self.label)


@dataclass(frozen=True, eq=False)
class _AllToAll:
    axis: Axis
    send: tuple[int, ...]
    receive: tuple[int, ...]
    label: str

    def __call__(self, x: Tensor) -> Tensor:
        return self.axis.start_all_to_all(x, self.send, self.receive, label=self.label).wait()

    @property
    def transpose(self) -> _Map:
        return _AllToAll(self.axis, self.receive, self.send, self.label)


@dataclass(frozen=True, eq=False)
class _Broadcast:
    axis: Axis
    root: int
    label: str

    def __call__(self, x: Tensor) -> Tensor:
        return self.axis.start_broadcast(x, self.root, label=self.label).wait()

    @property
    def transpose(self) -> _Map:
        return _ReduceTo(self.axis, self.root, self.label)


class _ReduceTo(_Broadcast):
    """The sum at ``root`` and 0 elsewhere: a reduce-scatter in which one rank keeps everything."""

    def __call__(self, x: Tensor) -> Tensor:
        sizes = [x.numel() if rank == self.root else 0 for rank in range(self.axis.size)]
        total = self.axis.start_reduce_scatter(x.reshape(-1), sizes, label=self.label).wait()
        return total.view(x.shape) if self.axis.index == self.root else torch.zeros_like(x)

    @property
    def transpose(self) -> _Map:
        return _Broadcast(self.axis, self.root, self.label)


@dataclass(frozen=True, eq=False)
class _Permute:
    axis: Axis
    shift: int
    label: str

    def __call__(self, x: Tensor) -> Tensor:
        return self.axis.start_permute(x, self.shift, label=self.label).wait()

    @property
    def transpose(self) -> _Map:
        return _Permute(self.axis, -self.shift, self.label)


def all_gather(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int] | None, label: str) -> Tensor:
    dim = _dim("all_gather", x, dim)
    exchanged: Any = _Sizes.apply(x, axis, dim, label) if sizes is None else sizes  # pyright: ignore[reportUnknownMemberType]
    sizes = per_rank(axis, exchanged, "all_gather: sizes")
    if x.shape[dim] != sizes[axis.index]:
        raise ValueError(f"all_gather: dim {dim} of this rank's block has size {x.shape[dim]}, expected sizes[{axis.index}] of {sizes}")
    return _apply(x, _AllGather(axis, dim, sizes, label))


def reduce_scatter(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int] | None, label: str) -> Tensor:
    dim = _dim("reduce_scatter", x, dim)
    if sizes is None:
        if x.shape[dim] % axis.size:
            raise ValueError(
                f"reduce_scatter: dim {dim} has size {x.shape[dim]}, which the {axis.size} ranks of the axis {axis.name!r} do not divide: "
                "give the size of each rank's block as sizes"
            )
        sizes = [x.shape[dim] // axis.size] * axis.size
    sizes = per_rank(axis, sizes, "reduce_scatter: sizes")
    if x.shape[dim] != sum(sizes):
        raise ValueError(f"reduce_scatter: dim {dim} has size {x.shape[dim]}, but sizes {sizes} sum to {sum(sizes)}")
    return _apply(x, _ReduceScatter(axis, dim, sizes, label))


def all_reduce(axis: Axis, x: Tensor, label: str) -> Tensor:
    return _apply(x, _AllReduce(axis, label))


def all_to_all(axis: Axis, x: Tensor, send: Sequence[int], receive: Sequence[int], label: str) -> Tensor:
    return _apply(x, _AllToAll(axis, tuple(send), tuple(receive), label))


def broadcast(axis: Axis, x: Tensor, root: int, label: str) -> Tensor:
    return _apply(x, _Broadcast(axis, root, label))


def permute(axis: Axis, x: Tensor, shift: int, label: str) -> Tensor:
    return _apply(x, _Permute(axis, shift, label))


def copy(axis: Axis, x: Tensor, label: str) -> Tensor:
    return _apply(x, _Copy(axis, label))


def sum_(axis: Axis, x: Tensor, label: str) -> Tensor:
    return _apply(x, _Sum(axis, label))


def _dim(method: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{method}: dim must be a dim of the tensor, got {dim} for the shape {list(x.shape)}")
    return dim % x.dim()


def per_rank(axis: Axis, values: Sequence[int], what: str) -> tuple[int, ...]:
    """``values``, one for each rank of the axis; ``what`` names method and argument for the error."""
    values = tuple(values)
    if len(values) != axis.size or any(value < 0 for value in values):
        raise ValueError(
            f"{what} must hold a number of 0 or more for each of the {axis.size} ranks of the axis {axis.name!r}, got {values}"
        )
    return values
