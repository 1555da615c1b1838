"""Reading a ``config.json``: what is known is taken, what changes nothing is passed over, all else is refused by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from xtf.checkpoint.quantised import refused

_BOOKKEEPING = frozenset(
    {
        "architectures",
        "attn_implementation",
        "auto_map",
        "decoder_start_token_id",
        "dtype",
        "finetuning_task",
        "id2label",
        "is_llama_config",
        "label2id",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
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
    "router_jitter_noise": 0,
    "use_mrope": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}
"""Fields that are supported with one value only."""

_INTEGERS = frozenset(
    {
        "bos_token_id",
        "decoder_sparse_step",
        "experts_per_token",
        "first_k_dense_replace",
        "head_dim",
        "hidden_size",
        "initial_context_length",
        "intermediate_size",
        "kv_lora_rank",
        "max_position_embeddings",
        "max_window_layers",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "original_max_position_embeddings",
        "pad_token_id",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "sliding_window",
        "topk_group",
        "v_head_dim",
        "vocab_size",
    }
)
_NUMBERS = frozenset(
    {
        "initializer_range",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_theta",
        "routed_scaling_factor",
        "router_aux_loss_coef",
        "swiglu_alpha",
        "swiglu_limit",
    }
)
_FLAGS = frozenset(
    {"attention_bias", "mlp_bias", "norm_topk_prob", "rope_interleave", "tie_word_embeddings", "use_qk_norm", "use_sliding_window"}
)
_LISTS = frozenset({"layer_types", "mlp_only_layers"})
_OBJECTS = frozenset({"rope_parameters", "rope_scaling"})

_MOST: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"), 10_000),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "n_shared_experts"), 100_000),
    **dict.fromkeys(("initial_context_length", "max_position_embeddings", "original_max_position_embeddings", "sliding_window"), 1 << 40),
}
_MOST_ELSE = 1 << 24
"""The most of an integer: more layers, experts or rows than any model has are a damaged number, not work that takes forever."""

_ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"})


def read(config: Mapping[str, Any], *, family: str, model_types: Collection[str], known: Collection[str]) -> dict[str, Any]:
    """The fields of a ``config.json`` that are set and matter.

    Args:
        config: the whole of it.
        family: the family that reads, for messages.
        model_types: the values of ``model_type`` that it covers.
        known: the fields that it reads, beside those of the rotary embedding.

    Returns:
        ``config`` without bookkeeping and ``quantization_config``, and without fields that are ``None`` (which in transformers
        stands for a default).

    Raises:
        ValueError: for another ``model_type``, and for a field that is unknown, of a wrong type, or has a value that is not supported;
            for a quantisation that `xtf.load_params` does not read.

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
        if name == "quantization_config":  # how weights are stored, not what the model is: reading them takes care of it
            why = refused(config)
            if why is not None:
                raise ValueError(f"{family}: {why}")
            continue
        if name in _ONLY:
            if value != _ONLY[name]:
                raise ValueError(f"{family} does not support {name}={value!r} in the config; only {_ONLY[name]!r} is supported")
        elif name in known or name in _ROPE:
            _check_type(name, value)
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


def head_size(found: Mapping[str, Any], family: str) -> int:
    """``head_dim``, or where a config leaves it out, ``hidden_size`` shared out among the heads.

    Raises:
        ValueError: if the heads cannot share it out evenly, in halves that are rotated together.

    Example:
        >>> head_size({"hidden_size": 12, "num_attention_heads": 3}, "llama")
        4
    """
    if "head_dim" in found:
        return found["head_dim"]
    hidden, heads = (required(found, name, family) for name in ("hidden_size", "num_attention_heads"))
    if heads < 1 or hidden % (2 * heads):
        raise ValueError(
            f"head_dim is not in the config, and hidden_size={hidden} / num_attention_heads={heads}, from which it is derived, "
            "is no even integer: give head_dim, or sizes that fit"
        )
    return hidden // heads


def check_integer(name: str, value: object, least: int | None = None) -> None:
    """Refuse a value that is no integer, or less than ``least``."""
    expected = "an integer" if least is None else f"an integer of at least {least}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(name, value, expected)
    if least is not None and value < least:
        raise ValueError(f"{name}={value!r}; expected {expected}")


def check_number(name: str, value: object) -> None:
    """Refuse a value that is no finite number, or so large that float32 has no square of it."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong_type(name, value, "a number")
    if not -1e18 <= value <= 1e18:
        raise ValueError(f"{name}={value!r}; expected a finite number" + ("" if not _finite(value) else ", of at most 1e18"))


def _finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def check_flag(name: str, value: object) -> None:
    """Refuse a value that is not true or false."""
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "true or false")


def _check_type(name: str, value: object) -> None:
    if name in _INTEGERS:
        check_integer(name, value)
        most = _MOST.get(name, _MOST_ELSE)
        if isinstance(value, int) and value > most:
            raise ValueError(f"{name}={value!r}; expected at most {most:,}: is the config damaged?")
    elif name in _NUMBERS:
        check_number(name, value)
    elif name in _FLAGS:
        check_flag(name, value)
    elif name in _LISTS and not isinstance(value, (list, tuple)):
        raise _wrong_type(name, value, "a list")
    elif name in _OBJECTS and not isinstance(value, Mapping):
        raise _wrong_type(name, value, 'an object, as {"rope_type": "yarn", "factor": 4.0, ...}')


def _wrong_type(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{name}={value!r} is a {type(value).__name__}; expected {expected}")
