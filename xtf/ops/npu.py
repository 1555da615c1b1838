"""Ops for Ascend NPUs, by ``torch_npu``. **Never run on hardware**: tests call them with a stand-in for ``torch_npu`` that computes on the
CPU and checks what it is given against the documentation.

Attention is ``npu_fusion_attention`` (FlashAttention) and its gradient, in the layout of packed documents (``TND``), with causal or band
masks of 2,048 × 2,048 that stand for masks of any size. The ends of documents go to it as a list on the host, one wait for each call.
Grouped products are ``npu_grouped_matmul``: grouped along the rows (``group_type=0``), for the gradient of the weights along the inner
size (``group_type=2``), which older releases of ``torch_npu`` may refuse. float64 and attention sinks take the reference.

Dims are those of `xtf.ops`. Custom ops themselves are annotated plainly: torch reads their schema from the annotations.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (torch's decorators of custom ops carry no types)

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor

from xtf.ops import Ops, reference

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MASK = 2048  # the side of the compressed mask of sparse modes 2, 3 and 4
_DOCUMENTS, _HEADS, _SIZE = 2048, 256, 768  # most that npu_fusion_attention takes


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
    """Causal attention inside each document, see `xtf.ops.Attention`. Never run on hardware.

    Raises:
        ValueError: for shapes that do not fit each other, or more documents than the kernel takes.
    """
    reference.check_attention(q, k, v, window, sinks)
    if cu_seqlens.shape[0] - 1 > _DOCUMENTS:
        raise ValueError(f"attention on an NPU got {cu_seqlens.shape[0] - 1} documents; expected at most {_DOCUMENTS}: pack fewer tokens")
    size = v.shape[2]
    if q.dtype not in _DTYPES or sinks is not None or size > q.shape[2] or q.shape[2] > _SIZE or q.shape[1] > _HEADS:
        return reference.attention(q, k, v, cu_seqlens, scale=scale, window=window, sinks=sinks)
    if size < q.shape[2]:  # as in latent attention: keys and values are to have one shape, and zeros add nothing
        v = F.pad(v, (0, q.shape[2] - size))
    q, k, v = (t.view_as(t) for t in (q, k, v))  # views: see xtf.ops.cpu
    return _Attention.apply(q, k, v, cu_seqlens, scale, window)[0][..., :size]


def grouped_mm(x: Float[Tensor, "rows K"], w: Float[Tensor, "groups N K"], offsets: Int32[Tensor, " groups"]) -> Float[Tensor, "rows N"]:
    """The rows of each group times that group's matrix, see `xtf.ops.GroupedMM`. Never run on hardware.

    Raises:
        ValueError: for shapes that do not fit each other.
    """
    reference.check_grouped_mm(x, w, offsets)
    if x.dtype not in _DTYPES:
        return reference.grouped_mm(x, w, offsets)
    return _GroupedMM.apply(x.view_as(x), w.view_as(w), offsets)  # views: see xtf.ops.cpu


NPU = Ops("npu", attention, grouped_mm)
"""The ops for Ascend NPUs."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.xtf.attention_npu(q, k, v, cu_seqlens, scale, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, cu_seqlens, ctx.scale, ctx.window = inputs
        out, most, total = output
        ctx.mark_non_differentiable(most, total)
        ctx.save_for_backward(q, k, v, out, most, total, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return *_AttentionBackward.apply(grad_outputs[0], *ctx.saved_tensors, ctx.scale, ctx.window), None, None, None


class _AttentionBackward(torch.autograd.Function):
    """The backward as a function of its own, as in `xtf.ops.cpu`."""

    @staticmethod
    def forward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        most: Tensor,
        total: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.xtf.attention_npu_backward(dout, q, k, v, out, most, total, cu_seqlens, scale, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise NotImplementedError("the NPU attention has no second derivative: build the model with xtf.ops.reference.REFERENCE")


@torch.library.custom_op("xtf::attention_npu", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    if not q.shape[0]:
        return _buffers(q)
    q, k, v = (t.contiguous() for t in (q, k, v))
    found = _torch_npu().npu_fusion_attention(q, k, v, q.shape[1], "TND", scale=scale, **_masked(cu_seqlens, window, q.device))
    return found[0], found[1], found[2]


@torch.library.custom_op("xtf::attention_npu_backward", mutates_args=())
def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    most: Tensor,
    total: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not q.shape[0]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    q, k, v, dout = (t.contiguous() for t in (q, k, v, dout))
    found = _torch_npu().npu_fusion_attention_grad(
        q,
        k,
        v,
        dout,
        q.shape[1],
        "TND",
        softmax_max=most,
        softmax_sum=total,
        attention_in=out,
        scale_value=scale,
        **_masked(cu_seqlens, window, q.device),
    )
    return found[0], found[1], found[2]


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    return _buffers(q)


@_attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    most: Tensor,
    total: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _torch_npu() -> Any:
    """Imported where it is used: this file can be read, and documented, without it."""
    try:
        return import_module("torch_npu")
    except ImportError as error:
        raise ImportError(
            "the ops for NPUs need the package torch_npu, of the version made for your torch, and CANN: install them as the guide of "
            "torch_npu says, or build the step with ops=xtf.ops.reference.REFERENCE"
        ) from error


def _buffers(q: Float[Tensor, "T heads D"]) -> tuple[Float[Tensor, "T heads D"], Float[Tensor, "T heads 8"], Float[Tensor, "T heads 8"]]:
    """The output, and of each row's softmax the largest score and the sum, each eight times. How the rows of the last two are ordered
    differs between releases; only the gradient's kernel reads them."""
    most, total = (q.new_empty(*q.shape[:2], 8, dtype=torch.float32) for _ in range(2))
    return q.new_empty(q.shape), most, total


def _masked(cu_seqlens: Int32[Tensor, " bounds"], window: int | None, device: torch.device) -> dict[str, Any]:
    """Where documents end, and what a token sees of its own: all before it (mode 3), or a band (mode 4) of so many tokens before it."""
    ends: list[int] = cu_seqlens[1:].tolist()
    seen = {"sparse_mode": 3} if window is None else {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}
    return {"atten_mask": _mask(device), "actual_seq_qlen": ends, "actual_seq_kvlen": ends, **seen}


@functools.cache
def _mask(device: torch.device) -> Tensor:
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu(1)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        return _product(x.contiguous(), w.transpose(1, 2), offsets, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return *_GroupedMMBackward.apply(grad_outputs[0], *ctx.saved_tensors), None


class _GroupedMMBackward(torch.autograd.Function):
    """The backward as a function of its own, as in `xtf.ops.cpu`."""

    @staticmethod
    def forward(dout: Tensor, x: Tensor, w: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        dout = dout.contiguous()
        dw = _product(dout.T, x.contiguous(), offsets, 2)
        # what a group without rows gets is not documented
        empty = torch.diff(offsets, prepend=offsets.new_zeros(1)) == 0
        return _product(dout, w.contiguous(), offsets, 0), dw.masked_fill(empty[:, None, None], 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise NotImplementedError("the NPU grouped product has no second derivative: build the model with xtf.ops.reference.REFERENCE")


def _product(a: Tensor, b: Tensor, offsets: Tensor, group_type: int) -> Tensor:
    """Products of groups of the rows of ``a`` (0), or of its columns and the rows of ``b`` (2); a transposed factor is a view."""
    ends = offsets.to(torch.int64)  # of each group, one after another: group_list_type 0
    return _torch_npu().npu_grouped_matmul([a], [b], group_list=ends, split_item=3, group_type=group_type, group_list_type=0)[0]
