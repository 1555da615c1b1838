"""The ops for NPUs against the reference, with a stand-in for torch_npu that checks what it is given. Never run on hardware."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests import fake_torch_npu
from xtf.backends import backend_of
from xtf.ops.npu import NPU
from xtf.ops.reference import REFERENCE

vjp: Any = torch.func.vjp
npu: Any = NPU
plain: Any = REFERENCE


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setitem(sys.modules, "torch_npu", fake_torch_npu.module())
    fake_torch_npu.calls.clear()
    yield fake_torch_npu.calls


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def inputs(tokens: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, *shape, generator=generator).to(dtype) for shape in shapes]


def close(a: Tensor, b: Tensor, relative: float) -> None:
    """Relative to what is compared, or to the inputs, whose size is 1, where that is 0: of a token that sees only itself."""
    assert a.shape == b.shape and (a.double() - b).abs().max() <= relative * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("lengths", [[6, 1, 0, 9, 4], [20], [1] * 20])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("value", [8, 5])
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-5)])
def test_attention(lengths: list[int], window: int | None, value: int, dtype: torch.dtype, relative: float, calls: list[str]) -> None:
    cu = bounds(lengths)
    args = inputs(20, (4, 8), (2, 8), (2, value), dtype=dtype)
    got, back = vjp(lambda *qkv: npu.attention(*qkv, cu, scale=0.3, window=window), *args)
    want, want_back = vjp(lambda *qkv: plain.attention(*qkv, cu, scale=0.3, window=window), *(t.double() for t in args))
    assert got.dtype == dtype
    close(got, want, relative)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    for grad, expected in zip(back(dout.to(dtype)), want_back(dout.double()), strict=True):
        assert grad.dtype == dtype
        close(grad, expected, relative)
    assert calls == ["attention", "attention_grad"]


def test_attention_takes_what_autograd_brings(calls: list[str]) -> None:
    """Heads that are slices of a larger tensor, and the cotangent of a sum, which has no strides of its own."""
    (packed,) = inputs(10, (8, 6))
    cu = bounds([4, 6])

    def total(ops: Any, t: Tensor) -> Tensor:
        return ops.attention(t[:, :4], t[:, 4:6], t[:, 6:], cu, scale=0.4).sum()

    got, want = torch.func.grad(lambda t: total(NPU, t))(packed), torch.func.grad(lambda t: total(REFERENCE, t))(packed.double())
    close(got, want, 1e-5)
    assert len(calls) == 2


@pytest.mark.parametrize("ends", [[3, 3, 11, 12], [0, 0, 0, 12], [12]])
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_grouped_mm(ends: list[int], dtype: torch.dtype, relative: float, calls: list[str]) -> None:
    offsets = torch.tensor(ends, dtype=torch.int32)
    x, w = inputs(12, (6,), dtype=dtype)[0], inputs(len(ends), (5, 6), dtype=dtype)[0]
    got, back = vjp(lambda x, w: npu.grouped_mm(x, w, offsets), x, w)
    want, want_back = vjp(lambda x, w: plain.grouped_mm(x, w, offsets), x.double(), w.double())
    close(got, want, relative)
    for dout in (torch.randn(12, 5, generator=torch.Generator().manual_seed(1)), torch.ones(()).expand(12, 5)):
        for grad, expected in zip(back(dout.to(dtype)), want_back(dout.double()), strict=True):
            assert grad.dtype == dtype and not grad.isnan().any()
            close(grad, expected, relative)
    assert calls == ["grouped_matmul 0", *["grouped_matmul 2", "grouped_matmul 0"] * 2]


def test_what_the_kernels_do_not_take_goes_to_the_reference(calls: list[str]) -> None:
    cu, offsets = bounds([4, 6]), torch.tensor([4, 10], dtype=torch.int32)
    q, k, v = inputs(10, (4, 6), (2, 6), (2, 6))
    sinks = torch.randn(4)
    assert torch.equal(npu.attention(q, k, v, cu, scale=0.4, sinks=sinks), plain.attention(q, k, v, cu, scale=0.4, sinks=sinks))
    wide = [t.double() for t in (q, k, v)]
    assert torch.equal(npu.attention(*wide, cu, scale=0.4), plain.attention(*wide, cu, scale=0.4))
    x, w = torch.randn(10, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    assert torch.equal(npu.grouped_mm(x, w, offsets), plain.grouped_mm(x, w, offsets))
    assert calls == []


def test_no_tokens_reach_no_kernel(calls: list[str]) -> None:
    args = inputs(0, (4, 6), (2, 6), (2, 6))
    out, back = vjp(lambda *qkv: npu.attention(*qkv, bounds([0]), scale=0.4), *args)
    assert [t.shape for t in (out, *back(out))] == [args[0].shape, *(t.shape for t in args)] and calls == []


def test_it_traces_into_one_graph(calls: list[str]) -> None:
    args, cu = inputs(10, (4, 6), (2, 6), (2, 4)), bounds([4, 6])

    def both(*qkv: Tensor) -> Any:
        out, back = vjp(lambda *t: npu.attention(*t, cu, scale=0.4), *qkv)
        return out, *back(out)

    for got, want in zip(torch.compile(both, backend="aot_eager", fullgraph=True)(*args), both(*args), strict=True):
        assert torch.equal(got, want)
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = npu.attention(*(torch.empty(t.shape, dtype=torch.bfloat16) for t in args), cu, scale=0.4)
        assert out.shape == (10, 4, 4) and out.dtype == torch.bfloat16


def test_bad_arguments_and_second_derivatives_are_refused(calls: list[str]) -> None:
    q, k, v = inputs(10, (4, 6), (2, 6), (2, 6))
    with pytest.raises(ValueError, match="at most 2048"):
        npu.attention(q, k, v, torch.zeros(2050, dtype=torch.int32), scale=1.0)
    with pytest.raises(ValueError, match=r"expected \(T, heads, size\)"):
        npu.attention(q, k[:5], v, bounds([10]), scale=1.0)
    with pytest.raises(ValueError, match=r"expected \(rows, K\)"):
        npu.grouped_mm(q, k, bounds([10]))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        slope = torch.func.grad(lambda q: npu.attention(q, k, v, bounds([10]), scale=1.0).square().sum())
        torch.func.grad(lambda q: slope(q).square().sum())(q)
    w, offsets = torch.randn(1, 5, 6), torch.tensor([10], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        slope = torch.func.grad(lambda x: npu.grouped_mm(x, w, offsets).square().sum())
        torch.func.grad(lambda x: slope(x).square().sum())(q[:, 0])


def test_without_torch_npu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    q, k, v = inputs(4, (2, 4), (2, 4), (2, 4))
    for op in (lambda: npu.attention(q, k, v, bounds([4]), scale=1.0), lambda: npu.grouped_mm(q[0], k[:1], bounds([2])[1:])):
        with pytest.raises(ImportError, match="need the package torch_npu"):
            op()


def test_its_record() -> None:
    found = backend_of("npu:3")
    assert found.ops is NPU and found.collectives == "hccl" and found.streams and found.pinned and not found.fused_adamw
