"""What is computed: the same for every contender."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import xtf
from xtf.checkpoint.folder import CONFIG, read_json
from xtf.model import Model

ONE, MIXED = "one", "mixed"
"""Names of ways to lay documents: one of all tokens; lengths of a log-normal distribution."""


@dataclass(frozen=True)
class Workload:
    """A training step: forward, backward and AdamW.

    Args:
        config: the fields of a Hugging Face ``config.json``.
        lengths: tokens of each document of a step; they are packed into one row.
        dtype: of parameters and computation, as ``"float32"``.
        device: as ``"cpu"`` or ``"cuda"``.
        threads: torch's on a CPU.
        seed: of weights and tokens.
        weights: a checkpoint folder; ``None`` takes initial values.
    """

    config: Mapping[str, Any]
    lengths: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    seed: int = 0
    weights: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return sum(self.lengths)

    def model(self) -> Model:
        """The model as xtf has it."""
        return xtf.models.from_hf(dict(self.config), dtype=getattr(torch, self.dtype))

    def batch(self) -> dict[str, Tensor]:
        """``input_ids``, ``labels`` and ``document_ids``, each (1, tokens) int64 on the workload's device; the same for one seed."""
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(int(self.config["vocab_size"]), (1, self.tokens), generator=generator)
        documents = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))[None]
        return {name: value.to(self.device) for name, value in {"input_ids": ids, "labels": ids, "document_ids": documents}.items()}

    def json(self) -> dict[str, Any]:
        """As JSON values; `Workload.of` is the inverse."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Workload:
        """A workload from what `json` gave."""
        lengths: Any = values["lengths"]
        return Workload(**(dict(values) | {"lengths": tuple(lengths)}))  # pyright: ignore[reportArgumentType]


def document_lengths(text: str, tokens: int, seed: int) -> tuple[int, ...]:
    """Tokens of each document.

    Args:
        text: ``"one"`` for one document; ``"mixed"`` for lengths of a log-normal distribution with a median of an eighth of all (at most
            512) and a sigma of 1; a number for documents of so many tokens, the last of what is left.
        tokens: of all documents together.
        seed: of the distribution.

    Raises:
        ValueError: for another text, or less than two tokens.

    Example:
        >>> document_lengths("200", 512, 0), sum(document_lengths("mixed", 512, 0))
        ((200, 200, 112), 512)
    """
    if tokens < 2:
        raise ValueError(f"--tokens is {tokens}, expected at least 2: the first token of a document is never a target")
    if text == ONE:
        return (tokens,)
    if text == MIXED:
        rng, found = np.random.default_rng(seed), list[int]()
        while sum(found) < tokens:
            found.append(min(max(2, round(rng.lognormal(math.log(min(512, tokens / 8)), 1.0))), tokens - sum(found)))
        return tuple(found)
    if not text.isdigit() or int(text) < 2:
        raise ValueError(f"--documents is {text!r}, expected {ONE!r}, {MIXED!r}, or the tokens of each document, as 512")
    each = int(text)
    return (each,) * (tokens // each) + ((tokens % each,) if tokens % each else ())


SHAPES: dict[str, dict[str, Any]] = {
    "small-moe": {"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 32, "num_experts": 16, "vocab_size": 4096},
    "medium-moe": {"hidden_size": 512, "num_hidden_layers": 8, "head_dim": 64, "num_experts": 32, "vocab_size": 8192},
}
"""Two mixtures for CPUs: Qwen3-MoE with 8 query and 4 key heads, and experts of width 256 of which each token has 4."""

_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}

FLAGS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_width": ("moe_intermediate_size",),
    "vocab": ("vocab_size",),
}
"""For each flag of a shape, the fields of a config that it may mean; the first that the config has is set."""


def shape_config(model: str, overrides: Mapping[str, int | None]) -> dict[str, Any]:
    """The config of a shape.

    Args:
        model: a name in `SHAPES`, a preset (`xtf.models.PRESETS`), a checkpoint folder, or a ``config.json``.
        overrides: values of `FLAGS`; ``None`` leaves what the model has.

    Raises:
        ValueError: for a model that is none of these, a value less than 1, or a flag that the family has no field for.

    Example:
        >>> config = shape_config("small-moe", {"layers": 2})
        >>> config["hidden_size"], config["num_hidden_layers"]
        (256, 2)
    """
    if model in SHAPES:
        config = _MOE | SHAPES[model]
    elif Path(model).exists():
        file = Path(model) / CONFIG if Path(model).is_dir() else Path(model)
        config = read_json(file, "is no model without it")
    elif model in xtf.models.PRESETS:
        config = dict(xtf.models.preset(model).hf_config)
    else:
        raise ValueError(f"--model {model} is no shape ({', '.join(SHAPES)}), no preset ({', '.join(xtf.models.PRESETS)}) and no folder")
    for flag, value in overrides.items():
        if value is None:
            continue
        if value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} is {value}, expected at least 1")
        field = next((name for name in FLAGS[flag] if name in config), None)
        if field is None:
            raise ValueError(f"--{flag.replace('_', '-')}: a {config.get('model_type')} has none of {', '.join(FLAGS[flag])}")
        config[field] = value
    return config
