"""Products in float8: dense and grouped ones whose three products, forward and both backward, take operands rounded tile by tile.

The recipe is that of DeepSeek-V3 (DeepSeek-AI 2024, section 3.3), which XTuner's tile-wise float8 follows too. With x (M, K) and
w (N, K), each operand has tiles along the dim that the product sums over:

* forward, x wᵀ: x in tiles of 1 × 128, w in blocks of 128 × 128;
* to x, dy w: dy in tiles of 1 × 128, w in the same blocks;
* to w, dyᵀ x: both in tiles of 128 × 1, along tokens; of a grouped product, the tiles begin anew with each group.

Dense products of bfloat16 run on float8 units where torch has a kernel for these scales (`xtf.ops.float8_cuda`). Everywhere else, and for
grouped products everywhere, they are *emulated*: the rounded operands are multiplied in float32 (float64 for float64 inputs; on CUDA in
bfloat16, whose grouped kernel takes nothing wider), which is what float8 units with float32 accumulation compute but for the order of sums.

Dims are those of `xtf.ops`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor

from xtf.ops import Ops, float8_cuda, reference
from xtf.ops.reference import check_grouped_mm
from xtf.ops.tiles import BLOCKS, COLUMNS, ROWS, rounded, rounded_groups

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Recipe(NamedTuple):
    """How operands are rounded.

    Args:
        gradients: dtype of the gradients of outputs; activations and weights are e4m3.
        power_of_two: whether scales are powers of two.
        weight_gradient: whether the gradients of weights are products in float8 too; else in the dtype of computation, unrounded.
    """

    gradients: torch.dtype = E4M3
    power_of_two: bool = False
    weight_gradient: bool = True

    def __str__(self) -> str:
        said = {
            "gradients=e5m2": self.gradients is E5M2,
            "power_of_two": self.power_of_two,
            "weight_gradient=False": not self.weight_gradient,
        }
        return f"float8({', '.join(text for text, holds in said.items() if holds)})"


def float8_ops(base: Ops, recipe: Recipe) -> Ops:
    """``base`` with dense and grouped products in float8; the rest is as it was.

    Args:
        base: the ops of a device.
        recipe: how operands are rounded.

    Example:
        >>> float8_ops(reference.REFERENCE, Recipe()).name
        'reference, float8()'
    """
    how, grouped_form = tuple(recipe), base.name if base.name in ("cpu", "cuda") else "reference"

    def linear(
        x: Float[Tensor, "*batch K"], w: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None = None, /
    ) -> Float[Tensor, "*batch N"]:
        out = _Linear.apply(x.reshape(-1, x.shape[-1]), w.view_as(w), how).reshape(*x.shape[:-1], w.shape[0])  # views: see xtf.ops.cpu
        return out if bias is None else out + bias

    def grouped_mm(
        x: Float[Tensor, "rows K"], w: Float[Tensor, "groups N K"], offsets: Int32[Tensor, " groups"]
    ) -> Float[Tensor, "rows N"]:
        check_grouped_mm(x, w, offsets)
        return _GroupedMM.apply(x.view_as(x), w.view_as(w), offsets, how, grouped_form)

    return dataclasses.replace(base, name=f"{base.name}, {recipe}", grouped_mm=grouped_mm, linear=linear)


# Dense products -----------------------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, how: Any) -> Tensor:
        _, power_of_two, _ = how
        if float8_cuda.serves(x, w):
            return float8_cuda.rows_times_blocks(x, w.T, E4M3, power_of_two)
        return (rounded(x, ROWS, E4M3, power_of_two) @ rounded(w, BLOCKS, E4M3, power_of_two).T).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Any], output: Tensor) -> None:
        x, w, ctx.how = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        return *_LinearBackward.apply(grad_outputs[0], x, w, ctx.how), None


class _LinearBackward(torch.autograd.Function):
    """The backward as a function of its own, as in `xtf.ops.cpu`."""

    @staticmethod
    def forward(dout: Tensor, x: Tensor, w: Tensor, how: Any) -> tuple[Tensor, Tensor]:
        gradients, power_of_two, weight_gradient = how
        on_units = float8_cuda.serves(x, w)
        if on_units:
            dx = float8_cuda.rows_times_blocks(dout, w, gradients, power_of_two)
        else:
            dx = (rounded(dout, ROWS, gradients, power_of_two) @ rounded(w, BLOCKS, E4M3, power_of_two)).to(x.dtype)
        if not weight_gradient:
            return dx, dout.T @ x
        if on_units:
            return dx, float8_cuda.columns_times_columns(dout, x, gradients, power_of_two)
        dw = rounded(dout, COLUMNS, gradients, power_of_two).T @ rounded(x, COLUMNS, E4M3, power_of_two)
        return dx, dw.to(w.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise NotImplementedError("products in float8 have no second derivative: leave xtf.transforms.float8 out")


# Grouped products ---------------------------------------------------------------------------------------------------------------


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, offsets: Tensor, how: Any, form: str) -> Tensor:
        _, power_of_two, _ = how
        return _product(rounded(x, ROWS, E4M3, power_of_two), rounded(w, BLOCKS, E4M3, power_of_two), offsets, form).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Any, str], output: Tensor) -> None:
        x, w, offsets, ctx.how, ctx.form = inputs
        ctx.save_for_backward(x, w, offsets)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return *_GroupedMMBackward.apply(grad_outputs[0], *ctx.saved_tensors, ctx.how, ctx.form), None, None, None


class _GroupedMMBackward(torch.autograd.Function):
    """The backward as a function of its own, as in `xtf.ops.cpu`."""

    @staticmethod
    def forward(dout: Tensor, x: Tensor, w: Tensor, offsets: Tensor, how: Any, form: str) -> tuple[Tensor, Tensor]:
        gradients, power_of_two, weight_gradient = how
        blocks = rounded(w, BLOCKS, E4M3, power_of_two).transpose(1, 2)
        dx = _product(rounded(dout, ROWS, gradients, power_of_two), blocks, offsets, form).to(x.dtype)
        if not weight_gradient:
            return dx, _weight_product(dout, x, offsets, form).to(w.dtype)
        of_out, of_x = rounded_groups(dout, offsets, gradients, power_of_two), rounded_groups(x, offsets, E4M3, power_of_two)
        return dx, _weight_product(of_out, of_x, offsets, form).to(w.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise NotImplementedError("products in float8 have no second derivative: leave xtf.transforms.float8 out")


def _product(x: Tensor, w: Tensor, offsets: Tensor, form: str) -> Tensor:
    """(rows, K) and (groups, N, K) to (rows, N), without a derivative."""
    if form == "cpu":
        return torch.ops.xtf.grouped_mm_cpu(x, w, offsets)
    if form == "cuda" and x.is_cuda:
        return F.grouped_mm(x.bfloat16(), w.bfloat16().transpose(1, 2), offs=offsets)
    return reference.grouped_mm(x, w, offsets)


def _weight_product(dout: Tensor, x: Tensor, offsets: Tensor, form: str) -> Tensor:
    """(rows, N) and (rows, K) to (groups, N, K), without a derivative."""
    if form == "cpu":
        return torch.ops.xtf.grouped_mm_cpu_dw(dout, x, offsets)
    if form == "cuda" and x.is_cuda:
        return F.grouped_mm(dout.bfloat16().contiguous().T, x.bfloat16(), offs=offsets)
    ends = [int(end) for end in offsets]
    return torch.stack([dout[begin:end].T @ x[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)])
