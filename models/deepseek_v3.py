"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, and experts chosen by sigmoid scores within groups, beside shared ones.

Kimi-K2 (Moonshot AI 2025) has the same architecture with other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from xtf.model import Model
from xtf.models import hf
from xtf.models.common import SHARED, Leaves, Part, check_count, check_dtype, mlp, shared_from_hf, shared_to_hf
from xtf.models.decoder import decoder
from xtf.models.further import further_constants, further_layer
from xtf.models.latent import LatentConfig, latent_attention
from xtf.models.moe import mixture
from xtf.models.routers import Router, bias_update, document_constants, router_loss

_NEEDED = (
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_OWN = (*_NEEDED, "norm_topk_prob", "attention_bias", "rope_interleave", "num_nextn_predict_layers")
_WITHOUT_EFFECT = ("aux_loss_alpha", "seq_aux", "ep_size", "quantization_config")  # of its original code, or of how weights are stored
_ALWAYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_KNOWN = (*SHARED, *_OWN, *_WITHOUT_EFFECT, *_ALWAYS, "q_lora_rank", "qk_head_dim", "num_mtp_layers", "num_local_experts")


@dataclass(frozen=True, kw_only=True)
class Config(LatentConfig):
    """A DeepSeek-V3; for the other fields see `xtf.models.latent.LatentConfig` and `xtf.models.common.DecoderConfig`.

    Args:
        moe_intermediate_size: the inner size of an expert; ``intermediate_size`` is that of dense layers.
        n_routed_experts: experts of a sparse layer that tokens are routed to.
        num_experts_per_tok: how many of them a token goes to.
        n_shared_experts: experts that every token goes to: one MLP of so many times the inner size.
        n_group, topk_group: groups of routed experts, and from how many of them a token's experts are chosen.
        routed_scaling_factor: factor on the weights of a token's experts.
        first_k_dense_replace: how many layers, from the first, have a dense MLP.
        norm_topk_prob: whether the weights of a token's experts sum to one before the factor.
        num_nextn_predict_layers: modules in the checkpoint that predict further tokens. They are read over, unless the model is built with
            an ``mtp_loss``.
        model_type: ``"deepseek_v3"`` or ``"kimi_k2"``, which ``config.json`` says.

    Example:
        >>> config = Config(vocab_size=8, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                 num_key_value_heads=2, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4,
        ...                 moe_intermediate_size=4, n_routed_experts=4, num_experts_per_tok=2)
        >>> Config.from_hf(config.to_hf()) == config
        True
    """

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 0
    model_type: str = field(default="deepseek_v3", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "moe_intermediate_size", 1)
        for name in ("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers"):
            check_count(self, name, 0)
        if self.model_type not in ("deepseek_v3", "kimi_k2"):
            raise ValueError(f"model_type={self.model_type!r}; expected 'deepseek_v3' or 'kimi_k2'")
        sigmoid_router(self)  # refuses what does not fit

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
        found = hf.read(config, family="deepseek_v3", model_types=("deepseek_v3", "kimi_k2"), known=_KNOWN)
        own = routed_from_hf(found, "deepseek_v3", _NEEDED, _OWN, _ALWAYS)
        if "q_lora_rank" not in config:
            raise ValueError("deepseek_v3 needs the config field 'q_lora_rank', which is missing: give a size, or null for none")
        found["head_dim"] = own["qk_rope_head_dim"] if found.get("head_dim") is None else found["head_dim"]
        found.setdefault("num_key_value_heads", found.get("num_attention_heads"))
        found.setdefault("max_position_embeddings", 4096)
        both = own["qk_nope_head_dim"] + own["qk_rope_head_dim"]
        if found.get("qk_head_dim", both) != both:
            raise ValueError(f"qk_head_dim={found['qk_head_dim']!r} must be qk_nope_head_dim + qk_rope_head_dim = {both}: leave it out")
        rope: Mapping[str, Any] = found.get("rope_scaling") or found.get("rope_parameters") or {}
        shared = shared_from_hf(found, "deepseek_v3")
        if rope.get("mscale_all_dim") and shared["rope"].kind not in ("default", "yarn"):
            raise ValueError(f"deepseek_v3 does not support mscale_all_dim={rope['mscale_all_dim']!r} of rope_type {shared['rope'].kind!r}")
        model_type = config.get("model_type", "deepseek_v3")
        return Config(**shared, **own, q_lora_rank=found.get("q_lora_rank"), model_type=model_type)

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this model."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": self.model_type,
            **shared_to_hf(self),
            **{name: getattr(self, name) for name in _OWN},
            "q_lora_rank": self.q_lora_rank,
            **_ALWAYS,
        }


