"""Ops for NVIDIA GPUs. **Never run on hardware**: tests call them on fake tensors and, for grouped products, on a CPU.

Attention calls the forward and backward ops behind ``torch.nn.attention.varlen`` (FlashAttention), grouped products call
``torch.nn.functional.grouped_mm``; both in 16-bit dtypes only. Other dtypes take the reference, which synchronises with the host.

Dims are those of `xtf.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor

from xtf.ops import Ops, reference
from xtf.ops.sinks import gradient, join

try:
    import torch.nn.attention.varlen as varlen  # registers torch.ops.torch_attn
except ImportError as error:
    raise ImportError(f"xtf.ops.cuda needs torch.nn.attention.varlen, which torch {torch.__version__} lacks: update torch") from error

assert varlen  # imported for what it registers


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
    """Causal attention inside each document, see `xtf.ops.Attention`. Never run on hardware."""
    reference.check_attention(q, k, v, window, sinks)
    size = v.shape[2]
    if q.dtype not in (torch.bfloat16, torch.float16) or size > q.shape[2]:
        return reference.attention(q, k, v, cu_seqlens, scale=scale, window=window, sinks=sinks)
    if size < q.shape[2]:  # as in latent attention: the kernel has one size for all, and zeros add nothing
        v = F.pad(v, (0, q.shape[2] - size))
    q, k, v = (t.view_as(t) for t in (q, k, v))  # views: see xtf.ops.cpu
    if sinks is not None:
        return _SinkAttention.apply(q, k, v, sinks.view_as(sinks), cu_seqlens, scale, window)[0][..., :size]
    return _Attention.apply(q, k, v, cu_seqlens, scale, window)[0][..., :size]


def grouped_mm(x: Float[Tensor, "rows K"], w: Float[Tensor, "groups N K"], offsets: Int32[Tensor, " groups"]) -> Float[Tensor, "rows N"]:
    """The rows of each group times that group's matrix, see `xtf.ops.GroupedMM`. Never run on hardware."""
    reference.check_grouped_mm(x, w, offsets)
    if x.dtype is not torch.bfloat16:
        return reference.grouped_mm(x, w, offsets)
    return _GroupedMM.apply(x.view_as(x), w.view_as(w), offsets)  # views: see xtf.ops.cpu


CUDA = Ops("cuda", attention, grouped_mm)
"""The ops for NVIDIA GPUs."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        # the longest document is at most T: with that bound nothing is read on the host
        total = q.shape[0]
        return torch.ops.torch_attn._varlen_attn(q, k, v, cu, cu, total, total, True, scale, _window(window))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, cu, ctx.scale, ctx.window = inputs
        out, logsumexp, random_state = output
        ctx.mark_non_differentiable(logsumexp, random_state)
        ctx.save_for_backward(q, k, v, out, logsumexp, cu, random_state)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return *_AttentionBackward.apply(grad_outputs[0].contiguous(), *ctx.saved_tensors, ctx.scale, ctx.window), None, None, None


class _SinkAttention(torch.autograd.Function):
    """The same kernels with sinks, see `xtf.ops.sinks`. Their logsumexp is (heads, T), float32."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = q.shape[0]
        plain, lse, random_state = torch.ops.torch_attn._varlen_attn(q, k, v, cu, cu, total, total, True, scale, _window(window))
        out, joined = join(plain, lse.T, sinks)
        return out, joined.T.contiguous(), random_state

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, sinks, cu, ctx.scale, ctx.window = inputs
        out, logsumexp, random_state = output
        ctx.mark_non_differentiable(logsumexp, random_state)
        ctx.save_for_backward(q, k, v, sinks, out, logsumexp, cu, random_state)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, logsumexp, cu, random_state = ctx.saved_tensors
        dout = grad_outputs[0].contiguous()
        grads = _AttentionBackward.apply(dout, q, k, v, out, logsumexp, cu, random_state, ctx.scale, ctx.window)
        return *grads, gradient(dout, out, logsumexp.T, sinks), None, None, None


class _AttentionBackward(torch.autograd.Function):
    """The backward as a function of its own, as in `xtf.ops.cpu`."""

    @staticmethod
    def forward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cu: Tensor,
        random_state: Tensor,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        total, bounds = q.shape[0], _window(window)
        return torch.ops.torch_attn._varlen_attn_backward(
            dout, q, k, v, out, logsumexp, cu, cu, total, total, True, random_state, scale, bounds
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise NotImplementedError("the CUDA attention has no second derivative: build the model with xtf.ops.reference.REFERENCE")


def _window(window: int | None) -> list[int]:
    """(tokens to the left, tokens to the right) beside the token itself; -1 is without bound."""
    return [-1 if window is None else window - 1, 0]


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        return F.grouped_mm(x, w.transpose(1, 2), offs=offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, w, offsets = ctx.saved_tensors
        dout = grad_outputs[0].contiguous()
        return F.grouped_mm(dout, w, offs=offsets), F.grouped_mm(dout.T, x, offs=offsets), None
