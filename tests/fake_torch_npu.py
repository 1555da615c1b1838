"""A stand-in for ``torch_npu``: the operators that xtf calls, computed with torch's own, and strict about what they are given.

What is checked is what the documentation of torch_npu demands of training with packed documents: layouts, dtypes, where documents end, the
compressed mask, sparse modes, transposed factors.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

calls: list[str] = []
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ANY = 2147483647


def module() -> ModuleType:
    """What ``import torch_npu`` gives."""
    made: Any = ModuleType("torch_npu")
    made.npu_fusion_attention, made.npu_fusion_attention_grad = npu_fusion_attention, npu_fusion_attention_grad
    made.npu_grouped_matmul = npu_grouped_matmul
    return made


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _ANY,
    next_tockens: int = _ANY,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    calls.append("attention")
    assert pse is padding_mask is prefix is None and keep_prob == 1.0 and inner_precise == 0
    documents = _documents(query, key, value, head_num, input_layout, atten_mask, actual_seq_qlen, actual_seq_kvlen)
    out = torch.empty_like(query)
    most, total = (torch.empty(*query.shape[:2], 8, dtype=torch.float32, device=query.device) for _ in range(2))
    for begin, end in documents:
        scores = _scores(query[begin:end], key[begin:end], scale).masked_fill(
            _hidden(end - begin, sparse_mode, pre_tockens, next_tockens, query.device), -torch.inf
        )
        largest = scores.amax(-1, keepdim=True)
        summed = (scores - largest).exp().sum(-1, keepdim=True)
        out[begin:end] = torch.einsum("hqs,shd->qhd", (scores - largest).exp() / summed, _repeat(value[begin:end], head_num)).to(out.dtype)
        for whole, part in ((most, largest), (total, summed)):  # heads outermost within a document, as by default
            whole[begin:end] = part.expand(-1, -1, 8).reshape(end - begin, head_num, 8)
    return out, most, total, torch.empty(0, device=query.device), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _ANY,
    next_tockens: int = _ANY,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
) -> tuple[Tensor, ...]:
    calls.append("attention_grad")
    assert pse is padding_mask is prefix is None and keep_prob == 1.0 and inner_precise == 0 and seed == offset == numels == 0
    documents = _documents(query, key, value, head_num, input_layout, atten_mask, actual_seq_qlen, actual_seq_kvlen)
    assert dy.shape == query.shape and dy.dtype == query.dtype and dy.is_contiguous()
    assert attention_in is not None and attention_in.shape == query.shape and attention_in.dtype == query.dtype
    for stat in (softmax_max, softmax_sum):
        assert stat is not None and stat.shape == (*query.shape[:2], 8) and stat.dtype == torch.float32
    assert softmax_max is not None and softmax_sum is not None
    dq, dk, dv = (torch.zeros_like(t) for t in (query, key, value))
    group = head_num // key.shape[1]
    for begin, end in documents:
        rows, n = slice(begin, end), end - begin
        largest, summed = (t[rows].reshape(head_num, n, 8)[..., :1] for t in (softmax_max, softmax_sum))
        weights = (_scores(query[rows], key[rows], scale_value) - largest).exp() / summed
        weights = weights.masked_fill(_hidden(n, sparse_mode, pre_tockens, next_tockens, query.device), 0)
        grad = dy[rows].float()
        dweights = torch.einsum("qhd,shd->hqs", grad, _repeat(value[rows], head_num))
        dscores = weights * (dweights - (grad * attention_in[rows].float()).sum(-1).T.unsqueeze(-1)) * scale_value
        dq[rows] = torch.einsum("hqs,shd->qhd", dscores, _repeat(key[rows], head_num)).to(dq.dtype)
        for whole, part in (
            (dk, torch.einsum("hqs,qhd->shd", dscores, query[rows].float())),
            (dv, torch.einsum("hqs,qhd->shd", weights, grad)),
        ):
            whole[rows] = part.reshape(n, key.shape[1], group, -1).sum(2).to(whole.dtype)
    return dq, dk, dv, torch.empty(0, device=query.device), torch.empty(0, device=query.device)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    output_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    calls.append(f"grouped_matmul {group_type}")
    (a,), (b,) = x, weight  # one tensor each, and with split_item 2 or 3 one comes out
    assert bias is None and output_dtype is None and act_type == 0 and split_item in (2, 3) and group_list_type == 0
    assert a.dtype == b.dtype and a.dtype in _DTYPES and a.dim() == 2 and isinstance(group_list, Tensor)
    assert group_list.dtype == torch.int64 and group_list.dim() == 1 and group_list.shape[0] <= 1024
    ends: list[int] = group_list.tolist()
    assert all(begin <= end for begin, end in pairwise([0, *ends]))  # cumulative, and a group may be empty
    if group_type == 0:
        assert ends[-1] == a.shape[0] and b.dim() == 3 and b.shape[:2] == (len(ends), a.shape[1])
        assert a.is_contiguous() and (b.is_contiguous() or b.transpose(1, 2).is_contiguous())  # only the weight may be transposed
        return [torch.cat([a[begin:end] @ b[g] for g, (begin, end) in enumerate(pairwise([0, *ends]))])]
    assert group_type == 2 and b.dim() == 2 and ends[-1] == a.shape[1] == b.shape[0]
    assert a.T.is_contiguous() and b.is_contiguous()  # a transposed view, as the operator demands of this grouping
    out = torch.full((len(ends), a.shape[0], b.shape[1]), torch.nan, dtype=a.dtype, device=a.device)
    for g, (begin, end) in enumerate(pairwise([0, *ends])):
        if end > begin:  # what an empty group gets is not documented
            out[g] = a[:, begin:end] @ b[begin:end]
    return [out]


def _documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    layout: str,
    mask: Tensor | None,
    ends: list[int] | None,
    key_ends: list[int] | None,
) -> list[tuple[int, int]]:
    """(first row, end row) of each document that has rows."""
    assert layout == "TND" and query.dtype == key.dtype == value.dtype and query.dtype in _DTYPES
    assert all(t.dim() == 3 and t.is_contiguous() for t in (query, key, value))
    assert key.shape == value.shape and query.shape[0] == key.shape[0] and query.shape[2] == key.shape[2] <= 768
    assert head_num == query.shape[1] <= 256 and head_num % key.shape[1] == 0
    assert isinstance(ends, list) and all(type(end) is int for end in ends) and ends == key_ends and 1 <= len(ends) <= 2048
    assert all(begin <= end for begin, end in pairwise([0, *ends])) and ends[-1] == query.shape[0]
    assert mask is not None and mask.dtype == torch.bool and mask.device == query.device
    assert torch.equal(mask.cpu(), _causal())
    return [(begin, end) for begin, end in pairwise([0, *ends]) if end > begin]


@functools.cache
def _causal() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def _hidden(n: int, mode: int, before: int, after: int, device: torch.device) -> Tensor:
    """(n, n): which keys a query does not see. In mode 3 all after it; in mode 4 those outside a band."""
    back = torch.arange(n, device=device)[:, None] - torch.arange(n, device=device)[None, :]
    if mode == 3:
        return back < 0
    assert mode == 4 and before >= 0 and after == 0
    return (back < -after) | (back > before)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return torch.einsum("qhd,shd->hqs", query.float(), _repeat(key, query.shape[1])) * scale


def _repeat(t: Tensor, heads: int) -> Tensor:
    return t.float().repeat_interleave(heads // t.shape[1], 1)
