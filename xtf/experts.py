"""Routed experts as a stage: which tokens go to which experts is given, what an expert computes on its rows is a function.

A dropless mixture (Gale et al. 2022, "MegaBlocks") is `dispatch_order`, which sorts slots by expert, `gather_tokens`, the model's
own `ExpertFn` on sorted rows, and `combine`, which brings the results back to their tokens. `RoutedExperts` keeps the model's part
apart, so that a layout may put communication between them (`xtf.transforms.expert_parallel`).

Dims: T tokens, H hidden size, E experts, k experts per token, S = T × k slots (slot t × k + j is token t's choice j).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from xtf import tree
from xtf.stage import Lower, Pair, PairRule, Params, Rows, Stage, StageFn, Values, recompute
from xtf.tree import Path

ExpertFn = Callable[[Params, Tensor, Tensor], Tensor]
"""``(params, rows (rows, H), offsets (E,) int32) -> (rows, H)``: every expert on its rows, which are sorted by expert; ``offsets``
says at which row those of each expert end. ``params`` are stacked over experts, any number of them: E is theirs."""


class Dispatch(NamedTuple):
    """Slots sorted by expert.

    Args:
        order: (S,) int64, the slot that stands at each sorted row.
        place: (S,) int64, the sorted row at which each slot stands: the inverse of ``order``.
        tokens: (S,) int64, the token of each sorted row.
        offsets: (E,) int32, the row at which each expert's rows end.
    """

    order: Int64[Tensor, " S"]
    place: Int64[Tensor, " S"]
    tokens: Int64[Tensor, " S"]
    offsets: Int32[Tensor, " E"]


@dataclass(frozen=True)
class RoutedExperts(Stage):
    """The stage of a block's routed experts; made by `routed_experts`.

    It reads ``x`` (T, H), to which the results are added, ``h`` (T, H), what the experts see, the weights (T, k) and the int64
    indices (T, k) of each token's experts, and writes ``x``.

    Args:
        experts: E.
        compute: what the experts compute.
    """

    experts: int = 0
    compute: ExpertFn = lambda params, rows, offsets: rows


def routed_experts(
    name: str,
    key: Hashable,
    params: Mapping[str, Path],
    experts: int,
    compute: ExpertFn,
    reads: tuple[str, str, str, str] = ("x", "h", "router_weights", "router_indices"),
    *,
    named: tuple[str, ...] = (),
) -> RoutedExperts:
    """A `RoutedExperts` stage on one rank that has all experts.

    Args:
        name: of the stage.
        key: equal for stages with the same ``compute`` and equally shaped arguments.
        params: the names that ``compute`` uses, and the path of each leaf; all are stacked over experts on dim 0.
        experts: E.
        compute: what the experts compute.
        reads: names of the values, in the order that `RoutedExperts` says.
        named: the names that ``compute`` gives to values inside (`xtf.joint.keep`).
    """
    fn = _local(experts, compute)
    writes = (reads[0],)
    return RoutedExperts(name, "experts", fn, key, params, reads, writes, rule=Added(), named=named, experts=experts, compute=compute)


def _local(experts: int, compute: ExpertFn) -> StageFn:
    def fn(
        params: Params,
        x: Float[Tensor, "T H"],
        h: Float[Tensor, "T H"],
        weights: Float[Tensor, "T k"],
        indices: Int64[Tensor, "T k"],
    ) -> tuple[Float[Tensor, "T H"]]:
        dispatch = dispatch_order(indices, experts)
        rows = gather_tokens(h, dispatch, indices.shape[1])
        return (x + combine(compute(params, rows, dispatch.offsets), weights, dispatch),)

    return fn


@dataclass(frozen=True)
class Added:
    """The rule of a stage that adds to what it reads first, which is not kept: its gradient is that of the sum, and the router in front
    keeps it already.

    Args:
        base: the rule otherwise.
    """

    base: PairRule = recompute

    def __call__(self, fn: StageFn, key: Hashable, lower: Lower) -> Pair:
        """See `xtf.stage.PairRule`."""
        pair = self.base(fn, key, lower)

        def forward(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, Any]:
            writes, kept = pair.forward(params, reads, consts)
            return writes, tree.replace(kept, reads[0], SUM)

        def backward(params: Params, residual: Any, dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]) -> Any:
            (dx,) = dwrites
            assert dx is not None
            kept = tree.replace(residual, SUM, dx)  # what stands for x does not matter to any gradient
            return pair.backward(params, kept, dwrites, consts)

        return pair._replace(forward=forward, backward=backward)


SUM = "what is added to"
"""Stands in a residual for the value that a stage adds to."""


def dispatch_order(indices: Int64[Tensor, "T k"], experts: int) -> Dispatch:
    """Sort slots by expert; slots of one expert stay in the order of their tokens.

    Args:
        indices: (T, k) int64, the experts of each token.
        experts: E.

    Example:
        >>> order = dispatch_order(torch.tensor([[2, 0], [0, 1]]), 3)
        >>> order.tokens.tolist(), order.offsets.tolist()
        ([0, 1, 1, 0], [2, 3, 4])
    """
    by_expert, order = indices.flatten().sort(stable=True)
    every = torch.arange(experts, dtype=indices.dtype, device=indices.device)
    offsets = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    slots = torch.arange(order.shape[0], device=order.device)
    return Dispatch(order, torch.empty_like(order).scatter(0, order, slots), order // indices.shape[1], offsets)


def gather_tokens(h: Float[Tensor, "T H"], dispatch: Dispatch, top_k: int) -> Float[Tensor, "S H"]:
    """The token of each sorted row, ``h[dispatch.tokens]``; ``top_k`` rows are of one token."""
    return _TokensToRows.apply(h.view_as(h), dispatch.order, dispatch.place, top_k)  # a view: see xtf.ops.cpu


class _TokensToRows(torch.autograd.Function):
    """The rows of slots, sorted. Its backward looks up each slot's row and sums a token's along a dim. Autograd's own would add rows to
    places: slower, and on several threads another sum each time."""

    @staticmethod
    def forward(h: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        return h.index_select(0, order // top_k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        h, order, place, ctx.top_k = inputs
        ctx.tokens = h.shape[0]
        ctx.save_for_backward(order, place)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        order, place = ctx.saved_tensors
        by_slot = _Reordered.apply(grad_outputs[0].view_as(grad_outputs[0]), place, order)
        return by_slot.view(ctx.tokens, ctx.top_k, by_slot.shape[1]).sum(1), None, None, None


class _Reordered(torch.autograd.Function):
    """Rows in another order, ``x[order]``, of which ``place`` is the inverse: its backward is a lookup too."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        order, place = ctx.saved_tensors
        return _Reordered.apply(grad_outputs[0].view_as(grad_outputs[0]), place, order), None, None


