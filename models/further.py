"""Multi-token prediction (DeepSeek-V3 2024, section 2.2): one more layer that predicts the token after the next one.

At position i it sees the main model's hidden state after the last norm and the embedding of token i + 1, both normed, and predicts
token i + 2. Embedding and head are those of the main model. It only adds to the loss: the main model's scores do not depend on it.

Dims: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from xtf.batch import IGNORE
from xtf.checkpoint_map import Named, Source
from xtf.models.common import DecoderConfig, Leaves, Part, embed_rule, norm_fn, rms_norm
from xtf.ops import Ops
from xtf.stage import Params, Stage, StageFn


def further_layer(config: DecoderConfig, layer: int, leaves: Leaves, block: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts of the layer that predicts the token after the next: ``layers.i.embed``, ``layers.i.project``, the stages of ``block``, and
    ``layers.i.norm``. It reads ``main`` (T, H), the hidden states after the last norm, and writes ``x``.

    Args:
        config: sizes.
        layer: its number, the first after those of the main model.
        leaves: makes the specs.
        block: an attention and what follows it, of the number ``layer``.
    """
    hidden, eps, prefix, name = config.hidden_size, config.rms_norm_eps, f"model.layers.{layer}", f"layers.{layer}"
    specs = {
        "embed_norm": leaves.norm(hidden),
        "hidden_norm": leaves.norm(hidden),
        "project": leaves.matrix((hidden, 2 * hidden), ("embed", None)),
    }
    sources: dict[str, Source] = {
        leaf: Named(f"{prefix}.{theirs}.weight") for leaf, theirs in zip(specs, ("enorm", "hnorm", "eh_proj"), strict=True)
    }

    def before(ops: Ops, key: Hashable) -> tuple[Stage, ...]:
        weight, rule = {"weight": "embed.weight"}, embed_rule(config.vocab_size, "next_ids")
        own = {leaf: f"{name}.further.{leaf}" for leaf in specs}
        return (
            Stage(f"{name}.embed", "embed", next_embed_fn, (key, "next embed"), weight, (), ("next",), ("next_ids",), rule),
            Stage(f"{name}.project", "project", project_fn(eps), (key, "project"), own, ("main", "next"), ("x",)),
        )

    def after(ops: Ops, key: Hashable) -> tuple[Stage, ...]:
        return (Stage(f"{name}.norm", "norm", norm_fn(eps), (key, "norm"), {"weight": f"{name}.further_norm.weight"}, ("x",), ("x",)),)

    last = Part("further_norm", {"weight": leaves.norm(hidden)}, {"weight": Named(f"{prefix}.shared_head.norm.weight")}, after)
    return Part("further", specs, sources, before), *block, last


def next_embed_fn(params: Params, *, next_ids: Int[Tensor, " T"]) -> tuple[Float[Tensor, "T H"]]:
    """The embedding of each next token: ``(params, *, next_ids (T,)) -> (next (T, H),)``."""
    return (F.embedding(next_ids, params["weight"]),)


def project_fn(eps: float) -> StageFn:
    """``(params, main (T, H), next (T, H)) -> (x (T, H),)``: both normed, laid side by side, the embedding first, and projected."""

    def fn(params: Params, main: Float[Tensor, "T H"], following: Float[Tensor, "T H"]) -> tuple[Float[Tensor, "T H"]]:
        both = rms_norm(following, params["embed_norm"], eps), rms_norm(main, params["hidden_norm"], eps)
        return (F.linear(torch.cat(both, -1), params["project"]),)

    return fn


def further_constants(weight: float) -> Callable[[Mapping[str, Any]], dict[str, Tensor]]:
    """What the layer and the loss read of a packed batch (`xtf.batch.pack`), each (T,): ``next_ids``, the next token of the document, at
    its end the token itself; ``targets_1``, the label after the next one, or -100 where the document ends; ``weights_1``, the weight of
    that target times ``weight``.

    Example:
        >>> from xtf.batch import pack
        >>> ids = torch.tensor([[5, 6, 7, 8]])
        >>> packed = pack({"input_ids": ids, "labels": ids, "document_ids": torch.tensor([[0, 0, 0, 1]])})
        >>> {name: value.tolist() for name, value in further_constants(0.5)(packed).items()}
        {'next_ids': [6, 7, 7, 8], 'targets_1': [7, -100, -100, -100], 'weights_1': [0.5, 0.0, 0.0, 0.0]}
    """

    def constants(packed: Mapping[str, Any]) -> dict[str, Tensor]:
        ids, targets, weights = packed["input_ids"], packed["targets"], packed["weights"]
        # at a row that ends a document, the next row begins another one, or none
        ends = torch.zeros(ids.shape[0] + 1, dtype=torch.bool, device=ids.device)
        ends = ends.scatter(0, packed["cu_seqlens"].long(), True)[1:]
        return {
            "next_ids": torch.where(ends, ids, ids.roll(-1)),
            "targets_1": torch.where(ends, IGNORE, targets.roll(-1)),
            "weights_1": torch.where(ends, 0, weights.roll(-1)) * weight,
        }

    return constants
