"""transformers models beside ours: the same weights, and gradients in our tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from xtf import tree
from xtf.checkpoint_map import fill
from xtf.model import Model
from xtf.tree import Tree


def build(hf_config: Mapping[str, Any], dtype: torch.dtype, seed: int = 0) -> Any:
    """The transformers model of a ``config.json`` with random weights, biases (also those of routers) and norms."""
    fields = dict(hf_config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    config._experts_implementation = "eager"  # the grouped product that it prefers knows no float64
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for buffer in _corrections(reference).values():
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return reference.eval()


EXPERTS = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}
"""Families whose names on disk are others: of the block, and of an expert's gate, up and down."""


def _corrections(reference: Any) -> dict[str, Tensor]:
    """The biases of routers that are saved with the weights but have no gradient."""
    return {name: value for name, value in reference.named_buffers() if name.endswith("e_score_correction_bias")}


def on_disk(family: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names under which transformers saves these: in memory the experts of a layer are stacked, on disk they are not."""
    if family == "gpt_oss":  # whose experts are stacked on disk too
        return dict(tensors)
    block, (*gate_up, down) = EXPERTS.get(family, ("mlp", ("gate_proj", "up_proj", "down_proj")))
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        name = name.replace(".mlp.", f".{block}.")
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(value):
                for part, half in zip(gate_up, both.chunk(2), strict=True):
                    found[name.replace("gate_up_proj", f"{e}.{part}.weight")] = half
        elif name.endswith("experts.down_proj"):
            for e, one in enumerate(value):
                found[name.replace("down_proj", f"{e}.{down}.weight")] = one
        else:
            found[name] = value
    return found


def to_tree(model: Model, tensors: Mapping[str, Tensor]) -> Tree:
    """Named tensors as a tree of the structure of ``model``'s parameters."""
    named = on_disk(model.family, tensors)

    def leaf(path: str, spec: Any) -> Tensor:
        out = torch.empty(spec.shape, dtype=spec.dtype)
        ranges = [(0, n) for n in spec.shape]
        fill(model.sources[path], spec.shape, ranges, lambda name, r: named[name][tuple(slice(*x) for x in r)], out)
        return out

    return tree.map_with_path(leaf, model.specs)


def parameters(model: Model, reference: Any) -> Tree:
    """The weights of a transformers model as our tree."""
    return to_tree(model, {name: value.detach() for name, value in reference.named_parameters()} | _corrections(reference))


def gradients(model: Model, reference: Any) -> Tree:
    """The gradients of a transformers model as our tree."""
    missing = {name: torch.zeros_like(value) for name, value in _corrections(reference).items()}
    missing |= {name: torch.zeros_like(value) for name, value in reference.named_parameters() if value.grad is None}
    return to_tree(model, missing | {name: value.grad for name, value in reference.named_parameters() if value.grad is not None})
