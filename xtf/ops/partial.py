"""Partial attention: queries against some of the keys that they see, and results put together afterwards.

Attention over keys in two parts is, with o and l the output and the logarithm of the softmax's sum over each part,
``l = log(exp(l1) + exp(l2))`` and ``o = o1 × exp(l1 - l) + o2 × exp(l2 - l)``: a softmax need not see its keys at once (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax"). Given the whole o and l, the gradients of each part follow from that part
alone (Dao 2023, "FlashAttention-2").

The kernels are those of the device's backend (`xtf.backends.Partial`): on the CPU torch's flash kernel serves where a query sees all keys
of a block or those up to itself, on GPUs FlashAttention; where they do not (windows, on the CPU value heads of another size, on GPUs 32
bits) queries go `_BLOCK` at a time against the keys that they see. No buffer grows with the square of a sequence. Sums over parts are in
at least float32. These are plain functions without a derivative of their own: not for ``torch.func``, and not to be compiled.

Dims: Q rows of queries, K rows of keys, D head size, Dv value head size; heads is a multiple of kv_heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from xtf.backends import Partial, backend_of
from xtf.type_rules import attention
from xtf.value_types import followed_by
from xtf.zigzag import Block

_BLOCK = 128  # queries at a time where no kernel serves


def blank(q: Float[Tensor, "Q heads D"], v: Float[Tensor, "K kv_heads Dv"]) -> tuple[Float[Tensor, "Q heads Dv"], Float[Tensor, "Q heads"]]:
    """The output and the logarithm of the softmax's sum over no keys: 0 and -inf, in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=wide, device=q.device)
    return out, torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)


@followed_by(attention, changes=2)
def attend(
    out: Float[Tensor, "Q heads Dv"],
    logsumexp: Float[Tensor, "Q heads"],
    q: Float[Tensor, "Q heads D"],
    k: Float[Tensor, "K kv_heads D"],
    v: Float[Tensor, "K kv_heads Dv"],
    blocks: Sequence[Block],
    *,
    scale: float,
    window: int | None = None,
) -> None:
    """Let queries see more keys: ``out`` and ``logsumexp``, at first `blank`, are changed in place.

    Args:
        out: (Q, heads, value head size), at least float32. ``logsumexp``: (Q, heads), of the same dtype.
        q: (Q, heads, head size). ``k``: (K, key heads, head size). ``v``: (K, key heads, value head size).
        blocks: which see which.
        scale: factor on the scores.
        window: how many tokens back, itself included, a token sees.
    """
    kernels = backend_of(q.device).partial
    for some in _together(kernels, q, v, blocks, window):
        if kernels is not None and kernels.serves(q, v, some, window):
            _merge(out, logsumexp, *kernels.attend(q, k, v, some, scale))
            continue
        (block,) = some
        for queries, keys, hidden in _parts(block, window, q.device):
            scores = _scores(q[queries], k[keys], scale)
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            lse = scores.logsumexp(-1)
            weights = scores.sub_(_finite(lse).unsqueeze(-1)).exp_()
            mixed = torch.einsum("kgqs,skd->qkgd", weights, v[keys].to(weights.dtype)).flatten(1, 2)
            _merge(out, logsumexp, queries, mixed, lse.flatten(0, 1).T)


