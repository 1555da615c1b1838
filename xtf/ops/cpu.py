"""Ops for CPUs.

Each op is a custom op with only a fake kernel, forward and backward, inside an ``autograd.Function`` with ``setup_context``:
that form runs eager, under ``torch.func`` and under ``torch.compile(fullgraph=True)``, and what ``cu_seqlens`` or ``offsets``
hold never causes a recompilation, since only the kernels read them. The function is applied to views: Dynamo forgets that the
arguments of a function under ``torch.func.vjp`` are differentiated and would leave our backward out (pytorch issue 193279).

Attention in float32 is a kernel of our own where it could be compiled (`xtf.ops.native`). Elsewhere it is torch's flash kernel for CPUs
(Dao 2023, "FlashAttention-2") for each run of neighbouring documents of equal length. That kernel knows neither windows nor value heads
of another size than the keys'; those take query blocks of `_BLOCK` tokens against the keys they see. No buffer grows with the square of a
document's length.

Dims are those of `xtf.ops`, and kv_heads × group = heads. Custom ops themselves are annotated plainly: torch reads their schema from
the annotations.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (torch's decorators of custom ops carry no types)

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange, reduce
from jaxtyping import Float, Int32
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from xtf.ops import Ops, native
from xtf.ops.cpu_grouped_mm import grouped_mm
from xtf.ops.reference import check_attention
from xtf.ops.sinks import gradient, join

_BLOCK = 128  # queries at a time where the flash kernel does not serve

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention(
    q: Float[Tensor, "T heads D"],
    k: Float[Tensor, "T kv_heads D"],
    v: Float[Tensor, "T kv_heads Dv"],
    cu_seqlens: Int32[Tensor, " bounds"],
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "T heads Dv"]:
    """Causal attention inside each document, see `xtf.ops.Attention`. Softmax is in float32, or float64 for float64 inputs.

    Raises:
        ValueError: for shapes that do not fit each other.
    """
    check_attention(q, k, v, window, sinks)
    q, k, v = (t.view_as(t) for t in (q, k, v))
    if sinks is not None:
        return _SinkAttention.apply(q, k, v, sinks.view_as(sinks), cu_seqlens, scale, window)[0]
    return _Attention.apply(q, k, v, cu_seqlens, scale, window)[0]


CPU = Ops("cpu", attention, grouped_mm)
"""The ops for CPUs."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
        return torch.ops.xtf.attention_cpu(q, k, v, cu_seqlens, scale, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, cu_seqlens, ctx.scale, ctx.window = inputs
        out, logsumexp = output
        ctx.mark_non_differentiable(logsumexp)
        ctx.save_for_backward(q, k, v, out, logsumexp, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return *_AttentionBackward.apply(grad_outputs[0], *ctx.saved_tensors, ctx.scale, ctx.window), None, None, None


class _SinkAttention(torch.autograd.Function):
    """The same kernels with sinks, see `xtf.ops.sinks`."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        out, logsumexp = torch.ops.xtf.attention_cpu(q, k, v, cu_seqlens, scale, window)
        return join(out, logsumexp, sinks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, sinks, cu_seqlens, ctx.scale, ctx.window = inputs
        out, logsumexp = output
        ctx.mark_non_differentiable(logsumexp)
        ctx.save_for_backward(q, k, v, sinks, out, logsumexp, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, logsumexp, cu_seqlens = ctx.saved_tensors
        grads = _AttentionBackward.apply(grad_outputs[0], q, k, v, out, logsumexp, cu_seqlens, ctx.scale, ctx.window)
        return *grads, gradient(grad_outputs[0], out, logsumexp, sinks), None, None, None


class _AttentionBackward(torch.autograd.Function):
    """The backward as a function of its own: ``torch.func.grad`` differentiates while it runs backward, and what has no
    derivative must say so."""

    @staticmethod
    def forward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.xtf.attention_cpu_backward(dout, q, k, v, out, logsumexp, cu_seqlens, scale, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise NotImplementedError("the CPU attention has no second derivative: build the model with xtf.ops.reference.REFERENCE")


@torch.library.custom_op("xtf::attention_cpu", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    if native.serves(q):
        return native.attention(q, k, v, cu_seqlens, scale, window)
    out, logsumexp = _attention_buffers(q, v)
    group = q.shape[1] // max(k.shape[1], 1)
    for begin, count, length in _runs(cu_seqlens):
        rows = slice(begin, begin + count * length)
        if _flash_serves(q, v, length, window):
            keys, values = (_heads(_repeat(t[rows], group), count) for t in (k, v))
            o, lse = _flash(_heads(q[rows], count), keys, values, 0.0, True, scale=scale)
            out[rows] = o.transpose(1, 2).flatten(0, 1)
            logsumexp[rows] = lse.transpose(1, 2).flatten(0, 1)
            continue
        for start in range(begin, begin + count * length, length):
            for queries, seen, hidden in _blocks(start, length, window, q.device):
                scores = _scores(q[queries], k[seen], scale).masked_fill_(hidden, -torch.inf)
                lse = scores.logsumexp(-1)
                weights = scores.sub_(lse.unsqueeze(-1)).exp_()
                mixed = torch.einsum("kgqs,skd->qkgd", weights, v[seen].to(weights.dtype))
                out[queries] = rearrange(mixed, "queries kv_heads group Dv -> queries (kv_heads group) Dv")
                logsumexp[queries] = rearrange(lse, "kv_heads group queries -> queries (kv_heads group)")
    return out, logsumexp


@torch.library.custom_op("xtf::attention_cpu_backward", mutates_args=())
def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if native.serves(q):
        return native.attention_backward(dout, q, k, v, out, logsumexp, cu_seqlens, scale, window)
    dout = dout.contiguous()  # the cotangent of a sum is expanded, with stride 0
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    kv_heads = k.shape[1]
    group = q.shape[1] // max(kv_heads, 1)
    for begin, count, length in _runs(cu_seqlens):
        rows = slice(begin, begin + count * length)
        if _flash_serves(q, v, length, window):
            keys, values = (_heads(_repeat(t[rows], group), count) for t in (k, v))
            queries, douts, outs = (_heads(t[rows], count) for t in (q, dout, out))
            lse = logsumexp[rows].view(count, length, -1).transpose(1, 2)
            grads = _flash_backward(douts, queries, keys, values, outs, lse, 0.0, True, scale=scale)
            for grad, whole in zip(grads, (dq, dk, dv), strict=True):
                grad = grad.transpose(1, 2).flatten(0, 1)
                shared = whole is not dq and group > 1
                whole[rows] = reduce(grad, "rows (kv_heads group) D -> rows kv_heads D", "sum", group=group) if shared else grad
            continue
        for start in range(begin, begin + count * length, length):
            # a key is seen from several blocks: sum in the dtype of the softmax
            document = slice(start, start + length)
            dk_sum, dv_sum = (torch.zeros(t[document].shape, dtype=logsumexp.dtype, device=t.device) for t in (k, v))
            for queries, seen, hidden in _blocks(start, length, window, q.device):
                lse = rearrange(logsumexp[queries], "queries (kv_heads group) -> kv_heads group queries 1", group=group)
                weights = _scores(q[queries], k[seen], scale).sub_(lse).exp_().masked_fill_(hidden, 0)
                grad, value, o, keys, query = (
                    _split(t, kv_heads, weights.dtype) for t in (dout[queries], v[seen], out[queries], k[seen], q[queries])
                )
                dscores = torch.einsum("qkgd,skd->kgqs", grad, value.squeeze(2)).sub_((grad * o).sum(-1).permute(1, 2, 0).unsqueeze(-1))
                dscores.mul_(weights).mul_(scale)
                dquery = torch.einsum("kgqs,skd->qkgd", dscores, keys.squeeze(2))
                dq[queries] = rearrange(dquery, "queries kv_heads group D -> queries (kv_heads group) D")
                local = slice(seen.start - start, seen.stop - start)
                dk_sum[local] += torch.einsum("kgqs,qkgd->skd", dscores, query)
                dv_sum[local] += torch.einsum("kgqs,qkgd->skd", weights, grad)
            dk[document], dv[document] = dk_sum, dv_sum
    return dq, dk, dv


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    return _attention_buffers(q, v)


@_attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _attention_buffers(
    q: Float[Tensor, "T heads D"], v: Float[Tensor, "T kv_heads Dv"]
) -> tuple[Float[Tensor, "T heads Dv"], Float[Tensor, "T heads"]]:
    """For the output and for the logarithm of the softmax's sum."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_zeros(q.shape[0], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))


def _flash_serves(q: Tensor, v: Tensor, length: int, window: int | None) -> bool:
    return q.shape[2] == v.shape[2] and (window is None or window >= length)


def _runs(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int]]:
    """(first row, number of documents, their length) of each run of neighbouring documents of equal length; no empty ones."""
    bounds: list[int] = cu_seqlens.tolist()
    begin, count, length = 0, 0, 0
    for start, end in pairwise(bounds):
        if end == start:
            continue
        if count and end - start == length:
            count += 1
            continue
        if count:
            yield begin, count, length
        begin, count, length = start, 1, end - start
    if count:
        yield begin, count, length


def _blocks(start: int, length: int, window: int | None, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows of queries, rows of keys they see, which of these pairs are hidden) for each query block of a document."""
    end = start + length
    for a in range(start, end, _BLOCK):
        b = min(a + _BLOCK, end)
        first = start if window is None else max(start, a - window + 1)
        back = torch.arange(a, b, device=device)[:, None] - torch.arange(first, b, device=device)[None, :]
        yield slice(a, b), slice(first, b), (back < 0) | (back >= (window or length))


def _heads(t: Float[Tensor, "rows heads D"], count: int) -> Float[Tensor, "{count} heads length D"]:
    """Documents of equal length, rows = count × length, side by side; without a copy where the last dim is dense."""
    t = t if t.stride(2) == 1 else t.contiguous()
    return t.view(count, -1, t.shape[1], t.shape[2]).transpose(1, 2)


def _repeat(t: Float[Tensor, "rows kv_heads D"], group: int) -> Float[Tensor, "rows heads D"]:
    """Each key head once per query head that uses it."""
    return t if group == 1 else t.repeat_interleave(group, 1)


def _split(t: Float[Tensor, "rows heads D"], kv_heads: int, dtype: torch.dtype) -> Float[Tensor, "rows {kv_heads} group D"]:
    """Query heads by the key head that they use."""
    return t.to(dtype).view(t.shape[0], kv_heads, -1, t.shape[2])


def _scores(
    q: Float[Tensor, "queries heads D"], k: Float[Tensor, "keys kv_heads D"], scale: float
) -> Float[Tensor, "kv_heads group queries keys"]:
    """At least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.einsum("qkgd,skd->kgqs", _split(q, k.shape[1], dtype), k.to(dtype)).mul_(scale)


# What the kernels compute, for torch's FLOP counter. Counters see shapes only, so documents are taken to be of equal length.


def _pairs(tokens: int, documents: int, window: int | None) -> float:
    """Pairs of a query and a key that it sees."""
    length = tokens / max(documents, 1)
    seen = length if window is None else min(window, length)
    return tokens * (seen if seen < length else (length + 1) / 2)


@register_flop_formula(torch.ops.xtf.attention_cpu)
def _(q: torch.Size, k: torch.Size, v: torch.Size, cu: torch.Size, scale: float, window: int | None, *_: Any, **__: Any) -> int:
    return int(2 * q[1] * (q[2] + v[2]) * _pairs(q[0], cu[0] - 1, window))


@register_flop_formula(torch.ops.xtf.attention_cpu_backward)
def _(
    dout: torch.Size,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    out: torch.Size,
    lse: torch.Size,
    cu: torch.Size,
    scale: float,
    window: int | None,
    *_: Any,
    **__: Any,
) -> int:
    return int(2 * q[1] * (3 * q[2] + 2 * v[2]) * _pairs(q[0], cu[0] - 1, window))
