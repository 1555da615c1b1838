"""Ring attention: each rank has some tokens' queries, and keys and values travel round the ranks until all queries have seen all.

Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context": at each of n - 1 hops every rank passes on the keys
and values that it has, and computes with what came at the hop before; parts are put together by their softmaxes' sums (`xtf.ops.partial`).
The next hop is started before the block in hand is computed with, so that it is under way meanwhile. Backward, keys and values
travel again, and their gradients follow one hop behind: each rank adds its part and passes them on, and the last hop brings them
home while the rank's own block is computed. Beside its own a rank has two blocks at most: that in hand and that which comes.

Per call a rank sends, with M the most tokens of a rank, in forward ``(n - 1) × M × kv_heads × (D + Dv)`` values of the keys' dtype; in
backward as many again, and as many in at least float32 for the gradients.

Dims: T rows of this rank, M the most of any rank, D head size, Dv value head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from xtf.collectives import Axis, Work
from xtf.ops.partial import attend, attend_backward, blank
from xtf.ops.sinks import gradient, join
from xtf.zigzag import Shares


class Ring(NamedTuple):
    """What a ring attention knows besides its tensors.

    Args:
        axis: the ranks.
        shares: which tokens each has.
        scale: factor on the scores.
        window: how many tokens back, itself included, a token sees; ``None`` for all of its document.
        label: the stage, for errors and traces.
    """

    axis: Axis
    shares: Shares
    scale: float
    window: int | None = None
    label: str = ""


class Seen(NamedTuple):
    """What a forward leaves.

    Args:
        out: (T, heads, value head size), in the dtype of the queries.
        logsumexp: (T, heads), at least float32.
    """

    out: Float[Tensor, "T heads Dv"]
    logsumexp: Float[Tensor, "T heads"]


def start(ring: Ring, k: Float[Tensor, "T kv_heads D"], v: Float[Tensor, "T kv_heads Dv"]) -> Work | None:
    """Begin the first hop, of this rank's own keys and values; ``None`` where there is nobody to send to, or nothing to send."""
    most = max(ring.shares.counts)
    if ring.axis.size == 1 or not most:
        return None
    both = torch.cat([k, v], -1)
    missing = both.new_zeros(most - both.shape[0], *both.shape[1:])  # ranks may have one token more or less
    return ring.axis.start_permute(torch.cat([both, missing]) if missing.shape[0] else both, 1, label=ring.label)


def forward(
    ring: Ring,
    coming: Work | None,
    q: Float[Tensor, "T heads D"],
    k: Float[Tensor, "T kv_heads D"],
    v: Float[Tensor, "T kv_heads Dv"],
    sinks: Float[Tensor, " heads"] | None = None,
) -> Seen:
    """Attention of this rank's queries to all keys of their documents that they see, on whatever rank these are.

    Args:
        ring: see `Ring`.
        coming: what `start` gave for ``k`` and ``v``.
        q, k, v: (T, heads, size) of this rank's tokens.
        sinks: (heads,), see `xtf.ops.Attention`.
    """
    axis, shares, (out, lse) = ring.axis, ring.shares, blank(q, v)
    attend(out, lse, q, k, v, shares.blocks(axis.index, axis.index, ring.window), scale=ring.scale, window=ring.window)
    for hop in range(1, axis.size):
        if coming is None:
            break
        moving, source = coming.wait(), (axis.index - hop) % axis.size
        coming = axis.start_permute(moving, 1, label=ring.label) if hop < axis.size - 1 else None
        keys, values = torch.split(moving[: shares.counts[source]], [k.shape[2], v.shape[2]], -1)
        attend(out, lse, q, keys, values, shares.blocks(axis.index, source, ring.window), scale=ring.scale, window=ring.window)
    if sinks is not None:
        out, lse = join(out, lse, sinks)
    return Seen(out.to(q.dtype), lse)


def backward(
    ring: Ring,
    coming: Work | None,
    q: Float[Tensor, "T heads D"],
    k: Float[Tensor, "T kv_heads D"],
    v: Float[Tensor, "T kv_heads Dv"],
    seen: Seen,
    dout: Float[Tensor, "T heads Dv"],
    sinks: Float[Tensor, " heads"] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of queries, keys and values of this rank's tokens, and of the sinks as far as its queries make them.

    Args:
        ring, coming, q, k, v, sinks: see `forward`; the keys and values travel again.
        seen: what the forward left.
        dout: (T, heads, value head size).

    Returns:
        Each in the dtype and shape of what it is the gradient of.
    """
    axis, shares, sizes = ring.axis, ring.shares, [k.shape[2], v.shape[2]]
    wide, dout = seen.logsumexp.dtype, dout.contiguous()
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    most = max(shares.counts)
    following: Work | None = None  # the gradients that come one hop behind

    def add(source: int, keys: Tensor, values: Tensor) -> Tensor:
        """The gradients of a rank's keys and values side by side, from this rank's queries."""
        both = torch.zeros(most, k.shape[1], sum(sizes), dtype=wide, device=k.device)
        dk, dv = torch.split(both[: shares.counts[source]], sizes, -1)
        blocks = shares.blocks(axis.index, source, ring.window)
        attend_backward(dq, dk, dv, dout, q, keys, values, *seen, blocks, scale=ring.scale, window=ring.window)
        return both

    for hop in range(1, axis.size):
        if coming is None:
            break
        moving, source = coming.wait(), (axis.index - hop) % axis.size
        coming = axis.start_permute(moving, 1, label=ring.label) if hop < axis.size - 1 else None
        both = add(source, *torch.split(moving[: shares.counts[source]], sizes, -1))
        if following is not None:
            both += following.wait()
        following = axis.start_permute(both, 1, label=f"{ring.label}.gradients")
    both = add(axis.index, k, v)
    if following is not None:
        both += following.wait()
    dk, dv = torch.split(both[: k.shape[0]], sizes, -1)
    dsinks = None if sinks is None else gradient(dout, seen.out, seen.logsumexp, sinks)
    return dq.to(q.dtype), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), dsinks
