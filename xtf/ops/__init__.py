"""Ops that are lowered per backend, each behind one signature with a plain reference beside it.

Dims: T tokens (packed), D head size, Dv value head size, bounds = documents + 1, K and N the inner and outer size of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor


@runtime_checkable
class Attention(Protocol):
    """Causal attention inside each document of a packed sequence.

    Args:
        q: (T, query heads, head size).
        k: (T, key heads, head size); query heads is a multiple of key heads.
        v: (T, key heads, value head size).
        cu_seqlens: (documents + 1,) int32, where each document begins, and T.
        scale: factor on the scores.
        window: how many tokens back, itself included, a token sees; ``None`` for all of its document.
        sinks: (query heads,), a score of each head that joins the softmax of every token and brings no value, as gpt-oss has;
            ``None`` for none.

    Returns:
        (T, query heads, value head size).
    """

    def __call__(
        self,
        q: Float[Tensor, "T heads D"],
        k: Float[Tensor, "T kv_heads D"],
        v: Float[Tensor, "T kv_heads Dv"],
        cu_seqlens: Int32[Tensor, " bounds"],
        *,
        scale: float,
        window: int | None = None,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "T heads Dv"]: ...


@runtime_checkable
class GroupedMM(Protocol):
    """A matrix product for each group of rows.

    Args:
        x: (rows, K), rows of group g standing together, groups in order.
        w: (groups, N, K).
        offsets: (groups,) int32, the row at which each group ends; the last is ``rows``.

    Returns:
        (rows, N): the rows of group g times ``w[g].T``.
    """

    def __call__(
        self, x: Float[Tensor, "rows K"], w: Float[Tensor, "groups N K"], offsets: Int32[Tensor, " groups"]
    ) -> Float[Tensor, "rows N"]: ...


@runtime_checkable
class Linear(Protocol):
    """A matrix product of every row, plus a bias.

    Args:
        x: (..., K).
        w: (N, K).
        bias: (N,), or ``None``.

    Returns:
        (..., N).
    """

    def __call__(
        self, x: Float[Tensor, "*batch K"], w: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None = None, /
    ) -> Float[Tensor, "*batch N"]: ...


@dataclass(frozen=True)
class Ops:
    """The ops a model is built with. ``name`` goes into the key of every stage that uses them.

    ``linear`` makes the products of attention's projections and of MLPs; embedding, routers, norms and the head are no ops.
    """

    name: str
    attention: Attention
    grouped_mm: GroupedMM
    linear: Linear = F.linear
