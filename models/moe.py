"""A dropless mixture of experts (Shazeer et al. 2017; Gale et al. 2022, "MegaBlocks"), cut into a router and an experts stage.

The router (`xtf.models.routers`) writes which experts each token goes to, so that nothing ever routes again; for the experts stage
see `xtf.experts`.

Dims: T tokens, H hidden size, E experts, k experts per token, F the inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from jaxtyping import Float, Int32
from torch import Tensor

from xtf.checkpoint_map import Concat, Either, Named, Source, Stack
from xtf.experts import ExpertFn, RoutesOnce, routed_experts
from xtf.joint import keep
from xtf.models import hf
from xtf.models.common import DecoderConfig, Leaves, Part, linear, silu_mul
from xtf.models.routers import Router, document_statistics, router_fn, sequence_fn, sequence_statistic, statistics
from xtf.ops import GroupedMM, Linear, Ops
from xtf.spec import ParamSpec
from xtf.stage import Params, Rows, Stage, StageFn


def expert_mlp(grouped_mm: GroupedMM) -> ExpertFn:
    """The gated MLP of each expert: ``gate_up`` (E, 2F, H), the gate's rows before those of up, and ``down`` (E, H, F)."""

    def compute(params: Params, rows: Float[Tensor, "rows H"], offsets: Int32[Tensor, " E"]) -> Float[Tensor, "rows H"]:
        gate, up = keep("expert_gate_up", grouped_mm(rows, params["gate_up"], offsets)).chunk(2, -1)
        return grouped_mm(silu_mul(gate, up), params["down"], offsets)

    return compute


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
        compute: what they compute, made of the grouped product of a backend. It names ``"expert_gate_up"`` (`xtf.joint.keep`).
    """

    specs: dict[str, ParamSpec]
    sources: dict[str, Source]
    compute: Callable[[GroupedMM], ExpertFn]


def shared_fn(mm: Linear) -> StageFn:
    """The function of a shared stage, an MLP of every token: ``(params, x (T, H), h (T, H)) -> (x (T, H),)``. ``h`` is the router's."""

    def fn(params: Params, x: Float[Tensor, "T H"], h: Float[Tensor, "T H"]) -> tuple[Float[Tensor, "T H"]]:
        gate, up = (keep("shared_gate_up", linear(mm, params, name, h)) for name in ("gate", "up"))
        return (x + linear(mm, params, "down", silu_mul(gate, up)),)

    return fn


_NAMES = MixtureNames()


def mixture(
    config: DecoderConfig,
    layer: int,
    leaves: Leaves,
    *,
    router: Router,
    inner: int,
    shared: int = 0,
    documents: bool = False,
    names: MixtureNames = _NAMES,
    own: Experts | None = None,
) -> Part:
    """Norm, router, experts and residual.

    The stages are ``layers.i.router``; with ``documents``, ``layers.i.statistics``; with ``shared``, ``layers.i.shared``, which depends on
    nothing that is sent to experts and so may run meanwhile; and ``layers.i.experts``.

    Args:
        config: the common sizes.
        layer: its number.
        leaves: makes the specs.
        router: which.
        inner: F.
        shared: the inner size of a gated MLP that every token goes through (Dai et al. 2024, "DeepSeekMoE"), 0 for none.
        documents: whether the load is also counted by document, for ``router_loss(sequence_coefficient=...)``. The model then needs the
            constants of `xtf.models.routers.document_constants`.
        names: those of the checkpoint.
        own: experts that are not gated MLPs of inner size F.
    """
    hidden, experts, prefix = config.hidden_size, router.experts, f"model.layers.{layer}"
    block = own or _gated(config, leaves, experts, inner)
    of_router = {"norm": leaves.norm(hidden), **router.specs(leaves, hidden)}
    specs = of_router | block.specs
    sources = {
        "norm": Named(f"{prefix}.post_attention_layernorm.weight"),
        **mixture_sources(prefix, experts, names),
        **block.sources,
    }
    if shared:
        for name, shape, axes in (
            ("gate", (shared, hidden), ("mlp", "embed")),
            ("up", (shared, hidden), ("mlp", "embed")),
            ("down", (hidden, shared), ("embed", "mlp")),
        ):
            specs[f"shared_{name}"] = leaves.matrix(shape, axes)
            sources[f"shared_{name}"] = Named(f"{prefix}.{names.block}.shared_experts.{name}_proj.weight")

    def stages(ops: Ops, key: Hashable) -> tuple[Stage, ...]:
        name, path = f"layers.{layer}", f"layers.{layer}.moe"
        by_document, consts = (document_statistics(layer), ("document", "document_tokens")) if documents else ((), ())
        found = [
            Stage(
                f"{name}.router",
                "router",
                router_fn(router, config.rms_norm_eps, documents=documents),
                (key, "router", router, documents),
                {leaf: f"{path}.{leaf}" for leaf in of_router},
                ("x",),
                ("h", "router_weights", "router_indices", *statistics(layer), *by_document),
                ("valid", *consts),
                RoutesOnce(2),
            )
        ]
        if documents:
            of = Rows((key, "statistics", router.top_k))  # of documents
            writes = (sequence_statistic(layer),)
            found += [
                Stage(f"{name}.statistics", "statistics", sequence_fn(router.top_k), of, {}, by_document, writes, ("document_tokens",))
            ]
        if shared:
            own = {leaf: f"{path}.shared_{leaf}" for leaf in ("gate", "up", "down")}
            found += [
                Stage(
                    f"{name}.shared",
                    "shared",
                    shared_fn(ops.linear),
                    (key, "shared", shared),
                    own,
                    ("x", "h"),
                    ("x",),
                    named=("shared_gate_up",),
                )
            ]
        leaves_of = {leaf: f"{path}.{leaf}" for leaf in block.specs}
        compute = block.compute(ops.grouped_mm)
        return *found, routed_experts(f"{name}.experts", (key, "experts"), leaves_of, experts, compute, named=("expert_gate_up",))

    return Part("moe", specs, {leaf: sources[leaf] for leaf in specs}, stages)


def _gated(config: DecoderConfig, leaves: Leaves, experts: int, inner: int) -> Experts:
    """Gated MLPs, found where `mixture_sources` says."""
    specs = {
        "gate_up": leaves.matrix((experts, 2 * inner, config.hidden_size), ("expert", "mlp", "embed")),
        "down": leaves.matrix((experts, config.hidden_size, inner), ("expert", "embed", "mlp")),
    }
    return Experts(specs, {}, expert_mlp)


def mixture_sources(prefix: str, experts: int, names: MixtureNames) -> dict[str, Source]:
    """Where the router, ``gate_up`` and ``down`` are found: one tensor for each projection of each expert, as is written; or as
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
        "router_bias": Named(f"{at}.{names.router}.bias"),
        "correction": Named(f"{at}.{names.router}.e_score_correction_bias"),
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
