"""Tiles of float8 numbers: a tensor cut into tiles, each with a scale of its own.

A tile's scale brings its largest magnitude to the largest number of the float8 dtype, as DeepSeek-V3 does (DeepSeek-AI 2024,
section 3.3.2). Padding is zeros, so the last tile of a dim may be smaller and nothing changes.

An infinity or a NaN makes its whole tile NaN: what is not finite stays so, and such a training step is skipped. Zeros stay zeros.

Dims: M and K the last two of a tensor, m and k the rows and columns of a tile, R = ceil(M / m) and C = ceil(K / k) tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32, Int64
from torch import Tensor

TILE = 128
"""Numbers that share a scale along a dim that a product sums over."""

ROWS, COLUMNS, BLOCKS = (1, TILE), (TILE, 1), (TILE, TILE)
"""Shapes of tiles: part of a row, part of a column, and a block."""


class Tiled(NamedTuple):
    """A tensor in float8.

    Args:
        codes: (..., R × m, C × k) float8, with zeros as padding.
        scale: (..., R, C), at least float32: a number is its code times the scale of its tile.
    """

    codes: Tensor
    scale: Tensor


def quantise(
    x: Float[Tensor, "*batch M K"], tile: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn, *, power_of_two: bool = False
) -> Tiled:
    """Round a tensor to float8, tile by tile.

    A number is off by at most 2^-4 of itself in e4m3 (2^-3 in e5m2), or where it is very small by 2^-18 (2^-32) of its tile's largest;
    twice that for scales that are powers of two, which leave up to half of the range unused.

    Args:
        x: (..., M, K).
        tile: (m, k).
        dtype: a float8 dtype with a sign.
        power_of_two: whether scales are rounded up to powers of two. To multiply by them is exact.

    Example:
        >>> tiled = quantise(torch.tensor([[448.0, -3.5, 0.0]]), ROWS)
        >>> dequantise(tiled, ROWS, torch.Size((1, 3))).tolist(), tiled.scale.tolist()
        ([[448.0, -3.5, 0.0]], [[1.0]])
    """
    (m, k), wide = tile, torch.promote_types(x.dtype, torch.float32)
    *batch, rows, columns = x.shape
    high, across = -(-rows // m), -(-columns // k)
    x = x.to(wide)
    if m > 1 or columns % k:
        x = F.pad(x, (0, across * k - columns, 0, high * m - rows))
    tiles = x.reshape(*batch, high, m, across, k)
    # at least the least normal number: a tile of zeros divides by it
    scale = (tiles.abs().amax((-3, -1), keepdim=True) / torch.finfo(dtype).max).clamp(min=torch.finfo(wide).tiny)
    if power_of_two:
        fraction = torch.frexp(scale).mantissa  # from a half up to 1, and dividing by it is exact
        scale = torch.where(fraction == 0.5, scale, scale / fraction)
    codes = (tiles / scale).to(dtype).reshape(*batch, high * m, across * k)
    return Tiled(codes, scale.squeeze((-3, -1)))


def dequantise(tiled: Tiled, tile: tuple[int, int], shape: torch.Size) -> Float[Tensor, "*batch M K"]:
    """The numbers of a `Tiled`, in the dtype of its scales.

    Args:
        tiled: what `quantise` gave.
        tile: as given there.
        shape: (M, K), without padding.
    """
    (m, k), (*batch, high, across) = tile, tiled.scale.shape
    tiles = tiled.codes.to(tiled.scale.dtype).reshape(*batch, high, m, across, k) * tiled.scale[..., :, None, :, None]
    return tiles.reshape(*batch, high * m, across * k)[..., : shape[0], : shape[1]]


def rounded(x: Float[Tensor, "*batch M K"], tile: tuple[int, int], dtype: torch.dtype, power_of_two: bool) -> Float[Tensor, "*batch M K"]:
    """What `quantise` keeps of a tensor, in at least float32."""
    return dequantise(quantise(x, tile, dtype, power_of_two=power_of_two), tile, x.shape[-2:])


def rounded_groups(
    x: Float[Tensor, "rows K"], offsets: Int32[Tensor, " groups"], dtype: torch.dtype, power_of_two: bool
) -> Float[Tensor, "rows K"]:
    """`rounded` with tiles `COLUMNS` that begin anew with each group of rows.

    Args:
        x: (rows, K), rows of a group standing together.
        offsets: (groups,), the row at which each group ends; the last is ``rows``.
        dtype, power_of_two: see `quantise`.
    """
    places = _places(x, offsets)
    high = (-(-x.shape[0] // TILE) + offsets.shape[0]) * TILE  # each group may leave one tile partly empty
    apart = x.new_zeros(high, x.shape[1]).index_copy(0, places, x)
    return rounded(apart, COLUMNS, dtype, power_of_two).index_select(0, places)


def _places(x: Float[Tensor, "rows K"], offsets: Int32[Tensor, " groups"]) -> Int64[Tensor, " rows"]:
    """Where each row stands when every group begins at a multiple of `TILE`. Nothing is read on the host.

    Example:
        >>> _places(torch.zeros(3, 1), torch.tensor([1, 1, 3], dtype=torch.int32)).tolist()
        [0, 128, 129]
    """
    ends = offsets.long()
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    space = (ends - begins + TILE - 1) // TILE * TILE
    row = torch.arange(x.shape[0], device=offsets.device)
    group = torch.searchsorted(ends, row, right=True)
    return row + (space.cumsum(0) - space - begins)[group]
