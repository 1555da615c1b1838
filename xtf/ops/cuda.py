"""Ops for NVIDIA GPUs. **Never run on hardware**: written against torch's documented kernels, checked for types only.

Attention calls the forward and backward ops behind ``torch.nn.attention.varlen`` (FlashAttention), grouped products call
``torch._grouped_mm``; both in 16-bit dtypes only. Other dtypes take the reference, which synchronises with the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xtf.ops import Ops, reference

try:
    import torch.nn.attention.varlen as _varlen  # registers torch.ops.torch_attn
except ImportError as error:  # pragma: no cover - only on builds of torch without it
    raise ImportError(f"xtf.ops.cuda needs torch.nn.attention.varlen, which torch {torch.__version__} lacks; use the reference ops") from error

__all__ = ["CUDA", "attention", "grouped_mm"]

_ = _varlen
_HALF = (torch.bfloat16, torch.float16)


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """Causal attention inside each document, see `xtf.ops.Attention`. Never run on hardware."""
    reference.check_attention(q, k, v, window)
    if q.dtype not in _HALF or q.shape[2] != v.shape[2]:
        return reference.attention(q, k, v, cu_seqlens, scale=scale, window=window)
    return _Attention.apply(q, k, v, cu_seqlens, scale, window)[0]


def grouped_mm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """The rows of each group times that group's matrix, see `xtf.ops.GroupedMM`. Never run on hardware."""
    reference.check_grouped_mm(x, w, offsets)
    if x.dtype is not torch.bfloat16:
        return reference.grouped_mm(x, w, offsets)
    return _GroupedMM.apply(x, w, offsets)


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
    def backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, cu, random_state = ctx.saved_tensors
        total = q.shape[0]
        grads = torch.ops.torch_attn._varlen_attn_backward(
            dout.contiguous(), q, k, v, out, logsumexp, cu, cu, total, total, True, random_state, ctx.scale, _window(ctx.window)
        )
        return *grads, None, None, None


def _window(window: int | None) -> list[int]:
    """(tokens to the left, tokens to the right) beside the token itself; -1 is without bound."""
    return [-1 if window is None else window - 1, 0]


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        return torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offsets = ctx.saved_tensors
        dout = dout.contiguous()
        return torch._grouped_mm(dout, w, offs=offsets), torch._grouped_mm(dout.T, x, offs=offsets), None
