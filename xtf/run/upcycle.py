"""``xtf upcycle``: a mixture of experts out of a dense checkpoint (Komatsuzaki et al. 2023, "Sparse upcycling").

Every expert is a copy of the MLP, routers are random, and the weights of a token's experts sum to one: before training, the
mixture computes what the dense model does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import tyro
from torch import Tensor

import xtf
from xtf import tree
from xtf.checkpoint.writing import check_target, save_leaves
from xtf.model import Model
from xtf.models import FAMILIES
from xtf.models.common import DecoderConfig
from xtf.models.glm4_moe import Config as Glm4Moe
from xtf.models.llama import Config as Llama
from xtf.models.mixtral import Config as Mixtral
from xtf.models.qwen3 import Config as Qwen3
from xtf.models.qwen3_moe import Config as Qwen3Moe
from xtf.run.export import leaf_by_leaf, parse_bytes
from xtf.run.source import DtypeName, Prefer, find, has_tokenizer, note, stored_dtype
from xtf.spec import ParamSpec
from xtf.tree import Path as Leaf


@dataclass(frozen=True)
class UpcycleOptions:
    """Make a mixture of experts of a dense checkpoint: every expert a copy of its MLP, routers random, the same logits."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DENSE")]
    """The folder of a run, a training checkpoint, or a Hugging Face folder, of a dense model."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder to write: new, empty, or a checkpoint, which is replaced."""
    experts: int = 8
    """Experts of each layer."""
    top_k: int = 2
    """Experts that a token goes to."""
    seed: int = 0
    """Of the routers' weights."""
    dtype: DtypeName | None = None
    """Of the weights. By default that of the source."""
    shard_size: str = "5GB"
    """The most that one file holds, as 5GB or 500MB (powers of ten)."""
    prefer: Prefer = "best"
    """Which checkpoint of a run's folder: the one of the lowest held-out loss, or the last."""


class Target(NamedTuple):
    """What a dense family becomes.

    Args:
        family: the ``model_type`` of the mixture.
        config: ``config(dense config, experts, top_k)`` gives its ``Config``, or raises a `ValueError` where the dense model has
            what the family cannot express.
    """

    family: str
    config: Callable[[Any, int, int], DecoderConfig]


def run(options: UpcycleOptions) -> Path:
    """Write the mixture, with no more in memory than a group of the dense model's leaves, as `xtf export` reads it.

    Returns:
        The folder that was written.

    Raises:
        ValueError: for a source that is no checkpoint of a dense model in `TARGETS`, counts that do not fit each other, a size that
            is none, or a folder that must not be overwritten.
        OSError: if it cannot be written; what stood there before is unchanged.
    """
    if options.top_k < 1:
        raise ValueError(f"--top-k is {options.top_k}, expected at least 1: the experts that a token goes to")
    if options.experts < options.top_k:
        raise ValueError(f"--experts is {options.experts}, fewer than --top-k {options.top_k}: a token goes to so many different experts")
    shard_bytes = parse_bytes(options.shard_size)
    folder = find(options.source, options.prefer)
    if options.out.resolve() == folder.resolve():
        raise ValueError(f"OUT {options.out} is the dense checkpoint itself: give another folder")
    if folder != options.source:
        note(f"checkpoint {folder}")
    tokenizer = folder if has_tokenizer(folder) else None
    check_target(options.out, tokenizer)
    dtype = getattr(torch, options.dtype or stored_dtype(folder))
    dense = xtf.models.from_hf(folder, dtype=dtype)
    sparse = mixture_of(dense, options.experts, options.top_k, dtype=dtype)
    if tokenizer is None:
        note(f"{folder} has no tokenizer: the mixture has none either")
    get_leaf = upcycled(dense, sparse, leaf_by_leaf(dense, folder), options.seed)
    save_leaves(sparse, get_leaf, options.out, shard_bytes=shard_bytes, tokenizer_from=tokenizer)
    total, active = sparse.param_count()
    note(f"wrote {options.out}: {sparse.family}, {options.experts} experts, {total:,} parameters, {active:,} of them for a token")
    return options.out


