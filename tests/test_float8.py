"""Tiles of float8 numbers, and products of them, against a plain emulation in Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from xtf.ops import Ops, float8_cuda
from xtf.ops.cpu import CPU
from xtf.ops.float8 import E4M3, E5M2, Recipe, float8_ops
from xtf.ops.reference import REFERENCE
from xtf.ops.tiles import BLOCKS, COLUMNS, ROWS, TILE, dequantise, quantise, rounded, rounded_groups

Tile = tuple[int, int]


def vjp(fn: Callable[..., Any], *args: Tensor) -> tuple[Any, Callable[..., Any]]:
    out = torch.func.vjp(fn, *args)
    return out[0], out[1]


SIZES = [(1, 1), (3, 128), (2, 129), (130, 5), (128, 256), (257, 300)]


def numbers(dtype: torch.dtype) -> list[float]:
    """Every finite number of a float8 dtype in order, from the definition of its bits: sign, exponent, fraction."""
    exponent_bits, fraction_bits, bias = (4, 3, 7) if dtype is E4M3 else (5, 2, 15)
    found: list[float] = []
    for exponent, fraction in product(range(2**exponent_bits), range(2**fraction_bits)):
        if dtype is E4M3 and exponent == 15 and fraction == 7:
            continue  # NaN
        if dtype is E5M2 and exponent == 31:
            continue  # infinity and NaN
        part = fraction / 2**fraction_bits
        size = part * 2.0 ** (1 - bias) if exponent == 0 else (1 + part) * 2.0 ** (exponent - bias)
        found += [size, -size]
    return sorted(set(found))


def plain_rounded(x: Tensor, tile: Tile, dtype: torch.dtype = E4M3, power_of_two: bool = False) -> Tensor:
    """Tile by tile, number by number: the nearest of all float8 numbers to the nearest float32 number, of two the even one."""
    table, out = torch.tensor(numbers(dtype), dtype=torch.float64), x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    odd = (torch.arange(len(table)) - len(table) // 2) % 2 * 1e-9  # the middle is 0
    for part in tiles(out, tile):
        if part.any():
            scale = part.abs().max() / table.max().to(out.dtype)
            scale = 2.0 ** math.ceil(math.log2(float(scale))) if power_of_two else scale
            distances = ((part / scale).float().double().unsqueeze(-1) - table).abs()
            part.copy_(table[(distances * (1 + odd)).argmin(-1)] * scale)
    return out.double()


def tiles(x: Tensor, tile: Tile) -> Iterator[Tensor]:
    for a, b in product(range(0, x.shape[0], tile[0]), range(0, x.shape[1], tile[1])):
        yield x[a : a + tile[0], b : b + tile[1]]


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of very different sizes, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * torch.exp(
        2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    )


def close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert got.shape == want.shape
    assert float((got.double() - want).abs().max() if got.numel() else 0) <= tolerance * float(want.abs().max() if got.numel() else 0)


# Tiles --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [ROWS, COLUMNS, BLOCKS], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_tiles_are_the_nearest_numbers(tile: Tile, dtype: torch.dtype, power_of_two: bool) -> None:
    for size in SIZES:
        x = random(*size)
        got = rounded(x, tile, dtype, power_of_two)
        close(got, plain_rounded(x, tile, dtype, power_of_two))
        relative, least = (2.0**-4, 2.0**-18) if dtype is E4M3 else (2.0**-3, 2.0**-32)
        for error, part in zip(tiles((got - x).abs(), tile), tiles(x.abs(), tile), strict=True):
            assert (error <= torch.maximum(relative * part, 2 * least * part.max())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tiles_in_at_least_float32(dtype: torch.dtype) -> None:
    x = random(5, 200).to(dtype)
    got = quantise(x, ROWS)
    assert (got.codes.shape, got.codes.dtype, got.scale.shape, got.scale.dtype) == ((5, 256), E4M3, (5, 2), torch.float32)
    close(rounded(x, ROWS, E4M3, False), plain_rounded(x, ROWS), 1e-6)


def test_batches_of_blocks() -> None:
    w = torch.stack([random(130, 150, seed=i) for i in range(3)])
    close(rounded(w, BLOCKS, E4M3, False), torch.stack([plain_rounded(each, BLOCKS) for each in w]))


@pytest.mark.parametrize("tile", [ROWS, COLUMNS, BLOCKS], ids=str)
def test_float8_numbers_times_powers_of_two_stay(tile: Tile) -> None:
    table = torch.tensor(numbers(E4M3))
    x = table[torch.randint(len(table), (300, 260), generator=torch.Generator().manual_seed(0))]
    for part, exponent in zip(tiles(x, tile), range(-100, 10**6), strict=False):
        part[0, 0] = 448.0  # so that the scale is 1
        part.mul_(2.0 ** (exponent % 200 - 100))
    for power_of_two in (False, True):
        assert torch.equal(rounded(x, tile, E4M3, power_of_two), x)


def test_scales_that_are_powers_of_two() -> None:
    x = torch.cat([random(400, 128), 448 * torch.exp2(torch.arange(-60.0, 60)).double()[:, None].expand(-1, 128)])
    for given in (x, x.float()):
        plain, power = quantise(given, ROWS).scale, quantise(given, ROWS, power_of_two=True).scale
        assert (torch.frexp(power).mantissa == 0.5).all()
        assert ((power >= plain) & (power < 2 * plain)).all()
        assert torch.equal(power[400:], plain[400:])


def test_rounding_twice_changes_nothing_with_powers_of_two() -> None:
    once = rounded(random(200, 300), ROWS, E4M3, True)
    assert torch.equal(rounded(once, ROWS, E4M3, True), once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_zeros_and_the_ends_of_the_range(dtype: torch.dtype, power_of_two: bool) -> None:
    info = torch.finfo(dtype)
    for size in (0.0, info.tiny, info.smallest_normal * 2.0**-4, info.max / 2, -info.max / 2):
        x = torch.zeros(2, 130, dtype=dtype)
        x[0, 3] = size
        got = rounded(x, ROWS, E4M3, power_of_two)
        assert got.isfinite().all(), size
        assert not got[1].any() and not got[0, :3].any()
        if abs(size) >= info.tiny * 448:
            close(got, x.double(), 2.0**-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_not_finite_stays_so(bad: float, power_of_two: bool) -> None:
    x = random(4, 256)
    x[1, 130] = bad
    got = rounded(x, ROWS, E4M3, power_of_two)
    assert got[1, 128:].isnan().all()
    assert got.isnan().sum() == 128


@pytest.mark.parametrize("counts", [[3], [0, 5], [128, 1, 0, 0, 130, 127], [0, 0], [1, 300, 0]], ids=str)
def test_tiles_begin_with_groups(counts: list[int]) -> None:
    x, offsets = random(sum(counts), 7), torch.tensor(counts).cumsum(0).int()
    want = [plain_rounded(part, COLUMNS) for part in x.split(counts)]
    close(rounded_groups(x, offsets, E4M3, False), torch.cat(want))


# Products -----------------------------------------------------------------------------------------------------------------------


def plain_linear(x: Tensor, w: Tensor, dout: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    power, kind = recipe.power_of_two, recipe.gradients
    blocks = plain_rounded(w, BLOCKS, E4M3, power)
    out = plain_rounded(x, ROWS, E4M3, power) @ blocks.T
    dx = plain_rounded(dout, ROWS, kind, power) @ blocks
    if not recipe.weight_gradient:
        return out, dx, dout.T @ x
    return out, dx, plain_rounded(dout, COLUMNS, kind, power).T @ plain_rounded(x, COLUMNS, E4M3, power)


RECIPES = [Recipe(), Recipe(E5M2), Recipe(power_of_two=True), Recipe(weight_gradient=False)]


@pytest.mark.parametrize("base", [CPU, REFERENCE], ids=lambda ops: ops.name)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_linear(base: Ops, recipe: Recipe) -> None:
    for tokens, n, k in [(1, 1, 1), (130, 60, 140), (128, 256, 128), (5, 300, 129)]:
        x, w, dout, bias = random(tokens, k), random(n, k, seed=1), random(tokens, n, seed=2), random(n, seed=3)
        out, back = vjp(float8_ops(base, recipe).linear, x, w, bias)
        want = plain_linear(x, w, dout, recipe)
        for got, expected in zip((out, *back(dout)), (want[0] + bias, *want[1:], dout.sum(0)), strict=True):
            close(got, expected)


@pytest.mark.parametrize("base", [CPU, REFERENCE], ids=lambda ops: ops.name)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("counts", [[4], [0, 3, 130], [128, 0, 1, 0]], ids=str)
def test_grouped_mm(base: Ops, recipe: Recipe, counts: list[int]) -> None:
    n, k, rows = 140, 130, sum(counts)
    x, w, dout = random(rows, k), torch.stack([random(n, k, seed=i) for i in range(len(counts))]), random(rows, n, seed=9)
    offsets = torch.tensor(counts).cumsum(0).int()
    out, back = vjp(lambda x, w: float8_ops(base, recipe).grouped_mm(x, w, offsets), x, w)
    want = [plain_linear(*group, recipe) for group in zip(x.split(counts), w, dout.split(counts), strict=True)]
    dx, dw = back(dout)
    close(out, torch.cat([one[0] for one in want]))
    close(dx, torch.cat([one[1] for one in want]))
    close(dw, torch.stack([one[2] for one in want]))


@pytest.mark.parametrize("gradients", [E4M3, E5M2], ids=str)
def test_gradients_of_weights_stay_near_wherever_tokens_are_cut(gradients: torch.dtype) -> None:
    """Each factor is off by 2^-4 of itself (2^-3 in e5m2) at most, so the sum of products by the sum of their magnitudes times that."""
    ops, x, w, dout = float8_ops(CPU, Recipe(gradients)), random(300, 40), random(30, 40, seed=1), random(300, 30, seed=2)
    most = (1 + 2.0**-4) * (1 + (2.0**-4 if gradients is E4M3 else 2.0**-3)) - 1 + 1e-3
    for cuts in ([300], [150, 150], [1, 299], [130, 40, 130]):
        parts = [vjp(ops.linear, a, w)[1](b) for a, b in zip(x.split(cuts), dout.split(cuts), strict=True)]
        error = (torch.stack([dw for _, dw in parts]).sum(0) - dout.T @ x).abs()
        assert (error <= most * dout.abs().T @ x.abs()).all()
        assert error.any()


def test_groups_without_any_row() -> None:
    ops = float8_ops(CPU, Recipe())
    x, w = torch.zeros(0, 8), torch.ones(2, 3, 8)
    out, back = vjp(lambda x, w: ops.grouped_mm(x, w, torch.zeros(2, dtype=torch.int32)), x, w)
    dx, dw = back(out)
    assert (out.shape, dx.shape, dw.shape) == ((0, 3), (0, 8), (2, 3, 8))
    assert not dw.any()
    out, back = vjp(ops.linear, x, w[0])
    assert (out.shape, not back(out)[1].any()) == ((0, 3), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_and_leading_dims(dtype: torch.dtype) -> None:
    ops, x, w = float8_ops(CPU, Recipe()), random(2, 3, 40).to(dtype), random(50, 40, seed=1).to(dtype)
    out, back = vjp(ops.linear, x, w)
    dx, dw = back(torch.ones_like(out))
    assert (out.shape, dx.shape, dw.shape) == ((2, 3, 50), (2, 3, 40), (50, 40))
    assert {out.dtype, dx.dtype, dw.dtype} == {dtype}
    close(out, plain_linear(x.view(6, 40), w, torch.zeros(6, 50), Recipe())[0].view(2, 3, 50), 2.0**-8 if dtype is torch.bfloat16 else 1e-6)


def compiled_linear(x: Tensor, w: Tensor, dout: Tensor, offsets: Tensor) -> Any:
    out, back = vjp(lambda x, w: OPS.linear(x + 1, w), x, w)
    return out, *back(dout)


def compiled_grouped(x: Tensor, w: Tensor, dout: Tensor, offsets: Tensor) -> Any:
    out, back = vjp(lambda x, w: OPS.grouped_mm(x + 1, torch.stack([w, 2 * w]), offsets), x, w)
    return out, *back(dout)


OPS = float8_ops(CPU, Recipe(power_of_two=True))


@pytest.mark.parametrize("fn", [compiled_linear, compiled_grouped])
def test_compiles_to_one_graph_for_all_rows(fn: Callable[..., Any]) -> None:
    run, w = torch.compile(fn, fullgraph=True, dynamic=True), random(30, 140).float()
    for rows, first in ((7, 3), (140, 0), (300, 129)):
        given = random(rows, 140).float(), w, random(rows, 30, seed=1).float(), torch.tensor([first, rows]).int()
        for got, want in zip(run(*given), fn(*given), strict=True):
            close(got, want.double(), 1e-5)


def test_no_second_derivative() -> None:
    x, w = random(2, 3), random(4, 3)
    with pytest.raises(NotImplementedError, match="float8 have no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: OPS.linear(x, w).square().sum())(x).sum())(x)


def test_what_is_not_finite_comes_through_products() -> None:
    x, w = random(3, 4), random(5, 4)
    x[1, 2] = math.inf
    assert OPS.linear(x, w).isnan().any(1).tolist() == [False, True, False]


# Float8 units -------------------------------------------------------------------------------------------------------------------


def plain_scaled_mm(given: float8_cuda.Operands) -> Tensor:
    """What the kernel is documented to compute, of operands laid out as it wants them."""
    assert given.a.is_contiguous() and given.b.T.is_contiguous()
    (rows, inner), columns = given.a.shape, given.b.shape[1]
    assert given.a_scale.shape == (rows, inner // TILE) and given.a_scale.T.is_contiguous()
    a = given.a.float() * given.a_scale.repeat_interleave(TILE, 1)
    if given.blocks:
        assert given.b_scale.shape == (-(-(inner // TILE) // 4) * 4, columns // TILE) and given.b_scale.T.is_contiguous()
        scale = given.b_scale[: inner // TILE].repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    else:
        assert given.b_scale.shape == (inner // TILE, columns)
        scale = given.b_scale.repeat_interleave(TILE, 0)
    return a.double() @ (given.b.float() * scale).double()


@pytest.mark.parametrize("tokens", [1, 128, 200])
def test_operands_of_float8_units(tokens: int) -> None:
    n, k = 256, 384
    x, w, dout = (t.float() for t in (random(tokens, k), random(n, k, seed=1), random(tokens, n, seed=2)))
    out, dx, dw = plain_linear(x.double(), w.double(), dout.double(), Recipe())
    close(plain_scaled_mm(float8_cuda.rows_and_blocks(x, w.T, E4M3, False))[:tokens], out, 1e-6)
    close(plain_scaled_mm(float8_cuda.rows_and_blocks(dout, w, E4M3, False))[:tokens], dx, 1e-6)
    close(plain_scaled_mm(float8_cuda.columns_and_columns(dout, x, E4M3, False)), dw, 1e-6)
    assert not float8_cuda.serves(x, w)


def test_dequantise_is_the_inverse_of_codes() -> None:
    x = random(3, 5)
    tiled = quantise(x, BLOCKS)
    assert torch.equal(dequantise(tiled, BLOCKS, x.shape), rounded(x, BLOCKS, E4M3, False))
