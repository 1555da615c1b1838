"""Partial attention (`xtf.ops.partial`) by torch's flash kernel for CPUs, one block at a time.

Dims are those of `xtf.ops.partial`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from xtf.backends import Partial
from xtf.zigzag import Block

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def serves(q: Float[Tensor, "Q heads D"], v: Float[Tensor, "K kv_heads Dv"], blocks: Sequence[Block], window: int | None) -> bool:
    """Whether the kernel takes these: one block, in which queries see all keys or those up to themselves, and heads of one size."""
    if len(blocks) != 1 or q.shape[2] != v.shape[2]:
        return False
    block = blocks[0]
    rows, keys = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
    return block.ahead is None or (block.ahead == 0 and rows == keys and (window is None or window >= rows))


def attend(
    q: Float[Tensor, "Q heads D"],
    k: Float[Tensor, "K kv_heads D"],
    v: Float[Tensor, "K kv_heads Dv"],
    blocks: Sequence[Block],
    scale: float,
) -> tuple[slice, Float[Tensor, "rows heads Dv"], Float[Tensor, "rows heads"]]:
    """The rows of the block's queries, and of each the output and the logarithm of the softmax's sum over the keys of the block.

    Args:
        q, k, v, blocks, scale: see `xtf.ops.partial.attend`; `serves` holds.
    """
    (block,), group = blocks, q.shape[1] // k.shape[1]
    keys, values = (_heads(t[block.keys], group) for t in (k, v))
    out, lse = _flash(_heads(q[block.queries]), keys, values, 0.0, block.ahead is not None, scale=scale)
    return block.queries, out[0].transpose(0, 1), lse[0].T


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
    """See `xtf.ops.partial.attend_backward`; `serves` holds."""
    (block,), group = blocks, q.shape[1] // k.shape[1]
    rows = block.queries
    keys, values = (_heads(t[block.keys], group) for t in (k, v))
    douts, queries, outs = (_heads(t[rows]) for t in (dout, q, out))
    lse = logsumexp[rows].T.unsqueeze(0)
    grads = _flash_backward(douts, queries, keys, values, outs, lse, 0.0, block.ahead is not None, scale=scale)
    dquery, dkey, dvalue = (grad[0].transpose(0, 1) for grad in grads)
    dq[rows] += dquery
    for whole, grad in ((dk, dkey), (dv, dvalue)):
        by_key = rearrange(grad, "rows (kv_heads group) D -> rows kv_heads group D", group=group)
        whole[block.keys] += by_key.sum(2, dtype=whole.dtype)


def _heads(t: Float[Tensor, "rows kv_heads D"], group: int = 1) -> Float[Tensor, "1 heads rows D"]:
    """As the flash kernel takes them: each key head once per query head that uses it."""
    t = t if t.stride(2) == 1 else t.contiguous()
    return (t if group == 1 else t.repeat_interleave(group, 1)).transpose(0, 1).unsqueeze(0)


KERNELS = Partial(serves, attend, attend_backward)
