"""Qwen3-MoE (Yang et al. 2025): Qwen3 with a dropless mixture of experts in place of the MLP of some or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from xtf.model import Model
from xtf.models import hf
from xtf.models.common import SHARED, DecoderConfig, Leaves, Part, attention, check_count, check_dtype, mlp, shared_from_hf, shared_to_hf
from xtf.models.decoder import decoder
from xtf.models.moe import check_experts, check_options, mixture
from xtf.models.routers import Router, document_constants, router_loss

_OWN = (
    "attention_bias",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "norm_topk_prob",
    "decoder_sparse_step",
    "router_aux_loss_coef",
)
_KNOWN = (
    *SHARED,
    *_OWN,
    "num_experts",
    "num_local_experts",
    "mlp_only_layers",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
)


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A Qwen3-MoE; for the common fields see `xtf.models.common.DecoderConfig`.

    Args:
        moe_intermediate_size: the inner size of an expert; ``intermediate_size`` is that of dense layers.
        num_experts: experts of a sparse layer.
        num_experts_per_tok: experts that a token goes to.
        norm_topk_prob: whether the weights of a token's experts sum to one.
        decoder_sparse_step: layer i is sparse if (i + 1) is a multiple of it and i is not in ``mlp_only_layers``.
        mlp_only_layers: numbers of layers that are dense.
        router_aux_loss_coef: coefficient of the load-balancing loss. transformers adds it only where
            ``output_router_logits`` is set; here it always counts.
        attention_bias: biases on all four projections of attention.
        sliding_window: tokens that a token sees, itself included, in every layer; ``None`` for all of its document.

    Example:
        >>> config = Config(vocab_size=8, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                 num_key_value_heads=1, head_dim=4, moe_intermediate_size=4, num_experts=4, num_experts_per_tok=2)
        >>> Config.from_hf(config.to_hf()) == config
        True
    """

    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.001
    attention_bias: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("moe_intermediate_size", "decoder_sparse_step"):
            check_count(self, name, 1)
        check_experts("num_experts", self.num_experts, self.num_experts_per_tok, self.router_aux_loss_coef)
        for name in ("norm_topk_prob", "attention_bias"):
            hf.check_flag(name, getattr(self, name))
        for layer in self.mlp_only_layers:
            hf.check_integer("mlp_only_layers", layer)
        outside = [i for i in self.mlp_only_layers if not 0 <= i < self.num_hidden_layers]
        if outside:
            raise ValueError(f"mlp_only_layers has {outside}; layers are numbered 0 to {self.num_hidden_layers - 1}")
        if self.sliding_window is not None:
            check_count(self, "sliding_window", 1)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        step = self.decoder_sparse_step
        return tuple(i for i in range(self.num_hidden_layers) if (i + 1) % step == 0 and i not in self.mlp_only_layers)

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> Config:
        """Read a ``config.json``.

        Raises:
            ValueError: for what is missing or not supported, by name.
        """
        found = hf.read(config, family="qwen3_moe", model_types=("qwen3_moe",), known=_KNOWN)
        found["head_dim"] = hf.head_size(found, "qwen3_moe")
        found.setdefault("max_position_embeddings", 32768)
        if "num_local_experts" in found:  # transformers 5 writes this name
            found.setdefault("num_experts", found["num_local_experts"])
        own = {name: found[name] for name in _OWN if name in found}
        for name in ("moe_intermediate_size", "num_experts", "num_experts_per_tok"):
            hf.required(found, name, "qwen3_moe")
        return Config(
            **shared_from_hf(found, "qwen3_moe"),
            **own,
            num_experts=found["num_experts"],
            mlp_only_layers=tuple(found.get("mlp_only_layers", ())),
            sliding_window=found.get("sliding_window", 4096) if found.get("use_sliding_window", False) else None,
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this model."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **shared_to_hf(self),
            **{name: getattr(self, name) for name in _OWN},
            "num_experts": self.num_experts,
            "mlp_only_layers": list(self.mlp_only_layers),
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window": self.sliding_window,
        }


def qwen3_moe(
    config: Config,
    *,
    dtype: torch.dtype = torch.float32,
    z_loss: float = 0.0,
    router_z_loss: float = 0.0,
    aux: Literal["microbatch", "step", "pooled"] = "microbatch",
    sequence_loss: float = 0.0,
) -> Model:
    """A Qwen3-MoE.

    Args:
        config: its `Config`.
        dtype: of the parameters.
        z_loss: coefficient of the z-loss on the logits.
        router_z_loss: coefficient of the z-loss on the routers' scores, summed over layers.
        aux: the load-balancing loss: over the tokens of a ``"microbatch"``, of a whole ``"step"``, or ``"pooled"``, transformers'
            formula over a micro-batch, with all layers taken together before the product. See `xtf.models.routers.router_loss`.
        sequence_loss: coefficient of the balance inside each document (DeepSeek-V3 2024), summed over layers.

    Raises:
        ValueError: for a dtype that is not floating, a negative coefficient, or another ``aux``.
    """
    check_dtype(dtype, "qwen3_moe")
    check_options("qwen3_moe", aux, router_z_loss)
    if not sequence_loss >= 0:
        raise ValueError(f"qwen3_moe got sequence_loss={sequence_loss!r}; expected a number of at least 0")
    leaves = Leaves(dtype, config.initializer_range)
    bias, sparse, top_k = config.attention_bias, config.sparse_layers, config.num_experts_per_tok
    router = Router(config.num_experts, top_k, normalize=config.norm_topk_prob)

    def second(i: int) -> Part:
        if i not in sparse:
            return mlp(config, i, leaves)
        return mixture(config, i, leaves, router=router, inner=config.moe_intermediate_size, documents=sequence_loss > 0)

    window = config.sliding_window
    layers = [
        (attention(config, i, leaves, window=window, qkv_bias=bias, output_bias=bias, head_norms=True), second(i))
        for i in range(config.num_hidden_layers)
    ]
    loss = None
    if sparse:
        loss = router_loss(
            sparse,
            top_k=top_k,
            coefficient=config.router_aux_loss_coef,
            z_coefficient=router_z_loss,
            pooled=aux == "pooled",
            sequence_coefficient=sequence_loss,
        )
    return decoder(
        "qwen3_moe",
        config,
        layers,
        config.to_hf(),
        dtype=dtype,
        z_loss=z_loss,
        aux=loss,
        aux_scope="step" if aux == "step" else "microbatch",
        active_fraction=top_k / config.num_experts,
        constants=document_constants if sequence_loss else None,
    )
