"""Sliding windows, as configs of the Qwen families say them: which layers have one, and how long it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xtf.models import hf


def by_layer(sliding_window: int | None, layer_types: Sequence[str], layers: int) -> tuple[int | None, ...]:
    """The window of each layer."""
    kinds = layer_types or ("full_attention",) * layers
    return tuple(sliding_window if kind == "sliding_attention" else None for kind in kinds)


def check(sliding_window: int | None, layer_types: Sequence[str], layers: int) -> None:
    """Refuse fields on sliding windows that do not fit each other."""
    if layer_types and len(layer_types) != layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for num_hidden_layers={layers}: give one for each layer")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types has {', '.join(map(repr, unknown))}; supported are 'full_attention' and 'sliding_attention'")
    if "sliding_attention" in layer_types and sliding_window is None:
        raise ValueError("layer_types has 'sliding_attention' but sliding_window is not set (or use_sliding_window is false): set both")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}; expected at least 1 token, or null")


def from_hf(found: Mapping[str, Any], default_first: int) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types`` of a Qwen config. Without ``layer_types``, the layers from ``max_window_layers`` on
    have windows, where ``use_sliding_window`` is set."""
    window = found.get("sliding_window", 4096) if found.get("use_sliding_window", False) else None
    kinds, layers = tuple(found.get("layer_types", ())), hf.required(found, "num_hidden_layers", "the family")
    if window is not None and not kinds:
        first = found.get("max_window_layers", default_first)
        kinds = tuple("sliding_attention" if i >= first else "full_attention" for i in range(layers))
    if len(kinds) == layers and set(kinds) <= {"full_attention"}:
        window, kinds = None, ()
    return {"sliding_window": window, "layer_types": kinds}


def to_hf(sliding_window: int | None, layer_types: Sequence[str], layers: int) -> dict[str, Any]:
    """The fields of a Qwen config on sliding windows."""
    return {
        "use_sliding_window": sliding_window is not None,
        "sliding_window": sliding_window,
        "layer_types": list(layer_types) or ["full_attention"] * layers,
        "max_window_layers": layers,
    }