@followed_by(attention, changes=3)
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
    *,
    scale: float,
    window: int | None = None,
) -> None:
    """Add the gradients that come through these keys to ``dq``, ``dk`` and ``dv``, in place.

    Args:
        dq, dk, dv: of the shapes of ``q``, ``k`` and ``v``, at least float32.
        dout: (Q, heads, value head size), the gradient of the output.
        q, k, v: see `attend`; so are ``blocks``, ``scale`` and ``window``.
        out: (Q, heads, value head size), over all keys; of the dtype of ``q``. ``logsumexp``: (Q, heads), over all keys.
    """
    kernels, group = backend_of(q.device).partial, q.shape[1] // max(k.shape[1], 1)
    for some in _together(kernels, q, v, blocks, window):
        if kernels is not None and kernels.serves(q, v, some, window):
            kernels.attend_backward(dq, dk, dv, dout, q, k, v, out, logsumexp, some, scale)
            continue
        (block,) = some
        for queries, keys, hidden in _parts(block, window, q.device):
            lse = rearrange(logsumexp[queries], "queries (kv_heads group) -> kv_heads group queries 1", group=group)
            weights = _scores(q[queries], k[keys], scale).sub_(lse).exp_()
            if hidden is not None:
                weights.masked_fill_(hidden, 0)
            grad, o, query = (_split(t[queries], k.shape[1], weights.dtype) for t in (dout, out, q))
            key, value = (t[keys].to(weights.dtype) for t in (k, v))
            dscores = torch.einsum("qkgd,skd->kgqs", grad, value).sub_((grad * o).sum(-1).permute(1, 2, 0).unsqueeze(-1))
            dscores.mul_(weights).mul_(scale)
            dq[queries] += torch.einsum("kgqs,skd->qkgd", dscores, key).flatten(1, 2)
            dk[keys] += torch.einsum("kgqs,qkgd->skd", dscores, query)
            dv[keys] += torch.einsum("kgqs,qkgd->skd", weights, grad)


def _merge(out: Tensor, logsumexp: Tensor, rows: slice | Tensor, o: Tensor, lse: Tensor) -> None:
    """Put what these rows saw beside what they had seen."""
    had = logsumexp[rows]
    total = torch.logaddexp(had, lse.to(had.dtype))
    both = _finite(total)
    out[rows] = out[rows] * (had - both).exp().unsqueeze(-1) + o * (lse - both).exp().unsqueeze(-1)
    logsumexp[rows] = total


def _finite(logsumexp: Tensor) -> Tensor:
    """A number where nothing was seen: exp(-inf - 0) is 0, exp(-inf + inf) is none."""
    return logsumexp.masked_fill(logsumexp == -torch.inf, 0)


def _together(kernels: Partial | None, q: Tensor, v: Tensor, blocks: Sequence[Block], window: int | None) -> Sequence[Sequence[Block]]:
    """All blocks at once where the kernels take them so, or one at a time."""
    return [blocks] if blocks and kernels is not None and kernels.serves(q, v, blocks, window) else [[block] for block in blocks]


def _parts(block: Block, window: int | None, device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(rows of queries, rows of keys that some of them see, which of these pairs are hidden) of a block, few queries at a time."""
    first, last = block.keys.start, block.keys.stop
    for a in range(block.queries.start, block.queries.stop, _BLOCK):
        b = min(a + _BLOCK, block.queries.stop)
        if block.ahead is None:
            yield slice(a, b), block.keys, None
            continue
        at = block.ahead + a - block.queries.start  # of query a, counted from the first key
        begin = first if window is None else max(first, first + at - window + 1)
        end = min(last, first + at + b - a)
        if begin < end:
            back = torch.arange(at, at + b - a, device=device)[:, None] - torch.arange(begin - first, end - first, device=device)[None, :]
            hidden = back < 0
            yield slice(a, b), slice(begin, end), hidden if window is None else hidden | (back >= window)


def _split(t: Float[Tensor, "rows heads D"], kv_heads: int, dtype: torch.dtype) -> Float[Tensor, "rows {kv_heads} group D"]:
    """Query heads by the key head that they use."""
    return t.to(dtype).view(t.shape[0], kv_heads, -1, t.shape[2])


def _scores(q: Float[Tensor, "Q heads D"], k: Float[Tensor, "K kv_heads D"], scale: float) -> Float[Tensor, "kv_heads group Q K"]:
    """At least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.einsum("qkgd,skd->kgqs", _split(q, k.shape[1], dtype), k.to(dtype)).mul_(scale)
