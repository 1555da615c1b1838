"""Specs: initial values that depend on seed, leaf and index alone; and the parts that leaves are cut into."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xtf.spec
from xtf.placement import part
from xtf.spec import Init, ParamSpec


def spec(*shape: int, dtype: torch.dtype = torch.float32, init: Init = Init.normal(1.0)) -> ParamSpec:  # noqa: B008
    return ParamSpec(shape, dtype, (None,) * len(shape), init)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    ranges = [tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in shape]
    return shape, [(a, b) for a, b in ranges]


@given(blocks(), st.integers(0, 2**40), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_block_is_that_of_the_whole(block: tuple[tuple[int, ...], list[tuple[int, int]]], seed: int, dtype: torch.dtype) -> None:
    shape, ranges = block
    one = spec(*shape, dtype=dtype)
    whole, cut = one.initial(seed, "layers.0.w"), one.initial(seed, "layers.0.w", ranges)
    assert whole.shape == shape and whole.dtype == cut.dtype == dtype
    assert torch.equal(cut, whole[tuple(slice(a, b) for a, b in ranges)])


def test_blocks_larger_than_what_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = spec(11, 5, 3)
    whole, cut = one.initial(0, "w"), one.initial(0, "w", [(2, 9), (1, 5), (0, 3)])
    monkeypatch.setattr(xtf.spec, "_BLOCK", 7)
    assert torch.equal(one.initial(0, "w"), whole)
    assert torch.equal(one.initial(0, "w", [(2, 9), (1, 5), (0, 3)]), cut)


def test_values_depend_on_seed_and_path_and_index() -> None:
    one = spec(64, 64)
    draws = [one.initial(seed, path).flatten() for seed in (0, 1, 2**33) for path in ("layers.0.w", "layers.1.w", "layers.0.v")]
    assert all(torch.equal(draw, again.flatten()) for draw, again in zip(draws[:1], [one.initial(0, "layers.0.w")], strict=True))
    for i, a in enumerate(draws):
        assert len(a.unique()) > 4090  # float32 seldom repeats
        for b in draws[:i]:
            assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.08
            assert not (a == b).any()


def test_values_are_those_of_a_standard_normal() -> None:
    x = spec(1 << 20, dtype=torch.float64, init=Init.normal(0.02)).initial(5, "w") / 0.02
    n = x.numel()
    assert abs(float(x.mean())) < 5 / math.sqrt(n)
    assert abs(float(x.var()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((x**3).mean())) < 5 * math.sqrt(15 / n)
    assert abs(float((x**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    ranks = torch.linspace(-3.5, 3.5, 41, dtype=torch.float64)
    empirical = torch.searchsorted(x.sort().values, ranks).double() / n
    assert float((empirical - torch.special.ndtr(ranks)).abs().max()) < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov at 0.1%
    assert abs(float((x[1:] * x[:-1]).mean())) < 5 / math.sqrt(n)
    assert x.isfinite().all() and 4.5 < float(x.abs().max()) < 6.5


def test_the_same_values_whatever_the_dtype() -> None:
    wide = spec(50, dtype=torch.float64).initial(0, "w")
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(spec(50, dtype=dtype).initial(0, "w"), wide.to(dtype))


def test_constants() -> None:
    one = spec(3, 4, init=Init.constant(2.5))
    assert (one.initial(0, "w") == 2.5).all() and one.initial(0, "w", [(0, 1), (1, 3)]).shape == (1, 2)


def test_sizes_and_axes() -> None:
    assert spec(3, 4).numel == 12 and spec().numel == 1 and spec(0, 4).numel == 0
    assert spec().initial(0, "w").shape == ()
    with pytest.raises(ValueError, match=r"ParamSpec of shape \(3, 4\) needs 2 axes, got \('embed',\): name each dim or give None"):
        ParamSpec((3, 4), torch.float32, ("embed",), Init.constant(0.0))


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 64))
def test_parts_tile_a_range_near_equally(start: int, size: int, n: int) -> None:
    parts = [part((start, start + size), n, i) for i in range(n)]
    assert parts[0][0] == start and parts[-1][1] == start + size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    sizes = [stop - begin for begin, stop in parts]
    assert min(sizes) >= 0 and max(sizes) - min(sizes) <= 1


@given(st.integers(0, 200), st.integers(1, 8), st.integers(1, 8))
def test_parts_of_parts_tile_too(size: int, n: int, m: int) -> None:
    """Owned over one axis, then sharded over another: nothing is lost between them."""
    parts = [part(part((0, size), n, i), m, j) for i in range(n) for j in range(m)]
    assert [x for begin, stop in parts for x in range(begin, stop)] == list(range(size))
