"""Reading a ``config.json``: what is known is taken, what changes nothing is passed over, all else is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_BOOKKEEPING = frozenset(
    {
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "is_llama_config",
        "label2id",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tf_legacy_loss",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unk_token_id",
        "use_bfloat16",
        "use_cache",
    }
)
"""Fields that do not change what the model computes in training."""

_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}
"""Fields that are supported with one value only."""

_ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"})


def read(config: Mapping[str, Any], *, family: str, model_types: Collection[str], known: Collection[str]) -> dict[str, Any]:
    """The fields of a ``config.json`` that are set and matter.

    Args:
        config: the whole of it.
        family: the family that reads, for messages.
        model_types: the values of ``model_type`` that it covers.
        known: the fields that it reads, beside those of the rotary embedding.

    Returns:
        ``config`` without bookkeeping, and without fields that are ``None`` (which in transformers stands for a default).

    Raises:
        ValueError: for another ``model_type``, and for a field that is unknown or has a value that is not supported.

    Example:
        >>> read({"model_type": "llama", "vocab_size": 8, "use_cache": True}, family="llama", model_types=["llama"], known=["vocab_size"])
        {'vocab_size': 8}
    """
    model_type = config.get("model_type", next(iter(model_types)))
    if model_type not in model_types:
        expected = " or ".join(map(repr, model_types))
        raise ValueError(f"{family} reads model_type {expected}, the config has {model_type!r}: xtf.models.from_hf finds the family")
    found: dict[str, Any] = {}
    for name, value in config.items():
        if value is None or name in _BOOKKEEPING or name.startswith(("_", "transformers.js")):
            continue
        if name in _ONLY:
            if value != _ONLY[name]:
                raise ValueError(f"{family} does not support {name}={value!r} in the config; only {_ONLY[name]!r} is supported")
        elif name in known or name in _ROPE:
            found[name] = value
        else:
            raise ValueError(
                f"{family} does not know the config field {name}={value!r}, and it may change the model: "
                "remove it if it does not; known fields are " + ", ".join(sorted({*known, *_ROPE, *_ONLY}))
            )
    return found


def required(found: Mapping[str, Any], name: str, family: str) -> Any:
    """A field that must be there.

    Raises:
        ValueError: naming it, if it is not.
    """
    if name not in found:
        raise ValueError(f"{family} needs the config field {name!r}, which is missing or null: add it to the config")
    return found[name]
