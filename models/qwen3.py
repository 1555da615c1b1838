"""Qwen3, dense (Yang et al. 2025): a Llama whose query and key heads are normed before they are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xtf.model import Model
from xtf.models import hf, windows
from xtf.models.common import SHARED, DecoderConfig, Leaves, attention, check_count, check_dtype, mlp, shared_from_hf, shared_to_hf
from xtf.models.decoder import decoder

_KNOWN = (*SHARED, "attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A dense Qwen3; for the common fields see `xtf.models.common.DecoderConfig`.

    Args:
        attention_bias: biases on all four projections of attention.
        sliding_window: tokens that a token sees, itself included, in layers that have a window.
        layer_types: ``"full_attention"`` or ``"sliding_attention"`` for each layer; empty for full attention everywhere.

    Example:
        >>> config = Config(vocab_size=8, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                 num_key_value_heads=1, head_dim=4)
        >>> Config.from_hf(config.to_hf()) == config
        True
    """

    attention_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        hf.check_flag("attention_bias", self.attention_bias)
        if self.sliding_window is not None:
            check_count(self, "sliding_window", 1)
        windows.check(self.sliding_window, self.layer_types, self.num_hidden_layers)

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> Config:
        """Read a ``config.json``.

        Raises:
            ValueError: for what is missing or not supported, by name.
        """
        found = hf.read(config, family="qwen3", model_types=("qwen3",), known=_KNOWN)
        found.setdefault("head_dim", 128)
        found.setdefault("max_position_embeddings", 32768)
        own = {name: found[name] for name in ("attention_bias",) if name in found}
        return Config(**shared_from_hf(found, "qwen3"), **windows.from_hf(found, default_first=28), **own)

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this model."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **shared_to_hf(self),
            **windows.to_hf(self.sliding_window, self.layer_types, self.num_hidden_layers),
            "attention_bias": self.attention_bias,
        }


def qwen3(config: Config, *, dtype: torch.dtype = torch.float32, z_loss: float = 0.0) -> Model:
    """A dense Qwen3.

    Args:
        config: its `Config`.
        dtype: of the parameters.
        z_loss: coefficient of the z-loss on the logits.

    Raises:
        ValueError: for a dtype that is not floating or a negative coefficient.
    """
    check_dtype(dtype, "qwen3")
    leaves = Leaves(dtype, config.initializer_range)
    bias = config.attention_bias
    layers = [
        (attention(config, i, leaves, window=window, qkv_bias=bias, output_bias=bias, head_norms=True), mlp(config, i, leaves))
        for i, window in enumerate(windows.by_layer(config.sliding_window, config.layer_types, config.num_hidden_layers))
    ]
    return decoder("qwen3", config, layers, config.to_hf(), dtype=dtype, z_loss=z_loss)
