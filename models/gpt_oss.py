"""GPT-OSS (OpenAI 2025): layers with and without sliding windows in turn, attention sinks, and experts with biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from xtf.checkpoint_map import Interleaved, Named, Source, Transposed
from xtf.experts import ExpertFn
from xtf.joint import keep
from xtf.model import Model
from xtf.models import hf, windows
from xtf.models.common import SHARED, DecoderConfig, Leaves, Part, attention, check_count, check_dtype, shared_from_hf, shared_to_hf
from xtf.models.decoder import decoder
from xtf.models.moe import Experts, MixtureNames, check_experts, check_options, mixture
from xtf.models.routers import Router, router_loss
from xtf.ops import GroupedMM
from xtf.spec import Init, ParamSpec
from xtf.stage import Params

_OWN = (
    "num_local_experts",
    "num_experts_per_tok",
    "router_aux_loss_coef",
    "swiglu_alpha",
    "swiglu_limit",
    "attention_bias",
    "sliding_window",
)
_TWICE = ("experts_per_token", "initial_context_length")
"""Fields of published configs that say again what others say."""

_NAMES = MixtureNames(router="router")
_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A GPT-OSS; for the common fields see `xtf.models.common.DecoderConfig`.

    Args:
        num_local_experts: experts of every layer, each of inner size ``intermediate_size``.
        num_experts_per_tok: experts that a token goes to.
        router_aux_loss_coef: coefficient of the load-balancing loss. transformers adds it only where ``output_router_logits`` is
            set; here it always counts. Published configs say 0.9, a thousand times what transformers starts from: to go on
            training with a balance that does not rule the loss, replace it.
        swiglu_alpha: factor on the gate inside its sigmoid.
        swiglu_limit: what the gate is at most, and what up is at most on both sides.
        attention_bias: biases on all four projections of attention.
        sliding_window: tokens that a token sees, itself included, in layers that have a window.
        layer_types: ``"full_attention"`` or ``"sliding_attention"`` for each layer; empty for full attention everywhere.

    Example:
        >>> config = Config(vocab_size=8, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                 num_key_value_heads=1, head_dim=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=3,
        ...                 layer_types=("sliding_attention", "full_attention"))
        >>> Config.from_hf(config.to_hf()) == config
        True
    """

    num_local_experts: int
    num_experts_per_tok: int
    router_aux_loss_coef: float = 0.001
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True
    sliding_window: int = 128
    layer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_local_experts", self.num_local_experts, self.num_experts_per_tok, self.router_aux_loss_coef)
        hf.check_number("swiglu_alpha", self.swiglu_alpha)
        hf.check_number("swiglu_limit", self.swiglu_limit)
        if not self.swiglu_limit > 0:
            raise ValueError(f"swiglu_limit={self.swiglu_limit!r}; expected a number above 0, as 7.0")
        hf.check_flag("attention_bias", self.attention_bias)
        check_count(self, "sliding_window", 1)
        windows.check(self.sliding_window, self.layer_types, self.num_hidden_layers)

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> Config:
        """Read a ``config.json``.

        Raises:
            ValueError: for what is missing or not supported, by name.
        """
        known = (*SHARED, *_OWN, *_TWICE, "layer_types")
        found = hf.read(config, family="gpt_oss", model_types=("gpt_oss",), known=known)
        layers = hf.required(found, "num_hidden_layers", "gpt_oss")
        defaults = {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
        }
        found = defaults | found
        if not found.get("rope_scaling") and not found.get("rope_parameters"):
            found["rope_parameters"] = _ROPE
        kinds = tuple(found["layer_types"])
        read = Config(
            **shared_from_hf(found, "gpt_oss"),
            **{name: found[name] for name in _OWN if name in found},
            layer_types=() if len(kinds) == layers and set(kinds) <= {"full_attention"} else kinds,
        )
        said = (read.num_experts_per_tok, read.rope.original_max_position_embeddings)
        for again, name, value in zip(_TWICE, ("num_experts_per_tok", "original_max_position_embeddings"), said, strict=True):
            if found.get(again, value) != value:
                raise ValueError(f"gpt_oss got {again}={found[again]!r} and {name}={value!r}, which must be equal: remove the wrong one")
        return read

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this model."""
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            **shared_to_hf(self),
            **{name: getattr(self, name) for name in _OWN},
            "layer_types": list(self.layer_types) or ["full_attention"] * self.num_hidden_layers,
        }


def expert_fn(grouped_mm: GroupedMM, alpha: float, limit: float) -> ExpertFn:
    """A gated MLP with biases whose activation is bounded, ``(up + 1) × gate × sigmoid(alpha × gate)``.

    Its parameters are ``gate_up`` (E, 2F, H), the gate's rows before those of up, ``gate_up_bias`` (E, 2F), ``down`` (E, H, F)
    and ``down_bias`` (E, H).

    Args:
        grouped_mm: the product.
        alpha: see above.
        limit: what gate is at most, and what up is at most on both sides.
    """

    def compute(params: Params, rows: Float[Tensor, "rows H"], offsets: Int32[Tensor, " E"]) -> Float[Tensor, "rows H"]:
        of_expert = expert_of_rows(rows, offsets)
        both = keep("expert_gate_up", torch.addmm(grouped_mm(rows, params["gate_up"], offsets), of_expert, params["gate_up_bias"]))
        gate, up = both.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out = grouped_mm((up + 1) * gate * torch.sigmoid(alpha * gate), params["down"], offsets)
        return torch.addmm(out, of_expert, params["down_bias"])

    return compute


def expert_of_rows(rows: Float[Tensor, "rows H"], offsets: Int32[Tensor, " E"]) -> Float[Tensor, "rows E"]:
    """1 where a row is one of the expert's, else 0, in the dtype of ``rows``.

    A product with it gives each row the bias of its expert, and backward the sum of each expert's rows, in the same order each time:
    the backward of a lookup would add rows to one place from several threads. Nothing is read on the host.

    Example:
        >>> expert_of_rows(torch.zeros(3, 1), torch.tensor([1, 1, 3], dtype=torch.int32)).tolist()
        [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    """
    row = torch.arange(rows.shape[0], dtype=offsets.dtype, device=offsets.device).unsqueeze(1)
    begins = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    return ((row >= begins) & (row < offsets)).to(rows.dtype)


def gpt_oss(
    config: Config,
    *,
    dtype: torch.dtype = torch.float32,
    z_loss: float = 0.0,
    router_z_loss: float = 0.0,
    aux: Literal["microbatch", "step", "pooled"] = "microbatch",
) -> Model:
    """A GPT-OSS.

    Args:
        config: its `Config`.
        dtype: of the parameters.
        z_loss: coefficient of the z-loss on the logits.
        router_z_loss: coefficient of the z-loss on the routers' scores, summed over layers.
        aux: the load-balancing loss, as of `xtf.models.qwen3_moe`.

    Raises:
        ValueError: for a dtype that is not floating, a negative coefficient, or another ``aux``.
    """
    check_dtype(dtype, "gpt_oss")
    check_options("gpt_oss", aux, router_z_loss)
    leaves = Leaves(dtype, config.initializer_range)
    bias, inner = config.attention_bias, config.intermediate_size
    router = Router(config.num_local_experts, config.num_experts_per_tok, bias=True)  # the softmax over the chosen

    def second(i: int) -> Part:
        return mixture(config, i, leaves, router=router, inner=inner, names=_NAMES, own=_experts(config, i, leaves))

    layers = [
        (attention(config, i, leaves, window=window, qkv_bias=bias, output_bias=bias, sinks=True), second(i))
        for i, window in enumerate(windows.by_layer(config.sliding_window, config.layer_types, config.num_hidden_layers))
    ]
    coefficient, every, pooled = config.router_aux_loss_coef, range(len(layers)), aux == "pooled"
    loss = router_loss(every, top_k=router.top_k, coefficient=coefficient, z_coefficient=router_z_loss, pooled=pooled) if layers else None
    return decoder(
        "gpt_oss",
        config,
        layers,
        config.to_hf(),
        dtype=dtype,
        z_loss=z_loss,
        aux=loss,
        aux_scope="step" if aux == "step" else "microbatch",
        active_fraction=router.top_k / router.experts,
    )


def _experts(config: Config, layer: int, leaves: Leaves) -> Experts:
    """Checkpoints have the matrices as (E, in, out), and gate and up by turns."""
    count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size

    def bias(size: int, axis: str) -> ParamSpec:
        return ParamSpec((count, size), leaves.dtype, ("expert", axis), Init.constant(0.0))

    specs = {
        "gate_up": leaves.matrix((count, 2 * inner, hidden), ("expert", "mlp", "embed")),
        "gate_up_bias": bias(2 * inner, "mlp"),
        "down": leaves.matrix((count, hidden, inner), ("expert", "embed", "mlp")),
        "down_bias": bias(hidden, "embed"),
    }
    prefix = f"model.layers.{layer}.mlp.experts"
    sources: dict[str, Source] = {
        "gate_up": Interleaved(Transposed(Named(f"{prefix}.gate_up_proj")), 1),
        "gate_up_bias": Interleaved(Named(f"{prefix}.gate_up_proj_bias"), 1),
        "down": Transposed(Named(f"{prefix}.down_proj")),
        "down_bias": Named(f"{prefix}.down_proj_bias"),
    }

    def compute(grouped_mm: GroupedMM) -> ExpertFn:
        return expert_fn(grouped_mm, config.swiglu_alpha, config.swiglu_limit)

    return Experts(specs, sources, compute)
