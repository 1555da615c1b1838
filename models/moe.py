"""A dropless mixture of experts (Shazeer et al. 2017; Gale et al. 2022, "MegaBlocks"), cut into a router and an experts stage.

The router writes which experts each token goes to, so that nothing ever routes again; for the experts stage see `xtf.experts`.

Dims: T tokens, H hidden size, E experts, k experts per token, F the inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from xtf.checkpoint_map import Concat, Either, Named, Source, Stack
from xtf.experts import ExpertFn, routed_experts
from xtf.model import AuxLoss
from xtf.models import hf
from xtf.models.common import DecoderConfig, Leaves, Part, rms_norm, silu_mul
from xtf.ops import GroupedMM, Ops
from xtf.spec import ParamSpec
from xtf.stage import Params, Stage, StageFn, Values


def expert_mlp(grouped_mm: GroupedMM) -> ExpertFn:
    """The gated MLP of each expert: ``gate_up`` (E, 2F, H), the gate's rows before those of up, and ``down`` (E, H, F)."""

    def compute(params: Params, rows: Float[Tensor, "rows H"], offsets: Int32[Tensor, " E"]) -> Float[Tensor, "rows H"]:
        gate, up = grouped_mm(rows, params["gate_up"], offsets).chunk(2, -1)
        return grouped_mm(silu_mul(gate, up), params["down"], offsets)

    return compute


def router_fn(eps: float, top_k: int, normalize: bool) -> StageFn:
    """The function of a router stage.

    ``(params, x (T, H), *, valid (T,)) -> (h (T, H), weights (T, k), indices (T, k), counts (E,), probs (E,), z ())``: the normed
    tokens; the softmax over all experts at the best k, summing to one if ``normalize`` (the softmax over these k); which these are;
    over valid tokens, the slots that each expert gets, the sum of probabilities, and the sum of logsumexp². Scores, to which a
    ``router_bias`` is added where there is one, are in at least float32.
    """

    def sum_to_one(weights: Float[Tensor, "T k"]) -> Float[Tensor, "T k"]:
        return weights / weights.sum(-1, keepdim=True)

    def as_they_are(weights: Float[Tensor, "T k"]) -> Float[Tensor, "T k"]:
        return weights

    scaled = sum_to_one if normalize else as_they_are

    def fn(params: Params, x: Float[Tensor, "T H"], *, valid: Bool[Tensor, " T"]) -> Values:
        h = rms_norm(x, params["norm"], eps)
        wide = torch.promote_types(h.dtype, torch.float32)
        bias = params.get("router_bias")
        logits = F.linear(h.to(wide), params["router"].to(wide), None if bias is None else bias.to(wide))
        probs = logits.softmax(-1)
        weights, indices = probs.topk(top_k, -1)
        slots = valid.long().unsqueeze(-1).expand_as(indices).flatten()
        counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=x.device).scatter_add(0, indices.flatten(), slots)
        counted = valid.to(wide)
        z = (logits.logsumexp(-1).square() * counted).sum()
        return h, scaled(weights), indices, counts, (probs * counted.unsqueeze(-1)).sum(0), z

    return fn


