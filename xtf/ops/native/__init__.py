"""Kernels in C++ for float32 on CPUs: attention over packed documents and grouped products.

`serves` says whether they take a tensor. They are compiled where they are first used (`xtf.ops.native.build`); without a compiler, on other
processors and in other dtypes the callers use torch's kernels. Threads are torch's (``torch.get_num_threads()``). Results depend on the
number of threads in the last bits only, and are the same bits for the same number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int32
from torch import Tensor

from xtf.ops.native.build import library

__all__ = ["attention", "attention_backward", "grouped_mm", "norms", "serves"]

_INT, _FLOATS = ctypes.c_int64, ctypes.c_void_p
_KINDS = {"forward": 0, "dx": 1, "dw": 2}


class _Attention(ctypes.Structure):
    """``struct Attention`` of attention.h."""

    _fields_ = (
        *((name, _FLOATS) for name in ("q", "k", "v", "bounds")),
        *((name, _INT) for name in ("tokens", "documents", "heads", "kv_heads", "d", "dv")),
        *((name, _INT) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        ("scale", ctypes.c_float),
        ("window", _INT),
        *((name, _FLOATS) for name in ("out", "logsumexp", "dout", "dq", "dk", "dv_grad", "scratch")),
        ("threads", _INT),
    )


class _Grouped(ctypes.Structure):
    """``struct Grouped`` of grouped_mm.h."""

    _fields_ = (
        *((name, _FLOATS) for name in ("a", "b", "out", "ends")),
        *((name, _INT) for name in ("rows", "groups", "inner", "outer", "kind", "threads")),
    )


def serves(x: Tensor) -> bool:
    """Whether the kernels take tensors like this one: float32, where they could be compiled."""
    return x.dtype == torch.float32 and library() is not None


def grouped_mm(
    kind: Literal["forward", "dx", "dw"],
    a: Float[Tensor, "rows _"],
    b: Tensor,
    offsets: Int32[Tensor, " groups"],
    out: Tensor,
) -> None:
    """The grouped product or one of its gradients, see `xtf.ops.GroupedMM`, into ``out``.

    Args:
        kind: ``"forward"``: a is x (rows, K), b is w (groups, N, K), out (rows, N). ``"dx"``: a is dout (rows, N), b is w, out (rows, K).
            ``"dw"``: a is dout, b is x, out (groups, N, K).
        a: see ``kind``. ``b``: see ``kind``.
        offsets: the end row of each group.
        out: dense.

    Raises:
        ValueError: for offsets that do not rise inside the rows.
    """
    a, b, offsets = a.contiguous(), b.contiguous(), offsets.to(torch.int32).contiguous()
    groups, outer, inner = (out if kind == "dw" else b).shape
    pointers = (t.data_ptr() for t in (a, b, out, offsets))
    arguments = _Grouped(*pointers, a.shape[0], groups, inner, outer, _KINDS[kind], torch.get_num_threads())
    if not _loaded().xtf_grouped_mm(ctypes.byref(arguments)):
        raise ValueError(f"grouped_mm got offsets {_numbers(offsets)}; expected rising numbers up to the number of rows, {a.shape[0]}")


def attention(
    q: Float[Tensor, "T heads D"],
    k: Float[Tensor, "T kv_heads D"],
    v: Float[Tensor, "T kv_heads Dv"],
    cu_seqlens: Int32[Tensor, " bounds"],
    scale: float,
    window: int | None,
) -> tuple[Float[Tensor, "T heads Dv"], Float[Tensor, "T heads"]]:
    """The output and the logarithm of the softmax's sum, see `xtf.ops.Attention`; zeros for tokens outside of all documents.

    Raises:
        ValueError: for bounds that do not rise inside the tokens.
    """
    new = _new(q, cu_seqlens)
    out, logsumexp = new(q.shape[0], q.shape[1], v.shape[2]), new(q.shape[0], q.shape[1])
    _attend(q, k, v, cu_seqlens, scale, window, out, logsumexp)
    return out, logsumexp


def attention_backward(
    dout: Float[Tensor, "T heads Dv"],
    q: Float[Tensor, "T heads D"],
    k: Float[Tensor, "T kv_heads D"],
    v: Float[Tensor, "T kv_heads Dv"],
    out: Float[Tensor, "T heads Dv"],
    logsumexp: Float[Tensor, "T heads"],
    cu_seqlens: Int32[Tensor, " bounds"],
    scale: float,
    window: int | None,
) -> tuple[Float[Tensor, "T heads D"], Float[Tensor, "T kv_heads D"], Float[Tensor, "T kv_heads Dv"]]:
    """The gradients of q, k and v, from what `attention` returned.

    Raises:
        ValueError: for bounds that do not rise inside the tokens.
    """
    new = _new(q, cu_seqlens)
    dq, dk, dv = (new(*t.shape) for t in (q, k, v))
    _attend(q, k, v, cu_seqlens, scale, window, out.contiguous(), logsumexp.contiguous(), (dout.contiguous(), dq, dk, dv))
    return dq, dk, dv


def norms(tensors: Sequence[Tensor]) -> Float64[Tensor, " tensors"]:
    """The L2 norm of each tensor, in float64: the same bits for any number of threads.

    Example:
        >>> x = torch.tensor([3.0, 4.0])
        >>> norms([x, 2 * x]).tolist() if serves(x) else [5.0, 10.0]
        [5.0, 10.0]
    """
    dense, count = [x.contiguous() for x in tensors], len(tensors)
    out = torch.empty(count, dtype=torch.float64)
    pointers = (_FLOATS * count)(*(x.data_ptr() for x in dense))
    sizes = (_INT * count)(*(x.numel() for x in dense))
    _loaded().xtf_square_sums(pointers, sizes, _INT(count), ctypes.c_void_p(out.data_ptr()), _INT(torch.get_num_threads()))
    return out.sqrt_()


def _new(q: Tensor, cu_seqlens: Tensor) -> Callable[..., Tensor]:
    """For results: zeros where documents leave tokens out, whose rows no kernel writes."""
    covered = cu_seqlens.shape[0] > 1 and int(cu_seqlens[0]) == 0 and int(cu_seqlens[-1]) == q.shape[0] and q.shape[1]
    return torch.empty if covered else torch.zeros


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
    logsumexp: Tensor,
    grads: tuple[Tensor, ...] = (),
) -> None:
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    bounds = cu_seqlens.to(torch.int32).contiguous()
    tokens = q.shape[0]
    if not q.numel() or not v.numel() or bounds.shape[0] < 2:
        for result in grads[1:] or (out, logsumexp):
            result.zero_()
        return
    arguments = _Attention(
        *(t.data_ptr() for t in (q, k, v, bounds)),
        *(tokens, bounds.shape[0] - 1, q.shape[1], k.shape[1], q.shape[2], v.shape[2]),
        *(stride for t in (q, k, v) for stride in t.stride()[:2]),
        scale,
        min(window or tokens, tokens),
        out.data_ptr(),
        logsumexp.data_ptr(),
        *([t.data_ptr() for t in grads] or [None] * 4),
        None,
        torch.get_num_threads(),
    )
    numbers = _loaded().xtf_attention_scratch(ctypes.byref(arguments), int(bool(grads)))
    if numbers < 0:
        raise ValueError(f"attention got cu_seqlens {_numbers(cu_seqlens)}; expected rising numbers from 0 to at most {tokens}, the tokens")
    scratch = torch.empty(numbers)
    arguments.scratch = scratch.data_ptr()
    (_loaded().xtf_attention_backward if grads else _loaded().xtf_attention)(ctypes.byref(arguments))


def _loaded() -> ctypes.CDLL:
    found = library()
    assert found is not None, "asked for without `serves`"
    return found


def _numbers(values: Tensor) -> list[int]:
    return [int(value) for value in values]
