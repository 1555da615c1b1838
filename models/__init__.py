"""Model families, one file each: a ``Config``, and a function of the family's name that makes an `xtf.model.Model` of it.

Example:
    >>> preset("smollm2-135m").param_count()
    (134515008, 134515008)
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xtf.checkpoint.folder import CheckpointError, read_config, read_json
from xtf.model import Model
from xtf.models.deepseek_v3 import Config as DeepseekV3Config
from xtf.models.deepseek_v3 import deepseek_v3
from xtf.models.glm4_moe import Config as Glm4MoeConfig
from xtf.models.glm4_moe import glm4_moe
from xtf.models.gpt_oss import Config as GptOssConfig
from xtf.models.gpt_oss import gpt_oss
from xtf.models.llama import Config as LlamaConfig
from xtf.models.llama import llama
from xtf.models.mixtral import Config as MixtralConfig
from xtf.models.mixtral import mixtral
from xtf.models.presets import PRESETS
from xtf.models.qwen3 import Config as Qwen3Config
from xtf.models.qwen3 import qwen3
from xtf.models.qwen3_moe import Config as Qwen3MoeConfig
from xtf.models.qwen3_moe import qwen3_moe

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Family",
    "deepseek_v3",
    "from_hf",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mixtral",
    "preset",
    "qwen3",
    "qwen3_moe",
]


class Family(NamedTuple):
    """How a family reads a ``config.json`` and builds a model."""

    config: type[Any]
    build: Callable[..., Model]


FAMILIES: Mapping[str, Family] = {
    "gpt_oss": Family(GptOssConfig, gpt_oss),
    "llama": Family(LlamaConfig, llama),
    "mixtral": Family(MixtralConfig, mixtral),
    "qwen2": Family(LlamaConfig, llama),
    "qwen3": Family(Qwen3Config, qwen3),
    "qwen3_moe": Family(Qwen3MoeConfig, qwen3_moe),
    "deepseek_v3": Family(DeepseekV3Config, deepseek_v3),
    "kimi_k2": Family(DeepseekV3Config, deepseek_v3),
    "glm4_moe": Family(Glm4MoeConfig, glm4_moe),
}
"""The family of each ``model_type``."""


def from_hf(source: str | Path | Mapping[str, Any], **options: Any) -> Model:
    """The model that a Hugging Face ``config.json`` describes. Its weights are not read.

    Args:
        source: the config itself as a dict, a ``config.json``, or a folder that has one.
        options: passed to the family, as ``dtype=torch.bfloat16`` or ``z_loss=1e-4``.

    Raises:
        ValueError: for a ``model_type`` that is missing or not known, or fields that its family does not support; as
            `xtf.CheckpointError` where there is no ``config.json``, or no valid one.

    Example:
        >>> from_hf(PRESETS["tiny-moe"].to_hf()).family
        'qwen3_moe'
    """
    config = _read(source)
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError(f"model_type is missing in the config: add it; known are {', '.join(FAMILIES)}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; known are {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    return _build(family, family.config.from_hf(config), options)


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
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(PRESETS)}"
        raise ValueError(f"no preset {name!r}; {hint}")
    config = PRESETS[name]
    return _build(next(family for family in FAMILIES.values() if isinstance(config, family.config)), config, options)


def _build(family: Family, config: Any, options: Mapping[str, Any]) -> Model:
    known = [name for name, parameter in inspect.signature(family.build).parameters.items() if parameter.kind == parameter.KEYWORD_ONLY]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{family.build.__name__} does not know the option {', '.join(unknown)}; known are {', '.join(known)}")
    return family.build(config, **options)


def _read(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.suffix == ".json" and not path.is_dir():
        return read_json(path, f"has no {path.name}")
    if path.is_file():
        return read_json(path, "")
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise CheckpointError(
            f"no checkpoint folder at {source}; if it is the name of a model on the Hugging Face hub: xtf downloads nothing. "
            f"Download it (`hf download {source} --local-dir DIR`) and give the folder"
        )
    return read_config(path)
