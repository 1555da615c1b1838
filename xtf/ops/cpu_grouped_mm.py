"""Grouped matrix products on CPUs: one product per group, in the form that `xtf.ops.cpu` describes.

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

from xtf.ops import mkl
from xtf.ops.mkl import Product
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
    x, w = x.contiguous(), w.contiguous()
    out = x.new_empty(x.shape[0], w.shape[1])
    _run([Product(x[begin:end], w[group].T, out[begin:end]) for group, begin, end in _groups(offsets)])
    return out


@torch.library.custom_op("xtf::grouped_mm_cpu_dx", mutates_args=())
def _grouped_mm_dx(dout: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    dout, w = dout.contiguous(), w.contiguous()
    dx = dout.new_empty(dout.shape[0], w.shape[2])
    _run([Product(dout[begin:end], w[group], dx[begin:end]) for group, begin, end in _groups(offsets)])
    return dx


@torch.library.custom_op("xtf::grouped_mm_cpu_dw", mutates_args=())
def _grouped_mm_dw(dout: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dout = dout.contiguous()
    dw = x.new_empty(offsets.shape[0], dout.shape[1], x.shape[1])
    # One after another: MKL's batch is slower at these, whose outputs are large and whose inner sizes are small. A group without rows
    # gets the zeros of an empty product.
    for group, begin, end in _groups(offsets):
        torch.mm(dout[begin:end].T, x[begin:end], out=dw[group])
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


def _run(todo: list[Product]) -> None:
    """Products of groups: those that have rows, all at once where that can be done."""
    todo = [product for product in todo if product.a.shape[0]]
    if todo and mkl.available(todo[0].out.dtype):
        mkl.products(todo)
        return
    for a, b, out in todo:
        torch.mm(a, b, out=out)


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
