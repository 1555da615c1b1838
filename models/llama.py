"""Llama (Touvron et al. 2023; Llama 3, 2024), and what is built like it: SmolLM2, and Qwen2 with its biases and windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from xtf.model import Model
from xtf.models import hf, windows
from xtf.models.common import SHARED, DecoderConfig, Leaves, attention, check_count, check_dtype, mlp, shared_from_hf, shared_to_hf
from xtf.models.decoder import decoder

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_KNOWN = {
    "llama": (*SHARED, "attention_bias", "mlp_bias"),
    "qwen2": (*SHARED, "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
}


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A Llama or Qwen2; for the common fields see `xtf.models.common.DecoderConfig`.

    Args:
        model_type: ``"llama"``, or ``"qwen2"``: biases on queries, keys and values, and windows.
        attention_bias: biases on all four projections of attention (``"llama"`` only).
        mlp_bias: biases in the MLP (``"llama"`` only).
        sliding_window: tokens that a token sees, itself included, in layers that have a window (``"qwen2"`` only).
        layer_types: ``"full_attention"`` or ``"sliding_attention"`` for each layer; empty for full attention everywhere.

    Example:
        >>> config = Config(vocab_size=8, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                 num_key_value_heads=1, head_dim=4)
        >>> Config.from_hf(config.to_hf()) == config
        True
    """

    model_type: Literal["llama", "qwen2"] = "llama"
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_type not in _ARCHITECTURES:
            raise ValueError(f"llama got model_type={self.model_type!r}; expected {' or '.join(map(repr, _ARCHITECTURES))}")
        if self.model_type == "qwen2" and (self.attention_bias or self.mlp_bias):
            raise ValueError("qwen2 has biases on queries, keys and values and nowhere else: leave attention_bias and mlp_bias false")
        if self.model_type == "llama" and (self.sliding_window is not None or self.layer_types):
            raise ValueError("llama has no sliding windows: leave sliding_window and layer_types unset, or use model_type='qwen2'")
        for name in ("attention_bias", "mlp_bias"):
            hf.check_flag(name, getattr(self, name))
        if self.sliding_window is not None:
            check_count(self, "sliding_window", 1)
        windows.check(self.sliding_window, self.layer_types, self.num_hidden_layers)

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> Config:
        """Read a ``config.json``.

        Raises:
            ValueError: for what is missing or not supported, by name.
        """
        model_type = config.get("model_type", "llama")
        known = _KNOWN.get(model_type, ())
        found = hf.read(config, family="llama", model_types=tuple(_ARCHITECTURES), known=known)
        heads = hf.required(found, "num_attention_heads", "llama")
        found.setdefault("num_key_value_heads", heads)
        found["head_dim"] = hf.head_size(found, "llama")
        found.setdefault("max_position_embeddings", 2048 if model_type == "llama" else 32768)
        own: dict[str, Any] = {name: found[name] for name in ("attention_bias", "mlp_bias") if name in found}
        if model_type == "qwen2":
            own = windows.from_hf(found, default_first=28)
        return Config(model_type=model_type, **shared_from_hf(found, "llama"), **own)

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this model."""
        if self.model_type == "qwen2":
            own = windows.to_hf(self.sliding_window, self.layer_types, self.num_hidden_layers)
        else:
            own = {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        return {"architectures": [_ARCHITECTURES[self.model_type]], "model_type": self.model_type, **shared_to_hf(self), **own}


def llama(config: Config, *, dtype: torch.dtype = torch.float32, z_loss: float = 0.0) -> Model:
    """A Llama, SmolLM2 or Qwen2.

    Args:
        config: its `Config`.
        dtype: of the parameters.
        z_loss: coefficient of the z-loss on the logits.

    Raises:
        ValueError: for a dtype that is not floating or a negative coefficient.
    """
    check_dtype(dtype, "llama")
    leaves = Leaves(dtype, config.initializer_range)
    qkv_bias = config.attention_bias or config.model_type == "qwen2"
    layers = [
        (
            attention(config, i, leaves, window=window, qkv_bias=qkv_bias, output_bias=config.attention_bias),
            mlp(config, i, leaves, bias=config.mlp_bias),
        )
        for i, window in enumerate(windows.by_layer(config.sliding_window, config.layer_types, config.num_hidden_layers))
    ]
    return decoder("llama", config, layers, config.to_hf(), dtype=dtype, z_loss=z_loss)
