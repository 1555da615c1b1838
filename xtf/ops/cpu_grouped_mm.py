"""Grouped matrix products on CPUs, in the form that `xtf.ops.cpu` describes: by kernels of our own (`xtf.ops.native`), or one product after
another where those do not serve.

Dims are those of `xtf.ops`. Custom ops themselves are annotated plainly: torch reads their schema from the annotations.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (torch's decorators of custom ops carry no types)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from xtf.ops import native
from xtf.ops.reference import check_grouped_mm


def grouped_mm(x: Float[Tensor, "rows K"], w: Float[Tensor, "groups N K"], offsets: Int32[Tensor, " groups"]) -> Float[Tensor, "rows N"]:
    """The rows of each group times that group's matrix, one product per group, see `xtf.ops.GroupedMM`.

    Raises:
        ValueError: for shapes that do not fit each other.
    """
    check_grouped_mm(x, w, offsets)
    return _GroupedMM.apply(x.view_as(x), w.view_as(w), offsets)  # views: see xtf.ops.cpu


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        return torch.ops.xtf.grouped_mm_cpu(x, w, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, w, offsets = ctx.saved_tensors
        return *_GroupedMMBackward.apply(grad_outputs[0], x, w, offsets), None


class _GroupedMMBackward(torch.autograd.Function):
    """The backward as a function of its own, as in `xtf.ops.cpu`."""

    @staticmethod
    def forward(dout: Tensor, x: Tensor, w: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.xtf.grouped_mm_cpu_dx(dout, w, offsets), torch.ops.xtf.grouped_mm_cpu_dw(dout, x, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise NotImplementedError("the CPU grouped product has no second derivative: build the model with xtf.ops.reference.REFERENCE")


@torch.library.custom_op("xtf::grouped_mm_cpu", mutates_args=())
def _grouped_mm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], w.shape[1])
    if native.serves(x):
        native.grouped_mm("forward", x, w, offsets, out)
        return out
    for group, begin, end in _groups(offsets):
        torch.mm(x[begin:end], w[group].T, out=out[begin:end])
    return out


@torch.library.custom_op("xtf::grouped_mm_cpu_dx", mutates_args=())
def _grouped_mm_dx(dout: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    dx = dout.new_empty(dout.shape[0], w.shape[2])
    if native.serves(dout):
        native.grouped_mm("dx", dout, w, offsets, dx)
        return dx
    for group, begin, end in _groups(offsets):
        torch.mm(dout[begin:end], w[group], out=dx[begin:end])
    return dx


@torch.library.custom_op("xtf::grouped_mm_cpu_dw", mutates_args=())
def _grouped_mm_dw(dout: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dw = x.new_empty(offsets.shape[0], dout.shape[1], x.shape[1])
    if native.serves(dout):
        native.grouped_mm("dw", dout, x, offsets, dw)
        return dw
    for group, begin, end in _groups(offsets):
        torch.mm(dout[begin:end].T, x[begin:end], out=dw[group])  # zeros, where the group has no rows
    return dw


@_grouped_mm.register_fake
def _(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@_grouped_mm_dx.register_fake
def _(dout: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return dout.new_empty(dout.shape[0], w.shape[2])


@_grouped_mm_dw.register_fake
def _(dout: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], dout.shape[1], x.shape[1])


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, first row, end row) of each group."""
    begin = 0
    ends: list[int] = offsets.tolist()
    for group, end in enumerate(ends):
        yield group, begin, end
        begin = end


@register_flop_formula([torch.ops.xtf.grouped_mm_cpu, torch.ops.xtf.grouped_mm_cpu_dx])
def _(x: torch.Size, w: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x[0] * w[1] * w[2]


@register_flop_formula(torch.ops.xtf.grouped_mm_cpu_dw)
def _(dout: torch.Size, x: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * dout[0] * dout[1] * x[1]
