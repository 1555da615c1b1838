"""Partial attention (`xtf.ops.partial`) by FlashAttention on NVIDIA GPUs. **Never run on hardware**: tests call it on tensors without
values, and on a CPU with a stand-in for the kernels.

All blocks of a call are one launch: documents' rows of queries side by side, and so of keys (Dao 2023, "FlashAttention-2", of sequences of
different lengths).

Dims are those of `xtf.ops.partial`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from xtf.backends import Partial
from xtf.zigzag import Block

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default


def serves(q: Float[Tensor, "Q heads D"], v: Float[Tensor, "K kv_heads Dv"], blocks: Sequence[Block], window: int | None) -> bool:
    """Whether the kernels take these: 16 bits, heads of at most 256 and a multiple of 8, values not larger than keys, no window."""
    fits = q.shape[2] % 8 == 0 and q.shape[2] <= 256 and v.shape[2] <= q.shape[2] and q.dtype in (torch.bfloat16, torch.float16)
    return fits and window is None and len({block.ahead for block in blocks}) == 1 and blocks[0].ahead in (0, None)


class _Packed(NamedTuple):
    """Blocks as the kernels take them: rows of queries and keys, where each block begins and the end, and the longest of each."""

    queries: Int64[Tensor, " Q"]
    keys: Int64[Tensor, " K"]
    query_bounds: Int32[Tensor, " bounds"]
    key_bounds: Int32[Tensor, " bounds"]
    longest: tuple[int, int]
    causal: bool


def attend(
    q: Float[Tensor, "Q heads D"],
    k: Float[Tensor, "K kv_heads D"],
    v: Float[Tensor, "K kv_heads Dv"],
    blocks: Sequence[Block],
    scale: float,
) -> tuple[Int64[Tensor, " rows"], Float[Tensor, "rows heads Dv"], Float[Tensor, "rows heads"]]:
    """The rows of the blocks' queries, and of each the output and the logarithm of the softmax's sum over the keys of its block.

    Args:
        q, k, v, blocks, scale: see `xtf.ops.partial.attend`; `serves` holds.
    """
    at, size = _packed(blocks, q.device), v.shape[2]
    out, lse, *_ = _forward(
        q[at.queries], k[at.keys], _padded(v, q)[at.keys], at.query_bounds, at.key_bounds, *at.longest, 0.0, at.causal, False, scale=scale
    )
    return at.queries, out[..., :size], lse.T


def attend_backward(
    dq: Float[Tensor, "Q heads D"],
    dk: Float[Tensor, "K kv_heads D"],
    dv: Float[Tensor, "K kv_heads Dv"],
    dout: Float[Tensor, "Q heads Dv"],
    q: Float[Tensor, "Q heads D"],
    k: Float[Tensor, "K kv_heads D"],
    v: Float[Tensor, "K kv_heads Dv"],
    out: Float[Tensor, "Q heads Dv"],
    logsumexp: Float[Tensor, "Q heads"],
    blocks: Sequence[Block],
    scale: float,
) -> None:
    """See `xtf.ops.partial.attend_backward`; `serves` holds. A row of queries, and of keys, is in one block."""
    at = _packed(blocks, q.device)
    lse = rearrange(logsumexp[at.queries], "rows heads -> heads rows").contiguous()
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)  # of dropout, of which there is none
    grads = _backward(
        _padded(dout, q)[at.queries],
        q[at.queries],
        k[at.keys],
        _padded(v, q)[at.keys],
        _padded(out, q)[at.queries],
        lse,
        at.query_bounds,
        at.key_bounds,
        *at.longest,
        0.0,
        at.causal,
        state,
        unused,
        scale=scale,
    )
    for whole, rows, grad in zip((dq, dk, dv), (at.queries, at.keys, at.keys), grads, strict=True):
        whole[rows] += grad[..., : whole.shape[2]].to(whole.dtype)


def _padded(t: Float[Tensor, "rows kv_heads Dv"], q: Float[Tensor, "Q heads D"]) -> Float[Tensor, "rows kv_heads D"]:
    """The kernels have one size for all heads, and zeros add nothing."""
    return F.pad(t, (0, q.shape[2] - t.shape[2])) if t.shape[2] < q.shape[2] else t


def _packed(blocks: Sequence[Block], device: torch.device) -> _Packed:
    sides = [[block.queries for block in blocks], [block.keys for block in blocks]]
    rows = [torch.cat([torch.arange(s.start, s.stop) for s in side]).to(device, non_blocking=True) for side in sides]
    lengths = [[s.stop - s.start for s in side] for side in sides]
    bounds = [torch.tensor([0, *accumulate(each)], dtype=torch.int32).to(device, non_blocking=True) for each in lengths]
    return _Packed(rows[0], rows[1], bounds[0], bounds[1], (max(lengths[0]), max(lengths[1])), blocks[0].ahead == 0)


KERNELS = Partial(serves, attend, attend_backward)
