"""The plain form of every op: what each backend's kernel is tested against, and the fallback where there is none.

Attention is computed document by document, grouped products group by group, with torch's own operations and its own
derivatives. The lengths are read on the host, so these do not compile with ``fullgraph=True`` and synchronise on a GPU.

Dims are those of `xtf.ops`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from xtf.ops import Ops


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
    """Causal softmax attention inside each document (Vaswani et al. 2017), see `xtf.ops.Attention`.

    Raises:
        ValueError: for shapes that do not fit each other.

    Example:
        >>> q = torch.randn(5, 4, 8)
        >>> k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
        >>> attention(q, k, v, torch.tensor([0, 3, 5], dtype=torch.int32), scale=8**-0.5).shape
        torch.Size([5, 4, 8])
    """
    check_attention(q, k, v, window, sinks)
    bounds = _host(cu_seqlens)
    parts = [_document(q[begin:end], k[begin:end], v[begin:end], scale, window, sinks) for begin, end in pairwise(bounds) if end > begin]
    return torch.cat(parts) if parts else q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


def grouped_mm(x: Float[Tensor, "rows K"], w: Float[Tensor, "groups N K"], offsets: Int32[Tensor, " groups"]) -> Float[Tensor, "rows N"]:
    """The rows of each group times that group's matrix, see `xtf.ops.GroupedMM`.

    Raises:
        ValueError: for shapes that do not fit each other.

    Example:
        >>> x, w = torch.ones(3, 2), torch.stack([torch.ones(4, 2), 2 * torch.ones(4, 2)])
        >>> grouped_mm(x, w, torch.tensor([1, 3], dtype=torch.int32))[:, 0].tolist()
        [2.0, 4.0, 4.0]
    """
    check_grouped_mm(x, w, offsets)
    ends = _host(offsets)
    begins = [0, *ends[:-1]]
    return torch.cat([F.linear(x[begin:end], w[group]) for group, (begin, end) in enumerate(zip(begins, ends, strict=True))])


def attend_with_sinks(
    q: Float[Tensor, "n heads D"],
    k: Float[Tensor, "S kv_heads D"],
    v: Float[Tensor, "S kv_heads Dv"],
    seen: Bool[Tensor, "n S"],
    sinks: Float[Tensor, " heads"],
    scale: float,
) -> Float[Tensor, "n heads Dv"]:
    """Attention of queries to those keys that they see and to a sink, which is a key of that score without a value.

    Args:
        q: (n, heads, head size). ``k``: (S, key heads, head size). ``v``: (S, key heads, value head size).
        seen: (n, S) bool.
        sinks: (heads,).
        scale: factor on the scores, which are (heads, n, S) in at least float32.
    """
    wide, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // max(k.shape[1], 1)
    k, v = (t.to(wide).repeat_interleave(group, 1) for t in (k, v))
    scores = (torch.einsum("qhd,shd->hqs", q.to(wide), k) * scale).masked_fill(~seen, -torch.inf)
    sink = sinks.to(wide)[:, None, None].expand(-1, q.shape[0], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqs,shd->qhd", weights, v).to(q.dtype)


def check_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None) -> None:
    """Refuse shapes that no attention op takes."""
    fits = q.dim() == k.dim() == v.dim() == 3 and q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] == k.shape[2]
    if not fits or k.shape[1] != v.shape[1] or q.shape[1] % max(k.shape[1], 1):
        raise ValueError(
            f"attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; expected (T, heads, size), "
            "(T, key heads, size), (T, key heads, value size) with heads a multiple of key heads"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention got window={window}; expected at least 1 (the token itself), or None for the whole document")
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_floating_point()):
        raise ValueError(
            f"attention got sinks {tuple(sinks.shape)} {sinks.dtype}; expected one floating score for each query head, ({q.shape[1]},)"
        )


def check_grouped_mm(x: Tensor, w: Tensor, offsets: Tensor) -> None:
    """Refuse shapes that no grouped product takes."""
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2] or offsets.shape != w.shape[:1]:
        raise ValueError(
            f"grouped_mm got x {tuple(x.shape)}, w {tuple(w.shape)}, offsets {tuple(offsets.shape)}; "
            "expected (rows, K), (groups, N, K), (groups,)"
        )


def _host(values: Tensor) -> list[int]:
    """The integers of a small tensor. One by one, since ``tolist`` refuses tensors that a ``torch.func`` transform tracks."""
    return [int(value) for value in values]


def _document(
    q: Float[Tensor, "length heads D"],
    k: Float[Tensor, "length kv_heads D"],
    v: Float[Tensor, "length kv_heads Dv"],
    scale: float,
    window: int | None,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "length heads Dv"]:
    """One document, all heads; scores are (heads, length, length)."""
    mask = None
    if window is not None or sinks is not None:
        position = torch.arange(q.shape[0], device=q.device)
        back = position[:, None] - position[None, :]
        mask = (back >= 0) & (back < (window or q.shape[0]))
        if sinks is not None:
            return attend_with_sinks(q, k, v, mask, sinks, scale)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


REFERENCE = Ops("reference", attention, grouped_mm)
"""The plain ops."""