def combine(rows: Float[Tensor, "S H"], weights: Float[Tensor, "T k"], dispatch: Dispatch) -> Float[Tensor, "T H"]:
    """Sum each token's results by its weights.

    Args:
        rows: (S, H), sorted by expert.
        weights: (T, k), at least float32; the sum is made in this dtype.
        dispatch: the order of ``rows``.

    Returns:
        (T, H), in the dtype of ``rows``.
    """
    by_token = _Reordered.apply(rows.view_as(rows), dispatch.place, dispatch.order).view(*weights.shape, rows.shape[1])
    return (by_token.to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


@dataclass(frozen=True)
class RoutesOnce:
    """The rule of a router stage: the choice it wrote is kept and given back to the function as the constant ``chosen``. Another graph of
    the same scores may round otherwise, and experts have computed for this choice.

    Args:
        at: which of the values the stage writes is the choice: int64 (T, k).
        base: the rule otherwise.
    """

    at: int
    base: PairRule = recompute

    def __call__(self, fn: StageFn, key: Hashable, lower: Lower) -> Pair:
        """See `xtf.stage.PairRule`."""
        pair = self.base(fn, key, lower)

        def forward(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, tuple[Any, Tensor]]:
            writes, kept = pair.forward(params, reads, consts)
            return writes, (kept, writes[self.at])

        def backward(
            params: Params, residual: tuple[Any, Tensor], dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]
        ) -> tuple[Mapping[str, Tensor], tuple[Tensor | None, ...]]:
            kept, chosen = residual
            return pair.backward(params, kept, dwrites, {**consts, "chosen": chosen})

        return pair._replace(forward=forward, backward=backward)


