"""Every CPU op equals the reference, in value and in gradient, eager, under torch.func and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from xtf.ops import native
from xtf.ops.cpu import CPU
from xtf.ops.reference import REFERENCE

QKV = tuple[Tensor, Tensor, Tensor]


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    if want.numel():
        # inputs are of size 1; a gradient that cancels to zero is as exact as they are
        assert (got - want).abs().max() <= tolerance * want.abs().max().clamp_min(1)


def cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def qkv(tokens: int, heads: int, kv_heads: int, size: int, value_size: int, dtype: torch.dtype = torch.float64) -> QKV:
    g = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, heads, size), (tokens, kv_heads, size), (tokens, kv_heads, value_size))
    q, k, v = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def vjp(fn: Callable[..., Any], *args: Tensor) -> tuple[Any, Callable[..., Any]]:
    out = torch.func.vjp(fn, *args)
    return out[0], out[1]


def both(fn: Callable[..., Tensor], other: Callable[..., Tensor], args: tuple[Tensor, ...], tolerance: float) -> None:
    """Values, and gradients of a random and of an expanded (stride 0) cotangent."""
    want, want_back = vjp(other, *args)
    got, got_back = vjp(fn, *args)
    close(got, want, tolerance)
    for cotangent in (torch.randn(want.shape, dtype=want.dtype), torch.ones((), dtype=want.dtype).expand(want.shape)):
        for a, b in zip(got_back(cotangent), want_back(cotangent), strict=True):
            close(a, b, tolerance)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 9) | st.just(5), max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.sampled_from([2, 5, 8]),
    value_size=st.sampled_from([None, 3]),
    window=st.sampled_from([None, 1, 3, 100]),
)
def test_attention_equals_reference(
    lengths: list[int], kv_heads: int, group: int, size: int, value_size: int | None, window: int | None
) -> None:
    args = qkv(sum(lengths), kv_heads * group, kv_heads, size, value_size or size)
    bounds = cu(lengths)
    both(
        lambda q, k, v: CPU.attention(q, k, v, bounds, scale=0.3, window=window),
        lambda q, k, v: REFERENCE.attention(q, k, v, bounds, scale=0.3, window=window),
        args,
        1e-12,
    )


@pytest.mark.parametrize("window", [None, 50, 200])
def test_attention_longer_than_a_block(window: int | None) -> None:
    args, bounds = qkv(300, 4, 2, 8, 6 if window is None else 8), cu([290, 10])
    both(
        lambda q, k, v: CPU.attention(q, k, v, bounds, scale=0.3, window=window),
        lambda q, k, v: REFERENCE.attention(q, k, v, bounds, scale=0.3, window=window),
        args,
        1e-12,
    )


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None) -> Tensor:
    """Attention written out once more, token by token, to check the reference itself."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    start = 0
    for length in lengths:
        for i in range(start, start + length):
            first = start if window is None else max(start, i - window + 1)
            for h in range(q.shape[1]):
                weights = torch.softmax(k[first : i + 1, h // group] @ q[i, h] * scale, 0)
                out[i, h] = weights @ v[first : i + 1, h // group]
        start += length
    return out


@pytest.mark.parametrize("window", [None, 2])
def test_reference_attention_is_the_formula(window: int | None) -> None:
    args = qkv(9, 4, 2, 4, 3)
    got = REFERENCE.attention(*args, cu([4, 0, 5]), scale=0.7, window=window)
    close(got, plain(*args, [4, 0, 5], 0.7, window), 1e-14)


def sinks_of(heads: int) -> Tensor:
    """Scores of all sizes beside those of keys."""
    return torch.linspace(-3, 3, heads, dtype=torch.float64)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 9) | st.just(5), max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.sampled_from([2, 5, 8]),
    value_size=st.sampled_from([None, 3]),
    window=st.sampled_from([None, 1, 3, 100]),
)
def test_attention_with_sinks_equals_reference(
    lengths: list[int], kv_heads: int, group: int, size: int, value_size: int | None, window: int | None
) -> None:
    args = qkv(sum(lengths), kv_heads * group, kv_heads, size, value_size or size)
    bounds = cu(lengths)
    both(
        lambda q, k, v, sinks: CPU.attention(q, k, v, bounds, scale=0.3, window=window, sinks=sinks),
        lambda q, k, v, sinks: REFERENCE.attention(q, k, v, bounds, scale=0.3, window=window, sinks=sinks),
        (*args, sinks_of(kv_heads * group)),
        1e-12,
    )


@pytest.mark.parametrize("window", [None, 50, 200])
def test_attention_with_sinks_longer_than_a_block(window: int | None) -> None:
    args, bounds = qkv(300, 4, 2, 8, 6 if window is None else 8), cu([290, 10])
    both(
        lambda q, k, v, sinks: CPU.attention(q, k, v, bounds, scale=0.3, window=window, sinks=sinks),
        lambda q, k, v, sinks: REFERENCE.attention(q, k, v, bounds, scale=0.3, window=window, sinks=sinks),
        (*args, sinks_of(4)),
        1e-12,
    )


@pytest.mark.parametrize("window", [None, 2])
def test_a_sink_is_a_key_without_a_value(window: int | None) -> None:
    """Written out once more: to every token's keys comes one of a given score, whose value is 0."""
    (q, k, v), sinks = qkv(9, 4, 2, 4, 3), sinks_of(4)
    want, start = torch.zeros(9, 4, 3, dtype=torch.float64), 0
    for length in (4, 5):
        for i in range(start, start + length):
            first = start if window is None else max(start, i - window + 1)
            for h in range(4):
                scores = torch.cat([k[first : i + 1, h // 2] @ q[i, h] * 0.7, sinks[h : h + 1]])
                want[i, h] = torch.softmax(scores, 0)[:-1] @ v[first : i + 1, h // 2]
        start += length
    for ops in (REFERENCE, CPU):
        close(ops.attention(q, k, v, cu([4, 0, 5]), scale=0.7, window=window, sinks=sinks), want, 1e-14)


def test_sinks_of_any_size_are_finite() -> None:
    """One that takes nothing is none, one that takes all leaves nothing; neither overflows."""
    args, bounds = qkv(9, 4, 2, 4, 4, torch.float32), cu([4, 5])
    sinks = torch.tensor([-torch.inf, -1e4, 1e4, 0.0])
    for ops in (CPU, REFERENCE):
        plain = ops.attention(*args, bounds, scale=0.3)
        out, back = vjp(lambda q, k, v, s, ops=ops: ops.attention(q, k, v, bounds, scale=0.3, sinks=s), *args, sinks)
        close(out[:, :2], plain[:, :2], 1e-6)
        assert not out[:, 2].any() and 0 < out[:, 3].abs().max() < plain[:, 3].abs().max()
        grads = back(torch.ones_like(out))
        assert all(bool(g.isfinite().all()) for g in grads) and not grads[3][:3].any() and grads[3][3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_with_sinks_in_lower_precision(dtype: torch.dtype, window: int | None) -> None:
    bounds = cu([7, 7, 6])
    args = (*qkv(20, 4, 2, 8, 8, dtype), sinks_of(4).to(dtype))
    got, back = vjp(lambda q, k, v, s: CPU.attention(q, k, v, bounds, scale=0.3, window=window, sinks=s), *args)
    doubles = tuple(a.double() for a in args)
    want, want_back = vjp(lambda q, k, v, s: REFERENCE.attention(q, k, v, bounds, scale=0.3, window=window, sinks=s), *doubles)
    bound = 8 * torch.finfo(dtype).eps
    close(got.double(), want, bound)
    for a, b in zip(back(torch.ones_like(got)), want_back(torch.ones_like(want)), strict=True):
        assert a.dtype == dtype
        close(a.double(), b, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_in_lower_precision(dtype: torch.dtype, window: int | None) -> None:
    args, bounds = qkv(20, 4, 2, 8, 8, dtype), cu([7, 7, 6])
    got, back = vjp(lambda q, k, v: CPU.attention(q, k, v, bounds, scale=0.3, window=window), *args)
    doubles = tuple(a.double() for a in args)
    want, want_back = vjp(lambda q, k, v: REFERENCE.attention(q, k, v, bounds, scale=0.3, window=window), *doubles)
    bound = 8 * torch.finfo(dtype).eps
    close(got.double(), want, bound)
    for a, b in zip(back(torch.ones_like(got)), want_back(torch.ones_like(want)), strict=True):
        assert a.dtype == dtype
        close(a.double(), b, bound)


@settings(deadline=None, max_examples=25)
@given(rows=st.lists(st.integers(0, 6), min_size=1, max_size=5), n=st.integers(1, 5), k=st.integers(1, 5))
def test_grouped_mm_equals_reference(rows: list[int], n: int, k: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((sum(rows), k), (len(rows), n, k)))
    offsets = torch.tensor(rows).cumsum(0).to(torch.int32)
    both(lambda x, w: CPU.grouped_mm(x, w, offsets), lambda x, w: REFERENCE.grouped_mm(x, w, offsets), (x, w), 1e-13)
    begin = 0
    for group, count in enumerate(rows):
        close(REFERENCE.grouped_mm(x, w, offsets)[begin : begin + count], x[begin : begin + count] @ w[group].T, 1e-14)
        begin += count


def test_grouped_mm_takes_strided_inputs() -> None:
    x, w, offsets = torch.randn(3, 7).T, torch.randn(2, 3, 5).transpose(1, 2), torch.tensor([4, 7], dtype=torch.int32)
    both(lambda x, w: CPU.grouped_mm(x, w, offsets), lambda x, w: REFERENCE.grouped_mm(x, w, offsets), (x, w), 1e-5)


def test_ops_under_grad_and_plain_autograd() -> None:
    q, k, v = qkv(12, 4, 2, 4, 4)
    bounds = cu([5, 7])

    def loss(q: Tensor) -> Any:
        return CPU.attention(q, k, v, bounds, scale=0.3).square().sum()

    leaf = q.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(loss(leaf), leaf)
    close(torch.func.grad(loss)(q), by_autograd, 1e-15)
    step = torch.randn(q.shape, dtype=q.dtype)
    difference = (loss(q + 1e-6 * step) - loss(q - 1e-6 * step)) / 2e-6
    assert abs((by_autograd * step).sum() - difference) < 1e-7


def compiled(fn: Callable[..., Any], compilations: list[int]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compilations.append(1)
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)

    return torch.compile(fn, fullgraph=True, backend=backend)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_compiles_once_whatever_the_documents(window: int | None) -> None:
    args = qkv(24, 4, 2, 8, 8)

    def run(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, dout: Tensor) -> Any:
        out, back = vjp(lambda q, k, v: CPU.attention(q * 2, k, v, bounds, scale=0.3, window=window).tanh(), q, k, v)
        return out, back(dout)

    count: list[int] = []
    fast = compiled(run, count)
    lengths: list[int]
    for lengths in ([8, 8, 8], [1, 20, 3], [0, 0, 24]):
        dout = torch.randn(24, 4, 8, dtype=torch.float64)
        out, grads = fast(*args, cu(lengths), dout)
        want, want_grads = run(*args, cu(lengths), dout)
        for a, b in zip((out, *grads), (want, *want_grads), strict=True):
            close(a, b, 1e-13)
    assert len(count) == 1


@pytest.mark.parametrize("window", [None, 3])
def test_attention_with_sinks_compiles_once_whatever_the_documents(window: int | None) -> None:
    args = (*qkv(24, 4, 2, 8, 8), sinks_of(4))

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: Tensor, dout: Tensor) -> Any:
        out, back = vjp(lambda q, k, v, s: CPU.attention(q * 2, k, v, bounds, scale=0.3, window=window, sinks=s).tanh(), q, k, v, sinks)
        return out, back(dout)

    count: list[int] = []
    fast = compiled(run, count)
    for lengths in ([8, 8, 8], [1, 20, 3]):
        dout = torch.randn(24, 4, 8, dtype=torch.float64)
        out, grads = fast(*args, cu(lengths), dout)
        want, want_grads = run(*args, cu(lengths), dout)
        for a, b in zip((out, *grads), (want, *want_grads), strict=True):
            close(a, b, 1e-13)
    assert len(count) == 1


def test_grouped_mm_compiles_once_whatever_the_groups() -> None:
    x, w = torch.randn(12, 4), torch.randn(3, 5, 4)

    def run(x: Tensor, w: Tensor, offsets: Tensor) -> Any:
        out, back = vjp(lambda x, w: CPU.grouped_mm(x + 1, w, offsets), x, w)
        return out, back(torch.ones((), dtype=out.dtype).expand(out.shape))

    count: list[int] = []
    fast = compiled(run, count)
    for ends in ([4, 8, 12], [0, 12, 12], [1, 2, 12]):
        offsets = torch.tensor(ends, dtype=torch.int32)
        out, grads = fast(x, w, offsets)
        want, want_grads = run(x, w, offsets)
        for a, b in zip((out, *grads), (want, *want_grads), strict=True):
            close(a, b, 1e-5)
    assert len(count) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_windowed_attention_has_no_square_buffer(dtype: torch.dtype) -> None:
    """The widest intermediate stays far below (heads, T, T): blocks of it, or packed keys and values where our own kernel serves."""
    tokens, heads = 4096, 2
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    largest = max(largest, t.numel())
            return out

    q, k, v = qkv(tokens, heads, heads, 4, 4, dtype)
    out, lse = torch.ops.xtf.attention_cpu(q, k, v, cu([tokens]), 0.3, 256)
    from xtf.ops import cpu

    with Watch():
        cpu.attention(q, k, v, cu([tokens]), scale=0.3, window=256, sinks=torch.zeros(heads))
        cpu._attention._init_fn(q, k, v, cu([tokens]), 0.3, 256)
        cpu._attention_backward._init_fn(out, q, k, v, out, lse, cu([tokens]), 0.3, 256)
    assert 0 < largest <= heads * max(128 * (128 + 256), tokens * (4 + 4 + 32) * native.serves(q))


def test_flops() -> None:
    q, k, v = qkv(8, 4, 2, 4, 4)
    x, w, offsets = torch.randn(6, 3), torch.randn(2, 5, 3), torch.tensor([2, 6], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        CPU.attention(q, k, v, cu([4, 4]), scale=0.5)
    assert counter.get_total_flops() == 2 * 4 * (4 + 4) * (2 * (1 + 2 + 3 + 4))
    with FlopCounterMode(display=False) as counter:
        CPU.grouped_mm(x, w.requires_grad_(), offsets).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 3 * 5


def test_bad_input_is_refused() -> None:
    q, k, v = qkv(4, 4, 2, 4, 4)
    for ops in (CPU, REFERENCE):
        with pytest.raises(ValueError, match=r"heads a multiple of key heads"):
            ops.attention(q[:, :3], k, v, cu([4]), scale=1.0)
        with pytest.raises(ValueError, match=r"window=0"):
            ops.attention(q, k, v, cu([4]), scale=1.0, window=0)
        with pytest.raises(ValueError, match=r"sinks \(2,\) torch.float32; expected one floating score for each query head, \(4,\)"):
            ops.attention(q, k, v, cu([4]), scale=1.0, sinks=torch.ones(2))
        with pytest.raises(ValueError, match=r"expected \(rows, K\)"):
            ops.grouped_mm(torch.ones(2, 3), torch.ones(1, 4, 5), torch.tensor([2], dtype=torch.int32))


def test_cuda_grouped_mm_is_the_reference_in_16_bits() -> None:
    """The kernels that it calls exist on the CPU too."""
    from xtf.ops.cuda import CUDA

    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g).bfloat16() for shape in ((24, 16), (4, 8, 16)))
    offsets = torch.tensor([8, 8, 16, 24], dtype=torch.int32)  # a group without rows
    got, back = vjp(lambda x, w: CUDA.grouped_mm(x, w, offsets), x, w)
    want, want_back = vjp(lambda x, w: REFERENCE.grouped_mm(x, w, offsets), x.double(), w.double())
    close(got.double(), want, 2**-8)
    for a, b in zip(back(torch.ones(()).bfloat16().expand(got.shape)), want_back(torch.ones_like(want)), strict=True):
        close(a.double(), b, 2**-8)
    assert not back(torch.ones_like(got))[1][1].any()


def test_cuda_attention_calls_fit_the_kernels() -> None:
    """On fake tensors: names, arguments and shapes, forward and backward, also under torch.func.grad."""
    from xtf.ops.cuda import CUDA

    with FakeTensorMode():
        shapes = ((12, 4, 16), (12, 2, 16), (12, 2, 16))
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        bounds = torch.empty(3, dtype=torch.int32)
        for window in (None, 4):
            out, back = vjp(lambda q, k, v, w=window: CUDA.attention(q, k, v, bounds, scale=0.25, window=w), q, k, v)
            assert out.shape == q.shape and out.dtype == torch.bfloat16
            assert tuple(g.shape for g in back(torch.empty_like(out))) == shapes
            grad = torch.func.grad(lambda q, w=window: CUDA.attention(q, k, v, bounds, scale=0.25, window=w).sum())(q)
            assert grad.shape == q.shape
            sinks = torch.empty(4, dtype=torch.bfloat16)
            out, back = vjp(lambda q, k, v, s, w=window: CUDA.attention(q, k, v, bounds, scale=0.25, window=w, sinks=s), q, k, v, sinks)
            assert out.shape == q.shape and out.dtype == torch.bfloat16
            assert tuple(g.shape for g in back(torch.empty_like(out))) == (*shapes, (4,))


@pytest.mark.parametrize("heads", [4, 2])
def test_cuda_attention_of_smaller_values_fits_the_kernels(heads: int) -> None:
    """Latent attention has values of another size than its queries: no fallback, which would read lengths on the host."""
    from xtf.ops.cuda import CUDA

    with FakeTensorMode():
        shapes = ((12, 4, 24), (12, heads, 24), (12, heads, 16))
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        bounds = torch.empty(3, dtype=torch.int32)
        out, back = vjp(lambda q, k, v: CUDA.attention(q, k, v, bounds, scale=0.25), q, k, v)
        assert out.shape == (12, 4, 16)
        assert tuple(g.shape for g in back(torch.empty_like(out))) == shapes


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("value", [8, 5])
def test_cuda_sinks_are_the_reference(window: int | None, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's kernels in the places of FlashAttention's, whose logsumexp is (heads, T)."""
    from xtf.ops.cuda import CUDA

    def left(bounds: list[int]) -> int | None:
        assert bounds[1] == 0
        return None if bounds[0] < 0 else bounds[0] + 1

    def forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, cu_k: Tensor, n: int, m: int, causal: bool, scale: float, bounds: Any) -> Any:
        out, lse = torch.ops.xtf.attention_cpu(q, k, v, cu, scale, left(bounds))
        return out, lse.T.contiguous(), torch.zeros(2)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu: Tensor, *rest: Any) -> Any:
        *_, scale, bounds = rest
        assert lse.is_contiguous()
        return torch.ops.xtf.attention_cpu_backward(dout, q, k, v, out, lse.T.contiguous(), cu, scale, left(bounds))

    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", forward)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", backward)
    bounds = cu([7, 7, 6])
    args = (*qkv(20, 4, 2, 8, value, torch.bfloat16), sinks_of(4).bfloat16())
    got, back = vjp(lambda q, k, v, s: CUDA.attention(q, k, v, bounds, scale=0.3, window=window, sinks=s), *args)
    doubles = tuple(a.double() for a in args)
    want, want_back = vjp(lambda q, k, v, s: REFERENCE.attention(q, k, v, bounds, scale=0.3, window=window, sinks=s), *doubles)
    close(got.double(), want, 2**-5)
    for a, b in zip(back(torch.ones_like(got)), want_back(torch.ones_like(want)), strict=True):
        close(a.double(), b, 2**-5)


def test_cuda_ops_in_wider_dtypes_are_the_reference() -> None:
    from xtf.ops.cuda import CUDA

    args, bounds = qkv(9, 4, 2, 4, 4), cu([4, 5])
    assert torch.equal(CUDA.attention(*args, bounds, scale=0.3), REFERENCE.attention(*args, bounds, scale=0.3))
    got, want = (ops.attention(*args, bounds, scale=0.3, sinks=sinks_of(4)) for ops in (CUDA, REFERENCE))
    assert torch.equal(got, want)


def test_second_derivatives_are_refused() -> None:
    q, k, v = qkv(4, 2, 2, 4, 4)

    def slope(q: Tensor) -> Any:
        return torch.func.grad(lambda q: CPU.attention(q, k, v, cu([4]), scale=0.5).square().sum())(q).square().sum()

    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.func.grad(slope)(q)
