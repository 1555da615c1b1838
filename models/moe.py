"""A dropless mixture of experts (Shazeer et al. 2017; Gale et al. 2022, "MegaBlocks"), cut into a router and an experts stage.

The router (`xtf.models.routers`) writes which experts each token goes to, so that nothing ever routes again; for the experts stage
see `xtf.experts`.

Dims: T tokens, H hidden size, E experts, k experts per token, F the inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Hashable

from jaxtyping import Float, Int32
from torch import Tensor

from xtf.checkpoint_map import Concat, Named, Source, Stack
from xtf.experts import ExpertFn, routed_experts
from xtf.models.common import DecoderConfig, Leaves, Part, linear, silu_mul
from xtf.models.routers import Router, document_statistics, router_fn, sequence_fn, sequence_statistic, statistics
from xtf.ops import GroupedMM, Ops
from xtf.stage import Params, Stage


def expert_mlp(grouped_mm: GroupedMM) -> ExpertFn:
    """The gated MLP of each expert: ``gate_up`` (E, 2F, H), the gate's rows before those of up, and ``down`` (E, H, F)."""

    def compute(params: Params, rows: Float[Tensor, "rows H"], offsets: Int32[Tensor, " E"]) -> Float[Tensor, "rows H"]:
        gate, up = grouped_mm(rows, params["gate_up"], offsets).chunk(2, -1)
        return grouped_mm(silu_mul(gate, up), params["down"], offsets)

    return compute


def shared_fn(params: Params, x: Float[Tensor, "T H"], h: Float[Tensor, "T H"]) -> tuple[Float[Tensor, "T H"]]:
    """The function of a shared stage, an MLP of every token: ``(params, x (T, H), h (T, H)) -> (x (T, H),)``. ``h`` is the router's."""
    return (x + linear(params, "down", silu_mul(linear(params, "gate", h), linear(params, "up", h))),)


def mixture(
    config: DecoderConfig, layer: int, leaves: Leaves, *, router: Router, inner: int, shared: int = 0, documents: bool = False
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
    """
    hidden, experts = config.hidden_size, router.experts
    specs = {
        "norm": leaves.norm(hidden),
        **router.specs(leaves, hidden),
        "gate_up": leaves.matrix((experts, 2 * inner, hidden), ("expert", "mlp", "embed")),
        "down": leaves.matrix((experts, hidden, inner), ("expert", "embed", "mlp")),
    }
    prefix = f"model.layers.{layer}"

    def each(*names: str) -> Stack:
        parts = [[Named(f"{prefix}.mlp.experts.{e}.{name}.weight") for name in names] for e in range(experts)]
        return Stack(tuple(part[0] if len(part) == 1 else Concat(tuple(part)) for part in parts))

    sources: dict[str, Source] = {
        "norm": Named(f"{prefix}.post_attention_layernorm.weight"),
        "router": Named(f"{prefix}.mlp.gate.weight"),
        "router_bias": Named(f"{prefix}.mlp.gate.bias"),
        "correction": Named(f"{prefix}.mlp.gate.e_score_correction_bias"),
        "gate_up": each("gate_proj", "up_proj"),
        "down": each("down_proj"),
    }
    if shared:
        for name, shape, axes in (
            ("gate", (shared, hidden), ("mlp", "embed")),
            ("up", (shared, hidden), ("mlp", "embed")),
            ("down", (hidden, shared), ("embed", "mlp")),
        ):
            specs[f"shared_{name}"] = leaves.matrix(shape, axes)
            sources[f"shared_{name}"] = Named(f"{prefix}.mlp.shared_experts.{name}_proj.weight")

    def stages(ops: Ops, key: Hashable) -> tuple[Stage, ...]:
        name, path = f"layers.{layer}", f"layers.{layer}.moe"
        by_document, consts = (document_statistics(layer), ("document", "document_tokens")) if documents else ((), ())
        found = [
            Stage(
                f"{name}.router",
                "router",
                router_fn(router, config.rms_norm_eps, documents=documents),
                (key, "router", router, documents),
                {leaf: f"{path}.{leaf}" for leaf in ("norm", "router", "router_bias", "correction") if leaf in specs},
                ("x",),
                ("h", "router_weights", "router_indices", *statistics(layer), *by_document),
                ("valid", *consts),
            )
        ]
        if documents:
            of = (key, "statistics", router.top_k)
            writes = (sequence_statistic(layer),)
            found += [
                Stage(f"{name}.statistics", "statistics", sequence_fn(router.top_k), of, {}, by_document, writes, ("document_tokens",))
            ]
        if shared:
            own = {leaf: f"{path}.shared_{leaf}" for leaf in ("gate", "up", "down")}
            found += [Stage(f"{name}.shared", "shared", shared_fn, (key, "shared", shared), own, ("x", "h"), ("x",))]
        leaves_of = {leaf: f"{path}.{leaf}" for leaf in ("gate_up", "down")}
        return *found, routed_experts(f"{name}.experts", (key, "experts"), leaves_of, experts, expert_mlp(ops.grouped_mm))

    return Part("moe", specs, {leaf: sources[leaf] for leaf in specs}, stages)
