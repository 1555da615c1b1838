"""Mixtral (Jiang et al. 2024): a Llama whose MLPs are all mixtures of experts, with the best scores of a token made to sum to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from xtf.model import Model
from xtf.models import hf
from xtf.models.common import SHARED, DecoderConfig, Leaves, attention, check_count, check_dtype, shared_from_hf, shared_to_hf
from xtf.models.decoder import decoder
from xtf.models.moe import MixtureNames, check_experts, check_options, mixture
from xtf.models.routers import Router, router_loss

_OWN = ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef", "sliding_window")
_NAMES = MixtureNames("block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A Mixtral; for the common fields see `xtf.models.common.DecoderConfig`.

    Args:
        num_local_experts: experts of every layer, each of inner size ``intermediate_size``.
        num_experts_per_tok: experts that a token goes to.
        router_aux_loss_coef: coefficient of the load-balancing loss. transformers adds it only where
            ``output_router_logits`` is set; here it always counts.
        sliding_window: tokens that a token sees, itself included, in every layer; ``None`` for all of its document.

    Example:
        >>> config = Config(vocab_size=8, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                 num_key_value_heads=1, head_dim=4, num_local_experts=4, num_experts_per_tok=2)
        >>> Config.from_hf(config.to_hf()) == config
        True
    """

    num_local_experts: int
    num_experts_per_tok: int
    router_aux_loss_coef: float = 0.001
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_local_experts", self.num_local_experts, self.num_experts_per_tok, self.router_aux_loss_coef)
        if self.sliding_window is not None:
            check_count(self, "sliding_window", 1)

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> Config:
        """Read a ``config.json``.

        Raises:
            ValueError: for what is missing or not supported, by name.
        """
        found = hf.read(config, family="mixtral", model_types=("mixtral",), known=(*SHARED, *_OWN))
        found["head_dim"] = hf.head_size(found, "mixtral")
        defaults = {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
        found = defaults | found
        return Config(**shared_from_hf(found, "mixtral"), **{name: found[name] for name in _OWN if name in found})

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this model."""
        own = {name: getattr(self, name) for name in _OWN}
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **shared_to_hf(self), **own}


def mixtral(
    config: Config,
    *,
    dtype: torch.dtype = torch.float32,
    z_loss: float = 0.0,
    router_z_loss: float = 0.0,
    aux: Literal["microbatch", "step", "pooled"] = "microbatch",
) -> Model:
    """A Mixtral.

    Args:
        config: its `Config`.
        dtype: of the parameters.
        z_loss: coefficient of the z-loss on the logits.
        router_z_loss: coefficient of the z-loss on the routers' scores, summed over layers.
        aux: the load-balancing loss, as of `xtf.models.qwen3_moe`.

    Raises:
        ValueError: for a dtype that is not floating, a negative coefficient, or another ``aux``.
    """
    check_dtype(dtype, "mixtral")
    check_options("mixtral", aux, router_z_loss)
    leaves = Leaves(dtype, config.initializer_range)
    router = Router(config.num_local_experts, config.num_experts_per_tok)
    layers = [
        (
            attention(config, i, leaves, window=config.sliding_window),
            mixture(config, i, leaves, router=router, inner=config.intermediate_size, names=_NAMES),
        )
        for i in range(config.num_hidden_layers)
    ]
    coefficient, every, pooled = config.router_aux_loss_coef, range(len(layers)), aux == "pooled"
    loss = router_loss(every, top_k=router.top_k, coefficient=coefficient, z_coefficient=router_z_loss, pooled=pooled) if layers else None
    return decoder(
        "mixtral",
        config,
        layers,
        config.to_hf(),
        dtype=dtype,
        z_loss=z_loss,
        aux=loss,
        aux_scope="step" if aux == "step" else "microbatch",
        active_fraction=router.top_k / router.experts,
    )
