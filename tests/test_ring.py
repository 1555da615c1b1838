"""Ring attention on simulated ranks is the plain attention of the whole sequence; and no buffer grows with its square."""

from __future__ import annotations

import dataclasses
import threading
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import memory
from xtf import backends, ring
from xtf.backends import backend_of
from xtf.mesh import Mesh, simulate
from xtf.ops import partial_cuda
from xtf.ops.partial import attend, attend_backward, blank
from xtf.ops.reference import attention
from xtf.ring import Ring
from xtf.zigzag import Block, zigzag


def tensors(tokens: int, *shapes: tuple[int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, *shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def errors(lengths: list[int], n: int, dv: int, window: int | None, sinks: bool, dtype: torch.dtype = torch.float64) -> list[float]:
    """The largest differences of the output and of each gradient, over its largest value."""
    ends = [0, *accumulate(lengths)]
    q, k, v, dout = tensors(ends[-1], (4, 6), (2, 6), (2, dv), (4, dv), dtype=dtype)
    sink = torch.linspace(-1, 2, 4, dtype=dtype) if sinks else None
    inputs = [t.double().clone().requires_grad_() for t in (q, k, v, *([sink] if sink is not None else []))]
    bounds = torch.tensor(ends, dtype=torch.int32)
    whole = attention(inputs[0], inputs[1], inputs[2], bounds, scale=0.4, window=window, sinks=inputs[3] if sinks else None)
    wanted = [whole.detach(), *torch.autograd.grad(whole, inputs, dout.double())]

    def rank(mesh: Mesh) -> Any:
        axis, shares = mesh["context"], zigzag(ends, n)
        at, around = shares.tokens(axis.index), Ring(axis, shares, 0.4, window)
        a, b, c = (t[at] for t in (q, k, v))
        seen = ring.forward(around, ring.start(around, b, c), a, b, c, sink)
        *grads, dsinks = ring.backward(around, ring.start(around, b, c), a, b, c, seen, dout[at], sink)
        assert {t.dtype for t in (seen.out, *grads)} == {dtype}
        return at, [seen.out, *grads], dsinks

    ranks = simulate(rank, context=n)
    found = [torch.empty_like(t) for t in wanted[:4]]
    for at, parts, _ in ranks:
        for into, part in zip(found, parts, strict=True):
            into[at] = part.double()
    if sinks:
        found.append(torch.stack([dsinks.double() for _, _, dsinks in ranks]).sum(0))
    floor = 0.1 * max(t.abs().max() for t in wanted)  # the gradients of queries that see one key are nothing but rounding
    return [float((a - b).abs().max() / b.abs().max().clamp_min(floor)) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("lengths", [[40], [1, 1, 1], [1, 30, 2, 1, 17, 5, 64], [300, 1, 7], [13] * 6], ids=str)
@pytest.mark.parametrize(
    ("dv", "window", "sinks"), [(6, None, False), (3, None, True), (6, 7, True), (6, 100, False), (3, 1, False), (3, 20, True)]
)
def test_it_is_the_attention_of_the_whole_sequence(lengths: list[int], dv: int, window: int | None, sinks: bool) -> None:
    for n in (1, 2, 3, 5):
        assert max(errors(lengths, n, dv, window, sinks)) < 1e-13


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_lower_precision(dtype: torch.dtype, bound: float) -> None:
    for dv, window in ((6, None), (3, None), (6, 9)):
        assert max(errors([1, 130, 40], 3, dv, window, True, dtype)) < bound


@pytest.mark.parametrize(("dv", "window"), [(64, None), (32, None), (64, 100)])
def test_no_buffer_grows_with_the_square_of_a_sequence(dv: int, window: int | None) -> None:
    """Live bytes at most of a forward and a backward against keys of other ranks: twice the tokens, at most little more than twice."""

    def peak(tokens: int) -> int:
        shares = zigzag([0, tokens], 2)
        q, k, v, dout = (t[shares.tokens(0)] for t in tensors(tokens, (2, 64), (1, 64), (1, dv), (2, dv), dtype=torch.float32))
        with memory.Live() as live:
            out, lse = blank(q, v)
            for other in (0, 1):
                attend(out, lse, q, k, v, shares.blocks(0, other, window), scale=0.1, window=window)
            dq, dk, dv_ = (torch.zeros_like(t) for t in (q, k, v))
            for other in (0, 1):
                attend_backward(dq, dk, dv_, dout, q, k, v, out, lse, shares.blocks(0, other, window), scale=0.1, window=window)
        return live.most

    assert peak(8192) < 2.1 * peak(4096)


@pytest.mark.parametrize(("dv", "window"), [(6, None), (3, None), (6, 9)])
def test_without_values_it_has_the_shapes_of_its_results(dv: int, window: int | None) -> None:
    """As where memory is planned: blocks follow from the lengths of documents alone."""

    def rank(mesh: Mesh) -> None:
        shares = zigzag([0, 130, 131], 2)
        around = Ring(mesh["context"], shares, 0.4, window)
        rows = shares.counts[mesh["context"].index]
        q, k, v = (torch.empty(rows, *shape, device="meta") for shape in ((4, 6), (2, 6), (2, dv)))
        seen = ring.forward(around, ring.start(around, k, v), q, k, v)
        dq, dk, dv_, _ = ring.backward(around, ring.start(around, k, v), q, k, v, seen, torch.empty_like(seen.out))
        assert [t.shape for t in (*seen, dq, dk, dv_)] == [(rows, 4, dv), (rows, 4), q.shape, k.shape, v.shape]

    simulate(rank, context=2)


def _segments(bounds: Tensor, keys: Tensor, causal: bool) -> list[Block]:
    """The blocks of two packed sequences."""
    ends, theirs = bounds.tolist(), keys.tolist()
    return [Block(slice(a, b), slice(c, d), 0 if causal else None) for a, b, c, d in zip(ends, ends[1:], theirs, theirs[1:], strict=False)]


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, cu_k: Tensor, n: int, m: int, p: float, causal: bool, debug: bool, scale: float
) -> Any:
    """In the place of FlashAttention's forward: its signature, and the CPU's numbers."""
    assert (n, m, p) == (int(cu.diff().max()), int(cu_k.diff().max()), 0.0) and not debug and q.shape[2] == v.shape[2]
    assert cu.dtype == cu_k.dtype == torch.int32 and all(t.is_contiguous() for t in (q, k, v))
    out, lse = blank(q, v)
    attend(out, lse, q, k, v, _segments(cu, cu_k, causal), scale=scale)
    return out.to(q.dtype), lse.T.contiguous(), torch.zeros(2), torch.zeros(0), torch.zeros(0)


def _kernel_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu: Tensor,
    cu_k: Tensor,
    n: int,
    m: int,
    p: float,
    *rest: Any,
    scale: float,
) -> Any:
    assert lse.is_contiguous() and all(t.is_contiguous() for t in (dout, q, k, v, out)) and p == 0.0
    dq, dk, dv = (torch.zeros(t.shape) for t in (q, k, v))
    attend_backward(dq, dk, dv, dout, q, k, v, out, lse.T, _segments(cu, cu_k, rest[0]), scale=scale)
    return tuple(t.to(q.dtype) for t in (dq, dk, dv))


@pytest.mark.parametrize(("dv", "sinks"), [(6, False), (3, True)])
def test_on_gpus_one_launch_has_all_blocks(dv: int, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's kernels in the place of FlashAttention's."""
    launches = list[int]()

    def serves(q: Tensor, v: Tensor, blocks: list[Block], window: int | None) -> bool:
        return threading.get_ident() not in inside and window is None and len({block.ahead for block in blocks}) == 1

    def outside(fn: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            launches.append(len(args[6 if len(args) > 11 else 3]) - 1)
            inside.add(threading.get_ident())
            try:
                return fn(*args, **kwargs)
            finally:
                inside.remove(threading.get_ident())

        return call

    inside = set[int]()
    as_cuda = dataclasses.replace(backend_of("cpu"), partial=partial_cuda.KERNELS._replace(serves=serves))
    monkeypatch.setitem(backends._REGISTERED, "cpu", as_cuda)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(partial_cuda, "_forward", outside(_kernel))
    monkeypatch.setattr(partial_cuda, "_backward", outside(_kernel_backward))
    assert max(errors([1, 130, 40, 3, 77], 3, dv, None, sinks, torch.bfloat16)) < 2e-2
    assert len(launches) == 2 * 3 * 3 and max(launches) == 5


def test_on_gpus_calls_fit_the_kernels() -> None:
    """Names, arguments and shapes, on tensors without values."""
    blocks = zigzag([0, 50, 60], 2).blocks(1, 0)
    q, k, v = (torch.empty(30, *shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 16), (2, 16), (2, 8)))
    rows, out, lse = partial_cuda.attend(q, k, v, blocks, 0.2)
    assert (out.shape, lse.shape, out.dtype, lse.dtype) == ((len(rows), 4, 8), (len(rows), 4), torch.bfloat16, torch.float32)
    wide, lse = blank(q, v)
    dq, dk, dv = (torch.zeros(t.shape, device="meta") for t in (q, k, v))
    partial_cuda.attend_backward(dq, dk, dv, wide.bfloat16(), q, k, v, wide.bfloat16(), lse, blocks, 0.2)
    assert partial_cuda.serves(q, v, blocks, None) and not partial_cuda.serves(q.float(), v.float(), blocks, None)
