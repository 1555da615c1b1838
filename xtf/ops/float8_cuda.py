"""Float8 products on NVIDIA's float8 units. **Never run on hardware**: written from the documentation of `torch.nn.functional.scaled_mm`
and of cuBLAS ("1D and 128x128 2D block scaling for FP8 data types"); tests check operands and their layouts on a CPU.

cuBLAS multiplies tiles of 1 × 128 by blocks of 128 × 128, or by tiles of 1 × 128, on Hopper (compute capability 9.x) from CUDA 12.9 on.
Its scales lie column by column; those of blocks are padded to multiples of 4 along the dim that is summed over. torch has no grouped
product with such scales.

Dims: M tokens, K and N the inner and outer size of a product.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from xtf.ops.tiles import BLOCKS, ROWS, TILE, quantise


class Operands(NamedTuple):
    """What `torch.nn.functional.scaled_mm` takes.

    Args:
        a: (rows, inner) float8, row by row.
        b: (inner, columns) float8, column by column.
        a_scale: (rows, inner / 128) float32, column by column: tiles of 1 × 128.
        b_scale: of tiles of 128 × 1, (inner / 128, columns), row by row; of blocks, (inner / 128 padded to a multiple of 4, columns / 128),
            column by column.
        blocks: whether ``b`` has blocks.
    """

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    blocks: bool


def serves(x: Tensor, w: Tensor) -> bool:
    """Whether float8 units take the products of ``x`` (M, K) and ``w`` (N, K): bfloat16, and sizes of whole tiles but for M."""
    if not x.is_cuda or x.dtype is not torch.bfloat16 or w.dtype is not torch.bfloat16:
        return False
    return x.shape[0] > 0 and w.shape[0] % TILE == 0 and w.shape[1] % TILE == 0 and _units(x.device.index or 0)


def rows_times_blocks(x: Float[Tensor, "M K"], w: Float[Tensor, "K N"], dtype: torch.dtype, power_of_two: bool) -> Float[Tensor, "M N"]:
    """``x @ w``: ``x`` in tiles of 1 × 128 of ``dtype``, ``w`` in blocks of e4m3. Never run on hardware."""
    return _multiply(rows_and_blocks(x, w, dtype, power_of_two))[: x.shape[0]]


def columns_times_columns(
    dout: Float[Tensor, "M N"], x: Float[Tensor, "M K"], dtype: torch.dtype, power_of_two: bool
) -> Float[Tensor, "N K"]:
    """``dout.T @ x``, both in tiles of 128 × 1, ``dout`` of ``dtype`` and ``x`` of e4m3. Never run on hardware."""
    return _multiply(columns_and_columns(dout, x, dtype, power_of_two))


def rows_and_blocks(x: Float[Tensor, "M K"], w: Float[Tensor, "K N"], dtype: torch.dtype, power_of_two: bool) -> Operands:
    """The operands of `rows_times_blocks`; M is padded to whole tiles, as kernels want it aligned."""
    a, b = quantise(_whole(x), ROWS, dtype, power_of_two=power_of_two), quantise(w.T, BLOCKS, power_of_two=power_of_two)
    padded = F.pad(b.scale, (0, -b.scale.shape[1] % 4))
    return Operands(a.codes, b.codes.contiguous().T, a.scale.T.contiguous().T, padded.contiguous().T, True)


def columns_and_columns(dout: Float[Tensor, "M N"], x: Float[Tensor, "M K"], dtype: torch.dtype, power_of_two: bool) -> Operands:
    """The operands of `columns_times_columns`; M, which is summed over, is padded to whole tiles."""
    a = quantise(_whole(dout).T, ROWS, dtype, power_of_two=power_of_two)
    b = quantise(_whole(x).T, ROWS, power_of_two=power_of_two)
    return Operands(a.codes.contiguous(), b.codes.contiguous().T, a.scale.T.contiguous().T, b.scale.T.contiguous(), False)


def _whole(x: Float[Tensor, "M size"]) -> Float[Tensor, "whole size"]:
    return F.pad(x, (0, 0, 0, -x.shape[0] % TILE))


def _multiply(given: Operands) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    second = ScalingType.BlockWise128x128 if given.blocks else ScalingType.BlockWise1x128
    return scaled_mm(given.a, given.b, given.a_scale, ScalingType.BlockWise1x128, given.b_scale, second, output_dtype=torch.bfloat16)


@cache
def _units(device: int) -> bool:
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device)[0] == 9 and version >= (12, 9)