class MixtureNames(NamedTuple):
    """What a checkpoint calls the parts of a mixture.

    Args:
        block: the module of router and experts in a layer.
        router: the router in it.
        gate, up, down: the matrices of an expert.
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class Experts(NamedTuple):
    """The experts of a layer, where they are not gated MLPs.

    Args:
        specs: their parameters, stacked over experts on dim 0, which has the axis ``"expert"``.
        sources: where those are found in a checkpoint that `mixture_sources` does not say.
        compute: what they compute, made of the grouped product of a backend.
    """

    specs: dict[str, ParamSpec]
    sources: dict[str, Source]
    compute: Callable[[GroupedMM], ExpertFn]


_NAMES = MixtureNames()


def mixture(
    config: DecoderConfig,
    layer: int,
    leaves: Leaves,
    *,
    experts: int,
    top_k: int,
    inner: int,
    normalize: bool,
    router_bias: bool = False,
    names: MixtureNames = _NAMES,
    own: Experts | None = None,
) -> Part:
    """Norm, router, experts and residual.

    Args:
        config: the common sizes.
        layer: its number.
        leaves: makes the specs.
        experts: E. ``top_k``: k. ``inner``: F.
        normalize: whether the weights of a token sum to one.
        router_bias: whether the router's scores have a trained bias.
        names: those of the checkpoint.
        own: experts that are not gated MLPs of inner size F.
    """
    hidden, prefix = config.hidden_size, f"model.layers.{layer}"
    block = own or _gated(config, leaves, experts, inner)
    specs = {
        "norm": leaves.norm(hidden),
        "router": leaves.matrix((experts, hidden), (None, "embed")),  # not "expert": every token needs all of it
        **({"router_bias": leaves.bias(experts, None)} if router_bias else {}),
    }
    of_router = tuple(specs)
    specs |= block.specs
    sources: dict[str, Source] = {
        "norm": Named(f"{prefix}.post_attention_layernorm.weight"),
        **mixture_sources(prefix, experts, names),
        "router_bias": Named(f"{prefix}.{names.block}.{names.router}.bias"),
        **block.sources,
    }

    def stages(ops: Ops, key: Hashable) -> tuple[Stage, ...]:
        name, path = f"layers.{layer}.router", f"layers.{layer}.moe"
        router = Stage(
            name,
            "router",
            router_fn(config.rms_norm_eps, top_k, normalize),
            (key, "router"),
            {leaf: f"{path}.{leaf}" for leaf in of_router},
            ("x",),
            ("h", "router_weights", "router_indices", *statistics(layer)),
            ("valid",),
        )
        leaves_of = {leaf: f"{path}.{leaf}" for leaf in block.specs}
        return router, routed_experts(f"layers.{layer}.experts", (key, "experts"), leaves_of, experts, block.compute(ops.grouped_mm))

    return Part("moe", specs, {leaf: sources[leaf] for leaf in specs}, stages)


def _gated(config: DecoderConfig, leaves: Leaves, experts: int, inner: int) -> Experts:
    """Gated MLPs, found where `mixture_sources` says."""
    specs = {
        "gate_up": leaves.matrix((experts, 2 * inner, config.hidden_size), ("expert", "mlp", "embed")),
        "down": leaves.matrix((experts, config.hidden_size, inner), ("expert", "embed", "mlp")),
    }
    return Experts(specs, {}, expert_mlp)


def mixture_sources(prefix: str, experts: int, names: MixtureNames) -> dict[str, Source]:
    """Where ``router``, ``gate_up`` and ``down`` are found: one tensor for each projection of each expert, as is written; or as
    transformers holds them in memory, those of a layer in one, ``mlp.experts.gate_up_proj`` (E, 2F, H) and ``down_proj`` (E, H, F).

    Args:
        prefix: the checkpoint's name of the layer, as ``"model.layers.0"``.
        experts: E.
        names: what the block, and the matrices of one expert, are called.
    """
    at, fused = f"{prefix}.{names.block}", f"{prefix}.mlp"

    def each(name: str) -> list[Source]:
        return [Named(f"{at}.experts.{e}.{name}.weight") for e in range(experts)]

    router, held = Named(f"{at}.{names.router}.weight"), Named(f"{fused}.{names.router}.weight")
    both: list[Source] = [Concat(pair) for pair in zip(each(names.gate), each(names.up), strict=True)]
    return {
        "router": router if router == held else Either((router, held)),
        "gate_up": Either((Stack(tuple(both)), Named(f"{fused}.experts.gate_up_proj"))),
        "down": Either((Stack(tuple(each(names.down))), Named(f"{fused}.experts.down_proj"))),
    }


def check_experts(name: str, experts: int, top_k: int, coefficient: float) -> None:
    """Refuse the fields of a config that do not describe a router; ``name`` is that of ``experts``."""
    hf.check_integer(name, experts, 1)
    hf.check_integer("num_experts_per_tok", top_k, 1)
    if top_k > experts:
        raise ValueError(f"num_experts_per_tok={top_k} is more than {name}={experts}")
    hf.check_number("router_aux_loss_coef", coefficient)
    if not coefficient >= 0:
        raise ValueError(f"router_aux_loss_coef={coefficient!r}; expected a number of at least 0")


def check_options(family: str, aux: str, router_z_loss: float) -> None:
    """Refuse options of a family with routers that `router_loss` has no meaning for."""
    if aux not in ("microbatch", "step", "pooled"):
        raise ValueError(f"{family} got aux={aux!r}; expected 'microbatch', 'step' or 'pooled'")
    if not router_z_loss >= 0:
        raise ValueError(f"{family} got router_z_loss={router_z_loss!r}; expected a number of at least 0")


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
