"""A decoder put together from its parts: embedding, layers, last norm, head and loss."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import torch

from xtf.checkpoint_map import Named, Source
from xtf.model import AuxLoss, Model, Update, cross_entropy, loss_consts, loss_writes
from xtf.models.common import DecoderConfig, Leaves, Part, embed_fn, embed_rule, norm_fn
from xtf.models.rope import tables
from xtf.ops import Ops
from xtf.stage import Stage


def decoder(
    family: str,
    config: DecoderConfig,
    layers: Sequence[Sequence[Part]],
    hf_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    z_loss: float,
    aux: AuxLoss | None = None,
    aux_scope: Literal["microbatch", "step"] = "microbatch",
    update: Update | None = None,
    active_fraction: float = 1.0,
    constants: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    further: Sequence[Part] = (),
) -> Model:
    """The `Model` of a family.

    Args:
        family: its name.
        config: its ``Config``.
        layers: the parts of each layer, in order.
        hf_config: see `xtf.model.Model`; so for the rest.
        dtype: of all parameters.
        z_loss: coefficient of the z-loss on the logits.
        constants: what its stages read of a packed batch beside rotary tables.
        further: the parts of a layer that predicts the token after the next, see `xtf.models.further`.

    Raises:
        ValueError: for a dtype that is not floating or a negative coefficient.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"{family} got dtype={dtype}; expected a floating one, as torch.float32 or torch.bfloat16")
    if not z_loss >= 0:
        raise ValueError(f"{family} got z_loss={z_loss!r}; expected a number of at least 0")
    leaves, more = Leaves(dtype, config.initializer_range), 1 if further else 0
    main = "main" if further else "x"
    all_layers = [*layers, further] if further else layers
    vocabulary = leaves.matrix((config.vocab_size, config.hidden_size), ("vocab", "embed"))
    specs: dict[str, Any] = {
        "embed": {"weight": vocabulary},
        "layers": [{part.name: part.specs for part in layer} for layer in all_layers],
        "norm": {"weight": leaves.norm(config.hidden_size)},
    }
    sources: dict[str, Source] = {"embed.weight": Named("model.embed_tokens.weight"), "norm.weight": Named("model.norm.weight")}
    for i, layer in enumerate(all_layers):
        sources |= {f"layers.{i}.{part.name}.{leaf}": source for part in layer for leaf, source in part.sources.items()}
    head = "embed.weight"
    if not config.tie_word_embeddings:
        head = "head.weight"
        specs["head"] = {"weight": vocabulary}
        sources[head] = Named("lm_head.weight")

    def all_constants(packed: dict[str, Any]) -> dict[str, Any]:
        cos, sin = tables(config.rope, config.rotary_dim, packed["positions"], packed["cu_seqlens"], dtype)
        return {"cos": cos, "sin": sin} | (constants(packed) if constants is not None else {})

    def build(ops: Ops) -> tuple[Stage, ...]:
        key: Hashable = (family, config, dtype, ops.name)
        eps = config.rms_norm_eps
        weight = {"weight": "embed.weight"}
        return (
            Stage("embed", "embed", embed_fn, (key, "embed"), weight, (), ("x",), ("input_ids",), embed_rule(config.vocab_size)),
            *(stage for layer in layers for part in layer for stage in part.stages(ops, key)),
            Stage("norm", "norm", norm_fn(eps), (key, "norm"), {"weight": "norm.weight"}, ("x",), (main,)),
            *(stage for part in further for stage in part.stages(ops, key)),
            Stage(
                "loss",
                "loss",
                cross_entropy(z_loss, more),
                (key, "loss", z_loss, more),
                {"weight": head},
                (main, *("x" for _ in range(more))),
                loss_writes(z_loss, more),
                loss_consts(more),
            ),
        )

    return Model(
        family=family,
        config=config,
        specs=specs,
        constants=all_constants,
        build=build,
        sources=sources,
        hf_config=hf_config,
        vocab=config.vocab_size,
        aux=aux,
        aux_scope=aux_scope,
        update=update,
        active_fraction=active_fraction,
        z_loss=z_loss,
    )