def sigmoid_router(config: Any) -> Router:
    """The router that the fields of a DeepSeek-V3 or GLM-4.5 config describe.

    Raises:
        ValueError: for numbers that do not fit each other.
    """
    for name in ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"):
        check_count(config, name, 1)
    hf.check_flag("norm_topk_prob", config.norm_topk_prob)
    hf.check_number("routed_scaling_factor", config.routed_scaling_factor)
    experts, groups = config.n_routed_experts, config.n_group
    if config.num_experts_per_tok > experts:
        raise ValueError(f"num_experts_per_tok={config.num_experts_per_tok} is more than n_routed_experts={experts}")
    if config.topk_group > groups:
        raise ValueError(f"topk_group={config.topk_group} is more than n_group={groups}")
    if groups > 1 and (experts % groups or experts // groups < 2):
        raise ValueError(f"n_group={groups} must cut n_routed_experts={experts} into equal groups of at least 2")
    return Router(
        experts,
        config.num_experts_per_tok,
        "sigmoid",
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        groups=groups,
        groups_kept=config.topk_group,
        correction=True,
    )


def routed_from_hf(
    found: dict[str, Any], family: str, needed: tuple[str, ...], own: tuple[str, ...], always: Mapping[str, Any]
) -> dict[str, Any]:
    """The family's own fields, from those that `xtf.models.hf.read` found.

    Raises:
        ValueError: for a field that is missing, or one that is supported with one value only and has another.
    """
    for name, theirs in (("n_routed_experts", "num_local_experts"), ("num_nextn_predict_layers", "num_mtp_layers")):
        if theirs in found:  # transformers' name for it
            found.setdefault(name, found[theirs])
    for name in needed:
        hf.required(found, name, family)
    for name, value in always.items():
        if found.get(name, value) != value:
            raise ValueError(f"{family} does not support {name}={found[name]!r} in the config; only {value!r} is supported")
    return {name: found[name] for name in own if name in found}


def deepseek_v3(
    config: Config,
    *,
    dtype: torch.dtype = torch.float32,
    z_loss: float = 0.0,
    router_z_loss: float = 0.0,
    balance_loss: float = 0.0,
    sequence_loss: float = 0.0,
    aux: Literal["microbatch", "step"] = "microbatch",
    bias_update_speed: float = 1e-3,
    mtp_loss: float = 0.0,
) -> Model:
    """A DeepSeek-V3 or Kimi-K2.

    Args:
        config: its `Config`.
        dtype: of the parameters; the corrections of routers are float32.
        z_loss: coefficient of the z-loss on the logits.
        router_z_loss: coefficient of the z-loss on the routers' scores, summed over layers.
        balance_loss: coefficient of the load-balancing loss over the tokens that ``aux`` says, summed over layers.
        sequence_loss: coefficient of the balance inside each document, which DeepSeek-V3 calls complementary and weighs by 1e-4.
        aux: the tokens of ``balance_loss``: those of a ``"microbatch"`` or of a whole ``"step"``.
        bias_update_speed: by how much the corrections of routers change in a step, 0 for never; see `xtf.models.routers.bias_update`.
        mtp_loss: weight of the cross-entropy of the token after the next (DeepSeek-V3 has 0.3, later 0.1). Above 0 the model has the layer
            that predicts it, as its last; it counts in ``loss`` and in the losses of routers, not in ``cross_entropy``. See
            `xtf.models.further`.

    Raises:
        ValueError: for a dtype that is not floating, a negative coefficient or speed, another ``aux``, or an ``mtp_loss`` of a config that
            has no layer for it, or more than one.
    """
    check_dtype(dtype, "deepseek_v3")
    if not mtp_loss >= 0:
        raise ValueError(f"deepseek_v3 got mtp_loss={mtp_loss!r}; expected a number of at least 0")
    if mtp_loss and config.num_nextn_predict_layers != 1:
        raise ValueError(
            f"deepseek_v3 got mtp_loss={mtp_loss!r} for a config with num_nextn_predict_layers={config.num_nextn_predict_layers}: "
            "one such layer is supported, set it to 1"
        )
    leaves, last = Leaves(dtype, config.initializer_range), config.num_hidden_layers
    sparse = (*config.sparse_layers, *((last,) if mtp_loss else ()))
    options = routed_options("deepseek_v3", locals(), sparse)
    layers = [
        (latent_attention(config, i, leaves), routed_part(config, i, leaves, sequence_loss > 0)) for i in range(config.num_hidden_layers)
    ]
    if mtp_loss:
        block = latent_attention(config, last, leaves), routed_part(config, last, leaves, sequence_loss > 0)
        ours, theirs = further_constants(mtp_loss), options.pop("constants")
        options["further"] = further_layer(config, last, leaves, block)
        options["constants"] = lambda packed: ours(packed) | (theirs(packed) if theirs is not None else {})
    return decoder("deepseek_v3", config, layers, config.to_hf(), dtype=dtype, z_loss=z_loss, **options)


def routed_part(config: Any, layer: int, leaves: Leaves, documents: bool) -> Part:
    """The second half of a layer: a dense MLP in the first layers, then a mixture with shared experts."""
    if layer < config.first_k_dense_replace and layer < config.num_hidden_layers:
        return mlp(config, layer, leaves)
    inner = config.moe_intermediate_size
    shared = config.n_shared_experts * inner
    return mixture(config, layer, leaves, router=config.router, inner=inner, shared=shared, documents=documents)


def routed_options(family: str, given: Mapping[str, Any], sparse: Sequence[int]) -> dict[str, Any]:
    """What `xtf.models.decoder.decoder` is told about the routers of the layers ``sparse``, from a family function's arguments.

    Raises:
        ValueError: for a negative coefficient or speed, or an unknown ``aux``.
    """
    config, aux = given["config"], given["aux"]
    if aux not in ("microbatch", "step"):
        raise ValueError(f"{family} got aux={aux!r}; expected 'microbatch' or 'step'")
    for name in ("router_z_loss", "balance_loss", "sequence_loss"):
        if not given[name] >= 0:
            raise ValueError(f"{family} got {name}={given[name]!r}; expected a number of at least 0")
    router = config.router
    update = bias_update(sparse, given["bias_update_speed"])
    if not sparse:
        return {}
    loss = router_loss(
        sparse,
        top_k=router.top_k,
        coefficient=given["balance_loss"],
        z_coefficient=given["router_z_loss"],
        sequence_coefficient=given["sequence_loss"],
    )
    return {
        "aux": loss,
        "aux_scope": aux,
        "update": update,
        "active_fraction": router.top_k / router.experts,
        "constants": document_constants if given["sequence_loss"] else None,
    }