def mixture_of(dense: Model, experts: int, top_k: int, *, dtype: torch.dtype = torch.float32) -> Model:
    """The mixture of experts that a dense model becomes.

    Args:
        dense: a model of a family in `TARGETS`.
        experts: experts of each layer, of the size of the MLP.
        top_k: experts that a token goes to.
        dtype: of the parameters.

    Raises:
        ValueError: for another family, or a dense model with what the mixture cannot express.

    Example:
        >>> mixture_of(xtf.models.preset("qwen3-0.6b"), 8, 2).family
        'qwen3_moe'
    """
    model_type = dense.hf_config["model_type"]
    if model_type not in TARGETS:
        known = ", ".join(f"{name} (to {target.family})" for name, target in TARGETS.items())
        raise ValueError(f"a {model_type} cannot be made a mixture of experts; dense models that can: {known}")
    target = TARGETS[model_type]
    return FAMILIES[target.family].build(target.config(dense.config, experts, top_k), dtype=dtype)


def upcycled(dense: Model, sparse: Model, dense_leaf: Callable[[Leaf], Tensor], seed: int) -> Callable[[Leaf], Tensor]:
    """``get_leaf(path)`` of the mixture for `xtf.checkpoint.save_leaves`. Experts are one MLP, seen ``experts`` times.

    Args:
        dense, sparse: the models.
        dense_leaf: gives a leaf of the dense model; each is asked for once, in order but for those of one layer.
        seed: of the routers.
    """
    specs: Mapping[Leaf, ParamSpec] = tree.items(sparse.specs)
    known = set(tree.paths(dense.specs))

    def get_leaf(path: Leaf) -> Tensor:
        if path in known:
            return dense_leaf(path)
        layer, _, leaf = path.rpartition(".moe.")
        mlp = f"{layer}.mlp"
        match leaf:
            case "norm":
                return dense_leaf(f"{mlp}.norm")
            case "gate_up":
                return torch.cat([dense_leaf(f"{mlp}.gate"), dense_leaf(f"{mlp}.up")]).expand(specs[path].shape)
            case "down":
                return dense_leaf(f"{mlp}.down").expand(specs[path].shape)
            case _:  # the router's own: random weights, corrections of 0
                return specs[path].initial(seed, path)

    return get_leaf


def _common(config: DecoderConfig) -> dict[str, Any]:
    """The fields that every family has."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(DecoderConfig)}


def _refuse(family: str, field: str, value: object, why: str) -> ValueError:
    return ValueError(f"the dense model has {field}={value!r}, and a {family} {why}: it cannot be made a mixture without changing it")


def _qwen3(config: Qwen3, experts: int, top_k: int) -> DecoderConfig:
    windows = set(config.layer_types or ("full_attention",))
    if len(windows) > 1:
        raise _refuse("qwen3_moe", "layer_types", config.layer_types, "has one window for all layers")
    return Qwen3Moe(
        **_common(config),
        moe_intermediate_size=config.intermediate_size,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        attention_bias=config.attention_bias,
        sliding_window=config.sliding_window if "sliding_attention" in windows else None,
    )


def _llama(config: Llama, experts: int, top_k: int) -> DecoderConfig:
    for field in ("attention_bias", "mlp_bias"):
        if getattr(config, field):
            raise _refuse("mixtral", field, True, "has no biases")
    return Mixtral(**_common(config), num_local_experts=experts, num_experts_per_tok=top_k)


def _qwen2(config: Llama, experts: int, top_k: int) -> DecoderConfig:
    if config.sliding_window is not None:
        raise _refuse("glm4_moe", "sliding_window", config.sliding_window, "has no windows")
    return Glm4Moe(
        **_common(config),
        moe_intermediate_size=config.intermediate_size,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_shared_experts=0,
        first_k_dense_replace=0,
        partial_rotary_factor=1.0,
        attention_bias=True,  # as those of Qwen2: on queries, keys and values
    )


TARGETS: Mapping[str, Target] = {
    "qwen3": Target("qwen3_moe", _qwen3),
    "llama": Target("mixtral", _llama),
    "qwen2": Target("glm4_moe", _qwen2),
}
"""What a dense model of each ``model_type`` becomes."""
