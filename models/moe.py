"""A dropless mixture of experts (Shazeer et al. 2017; Gale et al. 2022, "MegaBlocks"), cut into a router and an experts stage.

The router writes which experts each token goes to, so that nothing ever routes again. The experts stage is three functions, for
layouts that come between them: `dispatch_order` sorts slots by expert, `expert_mlp` computes on sorted rows, `combine` brings the
results back to their tokens.

Dims: T tokens, H hidden size, E experts, k experts per token, S = T × k slots (slot t × k + j is token t's choice j), F the
inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from xtf.checkpoint_map import Concat, Either, Named, Source, Stack
from xtf.model import AuxLoss
from xtf.models.common import DecoderConfig, Leaves, Part, rms_norm, silu_mul
from xtf.ops import GroupedMM, Ops
from xtf.stage import Params, Stage, StageFn, Values


class Dispatch(NamedTuple):
    """Slots sorted by expert.

    Args:
        order: (S,) int64, the slot that stands at each sorted row.
        tokens: (S,) int64, the token of each sorted row.
        offsets: (E,) int32, the row at which each expert's rows end.
    """

    order: Int64[Tensor, " S"]
    tokens: Int64[Tensor, " S"]
    offsets: Int32[Tensor, " E"]


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
    return Dispatch(order, order // indices.shape[1], offsets)


def expert_mlp(
    params: Params, rows: Float[Tensor, "rows H"], offsets: Int32[Tensor, " E"], grouped_mm: GroupedMM
) -> Float[Tensor, "rows H"]:
    """The gated MLP of each expert on its rows.

    Args:
        params: ``gate_up`` (E, 2F, H), the gate's rows before those of up, and ``down`` (E, H, F).
        rows: (rows, H), sorted by expert.
        offsets: (E,) int32, the row at which each expert's rows end.
        grouped_mm: the op.

    Returns:
        (rows, H).
    """
    gate, up = grouped_mm(rows, params["gate_up"], offsets).chunk(2, -1)
    return grouped_mm(silu_mul(gate, up), params["down"], offsets)


def gather_tokens(h: Float[Tensor, "T H"], order: Int64[Tensor, " S"], top_k: int) -> Float[Tensor, "S H"]:
    """The token of each sorted row, ``h[order // top_k]``.

    Written over slots, each of which is taken once: the backward then sums a token's gradients along a dim. As a gather of
    tokens it would add several rows to one place, and code that does so on several threads gives other bits each time.
    """
    slots = h.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, h.shape[1])
    return slots.index_select(0, order)


def combine(rows: Float[Tensor, "S H"], weights: Float[Tensor, "T k"], dispatch: Dispatch) -> Float[Tensor, "T H"]:
    """Sum each token's results by its weights.

    Args:
        rows: (S, H), sorted by expert.
        weights: (T, k), at least float32; the sum is made in this dtype.
        dispatch: the order of ``rows``.

    Returns:
        (T, H), in the dtype of ``rows``.
    """
    slots = torch.arange(dispatch.order.shape[0], device=rows.device)
    place = torch.empty_like(dispatch.order).scatter(0, dispatch.order, slots)  # the sorted row of each slot
    by_token = rows.index_select(0, place).view(*weights.shape, rows.shape[1])
    return (by_token.to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def router_fn(eps: float, top_k: int, normalize: bool) -> StageFn:
    """The function of a router stage.

    ``(params, x (T, H), *, valid (T,)) -> (h (T, H), weights (T, k), indices (T, k), counts (E,), probs (E,), z ())``: the normed
    tokens; the softmax over all experts at the best k, summing to one if ``normalize``; which these are; over valid tokens, the
    slots that each expert gets, the sum of probabilities, and the sum of logsumexp². Scores are in at least float32.
    """

    def sum_to_one(weights: Float[Tensor, "T k"]) -> Float[Tensor, "T k"]:
        return weights / weights.sum(-1, keepdim=True)

    def as_they_are(weights: Float[Tensor, "T k"]) -> Float[Tensor, "T k"]:
        return weights

    scaled = sum_to_one if normalize else as_they_are

    def fn(params: Params, x: Float[Tensor, "T H"], *, valid: Bool[Tensor, " T"]) -> Values:
        h = rms_norm(x, params["norm"], eps)
        wide = torch.promote_types(h.dtype, torch.float32)
        logits = F.linear(h.to(wide), params["router"].to(wide))
        probs = logits.softmax(-1)
        weights, indices = probs.topk(top_k, -1)
        slots = valid.long().unsqueeze(-1).expand_as(indices).flatten()
        counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=x.device).scatter_add(0, indices.flatten(), slots)
        counted = valid.to(wide)
        z = (logits.logsumexp(-1).square() * counted).sum()
        return h, scaled(weights), indices, counts, (probs * counted.unsqueeze(-1)).sum(0), z

    return fn


def experts_fn(experts: int, grouped_mm: GroupedMM) -> StageFn:
    """The function of an experts stage: ``(params, x (T, H), h (T, H), weights (T, k), indices (T, k)) -> (x,)``."""

    def fn(
        params: Params,
        x: Float[Tensor, "T H"],
        h: Float[Tensor, "T H"],
        weights: Float[Tensor, "T k"],
        indices: Int64[Tensor, "T k"],
    ) -> tuple[Float[Tensor, "T H"]]:
        dispatch = dispatch_order(indices, experts)
        rows = gather_tokens(h, dispatch.order, indices.shape[1])
        return (x + combine(expert_mlp(params, rows, dispatch.offsets, grouped_mm), weights, dispatch),)

    return fn


def mixture(config: DecoderConfig, layer: int, leaves: Leaves, *, experts: int, top_k: int, inner: int, normalize: bool) -> Part:
    """Norm, router, experts and residual.

    Args:
        config: the common sizes.
        layer: its number.
        leaves: makes the specs.
        experts: E. ``top_k``: k. ``inner``: F.
        normalize: whether the weights of a token sum to one.
    """
    hidden = config.hidden_size
    specs = {
        "norm": leaves.norm(hidden),
        "router": leaves.matrix((experts, hidden), (None, "embed")),  # not "expert": every token needs all of it
        "gate_up": leaves.matrix((experts, 2 * inner, hidden), ("expert", "mlp", "embed")),
        "down": leaves.matrix((experts, hidden, inner), ("expert", "embed", "mlp")),
    }
    prefix = f"model.layers.{layer}"

    sources = {
        "norm": Named(f"{prefix}.post_attention_layernorm.weight"),
        "router": Named(f"{prefix}.mlp.gate.weight"),
        **expert_sources(f"{prefix}.mlp.experts", experts),
    }

    def stages(ops: Ops, key: Hashable) -> tuple[Stage, ...]:
        name, path = f"layers.{layer}.router", f"layers.{layer}.moe"
        router = Stage(
            name,
            "router",
            router_fn(config.rms_norm_eps, top_k, normalize),
            (key, "router"),
            {leaf: f"{path}.{leaf}" for leaf in ("norm", "router")},
            ("x",),
            ("h", "router_weights", "router_indices", *statistics(layer)),
            ("valid",),
        )
        computed = Stage(
            f"layers.{layer}.experts",
            "experts",
            experts_fn(experts, ops.grouped_mm),
            (key, "experts"),
            {leaf: f"{path}.{leaf}" for leaf in ("gate_up", "down")},
            ("x", "h", "router_weights", "router_indices"),
            ("x",),
        )
        return router, computed

    return Part("moe", specs, sources, stages)


def expert_sources(prefix: str, experts: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, Source]:
    """Where ``gate_up`` and ``down`` are found: one tensor for each expert's projection, as is written, or as transformers holds
    them in memory, fused: ``gate_up_proj`` (E, 2F, H) and ``down_proj`` (E, H, F).

    Args:
        prefix: the checkpoint's name of the experts, as ``"model.layers.0.mlp.experts"``.
        experts: E.
        names: what gate, up and down of one expert are called.
    """
    gate, up, down = ([Named(f"{prefix}.{e}.{name}.weight") for e in range(experts)] for name in names)
    return {
        "gate_up": Either((Stack(tuple(map(_both, gate, up))), Named(f"{prefix}.gate_up_proj"))),
        "down": Either((Stack(tuple(down)), Named(f"{prefix}.down_proj"))),
    }


def _both(gate: Source, up: Source) -> Source:
    return Concat((gate, up))


def statistics(layer: int) -> tuple[str, str, str]:
    """The names under which a layer's router writes its counts, sums of probabilities and sum of logsumexp²."""
    return f"layers.{layer}.router.counts", f"layers.{layer}.router.probs", f"layers.{layer}.router.z"


def router_loss(layers: Sequence[int], *, top_k: int, coefficient: float, z_coefficient: float, pooled: bool) -> AuxLoss:
    """What routers add to the loss.

    With c the slots and p the sum of probabilities of each expert over T tokens, a layer's balance is
    ``E × Σ (c / (T k)) × (p / T)`` (Fedus et al. 2021, "Switch Transformers"): 1 where the load is even. The loss is
    ``coefficient × Σ balance + z_coefficient × Σ z / T`` over layers (z: Zoph et al. 2022, "ST-MoE").

    Args:
        layers: the numbers of the sparse layers, at least one.
        top_k: k.
        coefficient: of the balance.
        z_coefficient: of the z-loss.
        pooled: take transformers' formula instead, ``E × Σ c̄ × p̄`` with c̄ and p̄ the means over all layers' tokens together:
            not divided by k, and one number whatever the number of layers.

    Returns:
        An `xtf.model.AuxLoss`. Its metrics: ``aux_loss`` (), what is added; ``router_balance`` (layers,); ``router_z`` (layers,),
        the mean of logsumexp²; ``expert_load`` (layers, E), the share of slots of each expert; ``load_violation`` (layers,), the
        largest load over the mean load, minus 1.
    """
    combined: Callable[[Tensor, Tensor], Tensor] = _pooled(top_k) if pooled else _per_layer

    def aux(stats: Mapping[str, Tensor], tokens: Int[Tensor, ""]) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        counts, probs, z = (torch.stack([stats[name] for name in names]) for names in zip(*map(statistics, layers), strict=True))
        total = tokens.clamp_min(1).to(probs.dtype)
        load, probs, z = counts.to(probs.dtype) / (total * top_k), probs / total, z / total
        loss = coefficient * combined(load, probs) + z_coefficient * z.sum()
        metrics = {
            "aux_loss": loss,
            "router_balance": load.shape[1] * (load * probs).sum(1),
            "router_z": z,
            "expert_load": load,
            "load_violation": load.amax(1) * load.shape[1] - 1,
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    return aux


def _per_layer(load: Float[Tensor, "layers E"], probs: Float[Tensor, "layers E"]) -> Float[Tensor, ""]:
    return load.shape[1] * (load * probs).sum()


def _pooled(top_k: int) -> Callable[[Tensor, Tensor], Tensor]:
    def pooled(load: Float[Tensor, "layers E"], probs: Float[Tensor, "layers E"]) -> Float[Tensor, ""]:
        return load.shape[1] * (load.mean(0) * top_k * probs.mean(0)).sum()

    return pooled