@dataclass(frozen=True)
class ArrivedExperts:
    """The rule of an experts stage on rows that a dispatcher brought (`xtf.dispatch.ARRIVED`).

    The stage reads rows (R, H), weights (N,), int64 source (N,), sorted by expert, and int32 offsets (E,), and writes (R, H): of
    each row, the sum of its slots' results by their weights. Rows are kept as they came, not as they are spread over slots. Any number
    of rows is one compiled function.

    Args:
        compute: what experts compute.
        base: the rule of computing on sorted rows.
    """

    compute: ExpertFn
    base: PairRule = recompute

    def __call__(self, fn: StageFn, key: Hashable, lower: Lower) -> Pair:
        """See `xtf.stage.PairRule`."""
        compute = self.compute

        def weighted(
            params: Params, rows: Float[Tensor, "N H"], weights: Float[Tensor, " N"], offsets: Int32[Tensor, " E"]
        ) -> tuple[Float[Tensor, "N H"]]:
            return (compute(params, rows, offsets) * weights.unsqueeze(1),)

        def unlowered(fn: Callable[..., Any], key: Hashable) -> Callable[..., Any]:
            return fn

        many, few = (self.base(weighted, Rows(key), by) for by in (lower, unlowered))

        def pair(slots: int) -> Pair:
            return many if slots > 1 else few  # compiled code for no row, or one, would be code of its own

        def forward_half(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, Any]:
            rows, weights, source, offsets = reads
            slots = rows.index_select(0, source)
            (out,), kept = pair(source.shape[0]).forward(params, (slots, weights, offsets), {})
            kept = tree.replace(kept, slots, SLOTS)
            return (sum_rows(out, source, rows.shape[0]).to(rows.dtype),), (kept, rows, source, out.dtype)

        def backward_half(
            params: Params, residual: Any, dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]
        ) -> tuple[Mapping[str, Tensor], tuple[Tensor | None, ...]]:
            kept, rows, source, dtype = residual
            (dcomputed,) = dwrites
            assert dcomputed is not None
            dout = dcomputed.index_select(0, source).to(dtype)
            slots = rows.index_select(0, source)
            kept = tree.replace(kept, SLOTS, slots)
            dparams, (drows, dweights, _) = pair(source.shape[0]).backward(params, kept, (dout,), {})
            assert drows is not None
            return dparams, (sum_rows(drows, source, rows.shape[0]), dweights, None, None)

        return Pair(forward_half, backward_half)


SLOTS = "rows spread over slots"
"""Stands in a residual for what is made again of the rows that arrived."""


def sum_rows(rows: Float[Tensor, "rows H"], index: Int64[Tensor, " rows"], size: int) -> Float[Tensor, "size H"]:
    """The sum of the rows of each index, in at least float32 and in the order of rows.

    The order is kept on the CPU; on CUDA only under ``torch.use_deterministic_algorithms``. Not to be lowered: generated code adds
    from several threads in another order each time.

    Args:
        rows: (rows, H).
        index: (rows,) int64 below ``size``.
        size: number of sums.

    Returns:
        (size, H), in the dtype of ``rows``.

    Example:
        >>> sum_rows(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 3).flatten().tolist()
        [2.0, 5.0, 0.0]
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    out = wide.new_zeros(size, rows.shape[1])
    if rows.is_cpu:  # torch sorts an expanded index: several times faster than index_add there
        return out.scatter_add_(0, index.unsqueeze(1).expand_as(wide), wide).to(rows.dtype)
    return out.index_add_(0, index, wide).to(rows.dtype)
