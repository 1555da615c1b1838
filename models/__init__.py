"""Model families, one file each: a ``Config``, and a function of the family's name that makes an `xtf.model.Model` of it.

Example:
    >>> preset("smollm2-135m").param_count()
    (134515008, 134515008)
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xtf.model import Model
from xtf.models.llama import Config as LlamaConfig
from xtf.models.llama import llama
from xtf.models.presets import PRESETS
from xtf.models.qwen3 import Config as Qwen3Config
from xtf.models.qwen3 import qwen3
from xtf.models.qwen3_moe import Config as Qwen3MoeConfig
from xtf.models.qwen3_moe import qwen3_moe

__all__ = ["FAMILIES", "PRESETS", "Family", "from_hf", "llama", "preset", "qwen3", "qwen3_moe"]


class Family(NamedTuple):
    """How a family reads a ``config.json`` and builds a model."""

    config: type[Any]
    build: Callable[..., Model]


FAMILIES: Mapping[str, Family] = {
    "llama": Family(LlamaConfig, llama),
    "qwen2": Family(LlamaConfig, llama),
    "qwen3": Family(Qwen3Config, qwen3),
    "qwen3_moe": Family(Qwen3MoeConfig, qwen3_moe),
}
"""The family of each ``model_type``."""


def from_hf(source: str | Path | Mapping[str, Any], **options: Any) -> Model:
    """The model that a Hugging Face ``config.json`` describes. Its weights are not read.

    Args:
        source: the config itself as a dict, a ``config.json``, or a folder that has one.
        options: passed to the family, as ``dtype=torch.bfloat16`` or ``z_loss=1e-4``.

    Raises:
        ValueError: for a ``model_type`` that is not known, or fields that its family does not support.
        FileNotFoundError: where there is no ``config.json``.

    Example:
        >>> from_hf(PRESETS["tiny-moe"].to_hf()).family
        'qwen3_moe'
    """
    config = _read(source)
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; known are {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    return family.build(family.config.from_hf(config), **options)


def preset(name: str, **options: Any) -> Model:
    """A published model by name, or the ``"tiny-moe"`` of the examples.

    Args:
        name: one of `PRESETS`.
        options: passed to the family.

    Raises:
        ValueError: for an unknown name; it shows those that are near.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, cutoff=0.4)
        hint = f"near are {', '.join(near)}" if near else f"known are {', '.join(PRESETS)}"
        raise ValueError(f"no preset {name!r}; {hint}")
    config = PRESETS[name]
    return next(family.build for family in FAMILIES.values() if isinstance(config, family.config))(config, **options)


def _read(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    return json.loads((path / "config.json" if path.is_dir() else path).read_text())
