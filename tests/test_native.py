"""The kernels in C++ (`xtf.ops.native`) equal the reference in float64, and what cannot be compiled or is no packing is said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from xtf.ops import native
from xtf.ops.cpu import CPU
from xtf.ops.native import build
from xtf.ops.reference import REFERENCE

pytestmark = pytest.mark.skipif(build.library() is None, reason="the kernels are for x86 with AVX and need a C++ compiler")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def with_grads(fn: Callable[..., Tensor], args: tuple[Tensor, ...], cotangent: Tensor) -> tuple[Tensor, ...]:
    out: Any = torch.func.vjp(fn, *args)
    return out[0], *out[1](cotangent)


def equal_to_rounding(got: tuple[Tensor, ...], want: tuple[Tensor, ...], size: float = 1.0) -> None:
    """``size``: of the numbers that results are sums and differences of."""
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32 and one.shape == other.shape
        if one.numel():
            assert (one - other).abs().max() <= 2e-6 * max(size, float(other.abs().max()))


def check_attention(lengths: list[int], heads: int, kv_heads: int, size: int, value: int, window: int | None, outside: int = 0) -> None:
    tokens = sum(lengths) + outside
    args = (random(tokens, heads, size), random(tokens, kv_heads, size), random(tokens, kv_heads, value) / value**0.5)
    cotangent, bounds = random(tokens, heads, value), offsets_of(lengths)
    got = with_grads(lambda q, k, v: CPU.attention(q, k, v, bounds, scale=size**-0.5, window=window), args, cotangent)
    inside = slice(0, tokens - outside)
    wide = tuple(t[inside].double() for t in args)
    want = with_grads(
        lambda q, k, v: REFERENCE.attention(q, k, v, bounds, scale=size**-0.5, window=window), wide, cotangent[inside].double()
    )
    # A gradient of a score is a difference of products of cotangents and values, times a key or a query.
    q, k, v, d = (float(t.norm(dim=-1).max()) if t.numel() else 0.0 for t in (*args, cotangent))
    equal_to_rounding(tuple(t[inside] for t in got), want, max(1.0, d * v * max(q, k) * size**-0.5))
    assert all(not t[tokens - outside :].any() for t in got)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 9) | st.just(60) | st.just(300), max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.sampled_from([1, 5, 32, 40]),
    value=st.sampled_from([3, 32, 65]),
    window=st.sampled_from([None, 1, 3, 70, 1000]),
    outside=st.sampled_from([0, 2]),
)
@example([], 1, 1, 5, 3, None, 0)
@example([0, 0], 1, 1, 5, 3, None, 2)
@example([513], 1, 1, 32, 32, 257, 0)
def test_attention(lengths: list[int], kv_heads: int, group: int, size: int, value: int, window: int | None, outside: int) -> None:
    check_attention(lengths, kv_heads * group, kv_heads, size, value, window, outside)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_long_document_of_one_head_is_cut_into_segments(threads: int) -> None:
    """Each segment has sums of its own: gradients of keys are those of all of them."""
    torch.set_num_threads(threads)
    check_attention([1500, 3], 2, 1, 16, 8, None)


def test_attention_takes_strided_heads() -> None:
    both = random(20, 6, 8)
    strided = both[:, :2], both[:, 2:4], both[:, 4:]
    bounds = offsets_of([20])
    a, b, c = (t.contiguous() for t in strided)
    want = CPU.attention(a, b, c, bounds, scale=0.3)
    assert torch.equal(CPU.attention(strided[0], strided[1], strided[2], bounds, scale=0.3), want)
    a, b, c = (t.transpose(0, 2).contiguous().transpose(0, 2) for t in strided)
    assert torch.equal(CPU.attention(a, b, c, bounds, scale=0.3), want)


def test_large_scores_and_what_is_not_finite() -> None:
    bounds = offsets_of([4])
    q, k, v = random(4, 1, 8) * 1e4, random(4, 1, 8) * 1e4, random(4, 1, 8)
    want = REFERENCE.attention(q.double(), k.double(), v.double(), bounds, scale=1.0)
    assert torch.allclose(CPU.attention(q, k, v, bounds, scale=1.0).double(), want, atol=1e-5)
    for bad in (torch.nan, torch.inf):
        broken = q.clone()
        broken[2, 0, 0] = bad
        out = CPU.attention(broken, k, v, bounds, scale=1.0)
        assert out[:2].isfinite().all() and out[3].isfinite().all() and not out[2].isfinite().any()


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.integers(0, 5) | st.just(29) | st.just(600), min_size=1, max_size=5),
    inner=st.sampled_from([1, 3, 16, 33, 300, 700]),
    outer=st.sampled_from([1, 2, 31, 64, 300]),
)
@example([0, 0], 3, 2)
@example([1], 1, 1)
def test_grouped_mm(rows: list[int], inner: int, outer: int) -> None:
    offsets = offsets_of(rows)[1:]
    args, cotangent = (random(sum(rows), inner) / inner**0.5, random(len(rows), outer, inner)), random(sum(rows), outer) / 8
    got = with_grads(lambda x, w: CPU.grouped_mm(x, w, offsets), args, cotangent)
    wide = tuple(t.double() for t in args)
    equal_to_rounding(got, with_grads(lambda x, w: REFERENCE.grouped_mm(x, w, offsets), wide, cotangent.double()))


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 70_000], [16_384, 16_385, 3, 200_001]])
def test_norms(sizes: list[int]) -> None:
    tensors = [random(size) for size in sizes] + [random(40, 30).T[::3]]
    want = torch.tensor([float(x.double().norm()) for x in tensors], dtype=torch.float64)
    results: list[Tensor] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(native.norms(tensors))
    assert torch.allclose(results[0], want, rtol=1e-12) and all(torch.equal(results[0], other) for other in results)


def test_the_same_bits_again() -> None:
    """Threads take blocks as they come, and that changes no sum."""
    args, bounds, cotangent = (random(900, 2, 16), random(900, 1, 16), random(900, 1, 16)), offsets_of([800, 100]), random(900, 2, 16)
    rows, offsets = (random(900, 40), random(5, 50, 40)), offsets_of([100, 700, 0, 1, 99])[1:]

    def run() -> tuple[Tensor, ...]:
        attended = with_grads(lambda q, k, v: CPU.attention(q, k, v, bounds, scale=0.3), args, cotangent)
        return attended + with_grads(lambda x, w: CPU.grouped_mm(x, w, offsets), rows, random(900, 50))

    first = run()
    assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("bounds", [[0, 5], [-1, 3], [0, 3, 2, 4]])
def test_documents_outside_the_tokens_are_refused(bounds: list[int]) -> None:
    q = random(4, 1, 8)
    with pytest.raises(ValueError, match="expected rising numbers from 0 to at most 4"):
        CPU.attention(q, q, q, torch.tensor(bounds, dtype=torch.int32), scale=1.0)


@pytest.mark.parametrize("offsets", [[2, 5], [3, 2], [-1, 2]])
def test_groups_outside_the_rows_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="expected rising numbers up to the number of rows, 4"):
        CPU.grouped_mm(random(4, 3), random(2, 5, 3), torch.tensor(offsets, dtype=torch.int32))


def test_without_kernels_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    check_attention([30, 200], 4, 2, 8, 8, None)
    check_attention([30, 200], 4, 2, 8, 5, 17)
    x, w, offsets = random(10, 6), random(4, 5, 6), torch.tensor([3, 3, 9, 10], dtype=torch.int32)
    got = with_grads(lambda x, w: CPU.grouped_mm(x, w, offsets), (x, w), random(10, 5))
    want = with_grads(lambda x, w: REFERENCE.grouped_mm(x, w, offsets), (x.double(), w.double()), random(10, 5).double())
    equal_to_rounding(got, want)


@pytest.fixture
def another_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "xtf" / "native"


@pytest.mark.parametrize(("compiler", "said"), [("no-such-compiler", "no C++ compiler (no-such-compiler)"), ("false", "exit status 1")])
def test_a_missing_or_failing_compiler_is_said_once(
    compiler: str, said: str, another_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    build.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "xtf.ops"):
            assert build.library() is None and build.library() is None
    finally:
        build.library.cache_clear()
    assert len(caplog.messages) == 1 and said in caplog.messages[0]
    assert not list(another_home.glob("*"))


def test_what_was_compiled_is_used_again(another_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.library.cache_clear()
    try:
        assert build.library() is not None
        (made,) = another_home.iterdir()
        before = made.stat().st_mtime_ns
        build.library.cache_clear()
        assert build.library() is not None
        assert [file.stat().st_mtime_ns for file in another_home.iterdir()] == [before]
    finally:
        build.library.cache_clear()
