"""GLM-4.5 (Zhipu AI and Tsinghua University 2025, "GLM-4.5: Agentic, reasoning, and coding foundation models"): grouped-query
attention of which half of each head is rotated, and the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from xtf.model import Model
from xtf.models import hf
from xtf.models.common import SHARED, DecoderConfig, Leaves, attention, check_count, check_dtype, shared_from_hf, shared_to_hf
from xtf.models.decoder import decoder
from xtf.models.deepseek_v3 import routed_from_hf, routed_options, routed_part, sigmoid_router
from xtf.models.routers import Router

_NEEDED = (
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "first_k_dense_replace",
)
_OWN = (
    *_NEEDED,
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
    "attention_bias",
    "use_qk_norm",
    "num_nextn_predict_layers",
)
_KNOWN = (*SHARED, *_OWN, "quantization_config", "num_mtp_layers", "num_local_experts")


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A GLM-4.5; for the common fields see `xtf.models.common.DecoderConfig`.

    Args:
        moe_intermediate_size: the inner size of an expert; ``intermediate_size`` is that of dense layers.
        n_routed_experts: experts of a sparse layer that tokens are routed to.
        num_experts_per_tok: how many of them a token goes to.
        n_shared_experts: experts that every token goes to: one MLP of so many times the inner size.
        first_k_dense_replace: how many layers, from the first, have a dense MLP.
        n_group, topk_group: groups of routed experts, and from how many of them a token's experts are chosen.
        routed_scaling_factor: factor on the weights of a token's experts.
        norm_topk_prob: whether the weights of a token's experts sum to one before the factor.
        partial_rotary_factor: the share of a head, from its first dim, that positions rotate.
        attention_bias: biases on queries, keys and values.
        use_qk_norm: whether each query and key head is normed.
        num_nextn_predict_layers: modules in the checkpoint that predict further tokens. They are read over: this model has none.

    Example:
        >>> config = Config(vocab_size=8, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                 num_key_value_heads=1, head_dim=4, moe_intermediate_size=4, n_routed_experts=4, num_experts_per_tok=2)
        >>> Config.from_hf(config.to_hf()) == config
        True
    """

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    partial_rotary_factor: float = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        hf.check_number("partial_rotary_factor", self.partial_rotary_factor)
        hf.check_integer("head_dim", self.head_dim, 1)
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor!r} of head_dim={self.head_dim} is {self.rotary_dim} dims; "
                "expected a share that is an even number of dims, at least 2"
            )
        super().__post_init__()
        check_count(self, "moe_intermediate_size", 1)
        for name in ("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers"):
            check_count(self, name, 0)
        for name in ("attention_bias", "use_qk_norm"):
            hf.check_flag(name, getattr(self, name))
        sigmoid_router(self)  # refuses what does not fit

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def router(self) -> Router:
        """How tokens are routed."""
        return sigmoid_router(self)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return tuple(range(min(self.first_k_dense_replace, self.num_hidden_layers), self.num_hidden_layers))

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> Config:
        """Read a ``config.json``.

        Raises:
            ValueError: for what is missing or not supported, by name.
        """
        found = hf.read(config, family="glm4_moe", model_types=("glm4_moe",), known=_KNOWN)
        own = routed_from_hf(found, "glm4_moe", _NEEDED, _OWN, {})
        found["head_dim"] = hf.head_size(found, "glm4_moe")
        found.setdefault("rms_norm_eps", 1e-5)
        found.setdefault("max_position_embeddings", 131072)
        stated = [found.pop("partial_rotary_factor", 0.5)]
        for name in ("rope_parameters", "rope_scaling"):
            if name in found:
                found[name] = dict(found[name])
                stated += [found[name].pop("partial_rotary_factor", stated[-1])]
        return Config(**shared_from_hf(found, "glm4_moe"), **own, partial_rotary_factor=stated[-1])

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this model."""
        shared = shared_to_hf(self)
        rope = shared["rope_parameters"] | {"partial_rotary_factor": self.partial_rotary_factor}
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **shared,
            **{name: getattr(self, name) for name in _OWN},
            "rope_parameters": rope,
            "partial_rotary_factor": self.partial_rotary_factor,
        }


def glm4_moe(
    config: Config,
    *,
    dtype: torch.dtype = torch.float32,
    z_loss: float = 0.0,
    router_z_loss: float = 0.0,
    balance_loss: float = 0.0,
    sequence_loss: float = 0.0,
    aux: Literal["microbatch", "step"] = "microbatch",
    bias_update_speed: float = 1e-3,
) -> Model:
    """A GLM-4.5 or GLM-4.5-Air.

    Args:
        config: its `Config`.
        dtype: of the parameters; the corrections of routers are float32.
        z_loss: coefficient of the z-loss on the logits.
        router_z_loss: coefficient of the z-loss on the routers' scores, summed over layers.
        balance_loss: coefficient of the load-balancing loss over the tokens that ``aux`` says, summed over layers.
        sequence_loss: coefficient of the balance inside each document.
        aux: the tokens of ``balance_loss``: those of a ``"microbatch"`` or of a whole ``"step"``.
        bias_update_speed: by how much the corrections of routers change in a step, 0 for never; see `xtf.models.routers.bias_update`.

    Raises:
        ValueError: for a dtype that is not floating, a negative coefficient or speed, or another ``aux``.
    """
    check_dtype(dtype, "glm4_moe")
    leaves, options = Leaves(dtype, config.initializer_range), routed_options("glm4_moe", locals(), config.sparse_layers)
    layers = [
        (
            attention(config, i, leaves, qkv_bias=config.attention_bias, head_norms=config.use_qk_norm),
            routed_part(config, i, leaves, sequence_loss > 0),
        )
        for i in range(config.num_hidden_layers)
    ]
    return decoder("glm4_moe", config, layers, config.to_hf(), dtype=dtype, z_loss=z_loss, **options)
