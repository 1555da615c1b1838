"""Our families against transformers' models of the same config and weights: logits, loss and gradients.

transformers computes norms and rotary tables in float32 whatever the dtype, so in float64 the two agree to 1e-6 and no closer.
"""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xtf import models, tree

COMMON = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = COMMON | {"model_type": "llama", "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
QWEN2 = COMMON | {"model_type": "qwen2", "num_key_value_heads": 2, "max_position_embeddings": 64}
QWEN3 = COMMON | {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 10, "max_position_embeddings": 64}
MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.3,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.3}
OSS = COMMON | {
    "model_type": "gpt_oss",
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.3,
    "sliding_window": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
OSS_YARN = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16}
DEEPSEEK = COMMON | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,  # not that of latents
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 1.0}
GLM = COMMON | {
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 64,
}
LENGTH = 12

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied, no groups": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama, head size and biases": LLAMA | {"head_dim": 10, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "linear": LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "dynamic, short": LLAMA | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    "dynamic, long": LLAMA | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 8},
    "yarn": LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}},
    "longrope, short": LLAMA
    | {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 4.0],
        }
    },
    "longrope, long": LLAMA
    | {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 4.0],
        }
    },
    "llama3": LLAMA
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "qwen2": QWEN2,
    "qwen2, windows in some layers": QWEN2 | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": QWEN3,
    "qwen3, tied, biases, windows": QWEN3
    | {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": MOE,
    "qwen3_moe, weights as they are": MOE | {"norm_topk_prob": False, "num_experts_per_tok": 3, "attention_bias": True},
    "qwen3_moe, mixed by step": MOE | {"num_hidden_layers": 3, "decoder_sparse_step": 2},
    "qwen3_moe, mixed by list": MOE | {"num_hidden_layers": 3, "mlp_only_layers": [0], "tie_word_embeddings": True},
    "qwen3_moe, one expert, window": MOE | {"num_experts": 5, "num_experts_per_tok": 1, "use_sliding_window": True, "sliding_window": 5},
    "mixtral": MIXTRAL,
    "mixtral, tied, head size, window": MIXTRAL
    | {"tie_word_embeddings": True, "head_dim": 10, "sliding_window": 5, "num_experts_per_tok": 3, "num_key_value_heads": 1},
    "gpt_oss": OSS,
    "gpt_oss, yarn, clamped": OSS | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.5e5, **OSS_YARN}, "swiglu_limit": 0.2},
    "gpt_oss, tied, no biases, types": OSS
    | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 1,
        "swiglu_alpha": 1.2,
    },
    "gpt_oss, full attention": OSS | {"layer_types": ["full_attention"] * 2},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, direct queries, halves": DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    "deepseek_v3, yarn beyond the context": DEEPSEEK | {"rope_parameters": YARN},
    "deepseek_v3, yarn, mscale of the scores": DEEPSEEK | {"rope_parameters": YARN | {"mscale": 1.0, "beta_fast": 1, "beta_slow": 1}},
    "deepseek_v3, biases, weights as they are": DEEPSEEK | {"attention_bias": True, "norm_topk_prob": False, "tie_word_embeddings": True},
    "glm4_moe": GLM,
    "glm4_moe, groups, no biases, no norms of heads": GLM
    | {"n_group": 4, "topk_group": 2, "attention_bias": False, "use_qk_norm": False, "n_shared_experts": 2, "norm_topk_prob": False},
    "glm4_moe, a third is rotated": GLM | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1 / 3}},
    "glm4_moe, yarn, the older layout": GLM
    | {
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        "partial_rotary_factor": 1.0,
    },
    "deepseek_v3, all dense": DEEPSEEK | {"first_k_dense_replace": 3},
}


def near(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    assert got.shape == want.shape
    error, size = (got - want).abs().max(), want.abs().max()
    assert error <= tolerance * size, f"{what}: off by {error:.3g}, the reference is at most {size:.3g}"


def compare(hf_config: dict[str, Any], dtype: torch.dtype, logits: float, loss: float, gradients: float) -> None:
    options = {"aux": "pooled"} if hf_config["model_type"] in ("qwen3_moe", "mixtral", "gpt_oss") else {}
    model = models.from_hf(hf_config, dtype=dtype, **options)
    reference = hf_models.build(hf_config, dtype)
    params = hf_models.parameters(model, reference)
    ids = torch.randint(hf_config["vocab_size"], (3, LENGTH), generator=torch.Generator().manual_seed(1))
    sparse = {"output_router_logits": True} if options and model.aux else {}
    want = reference(input_ids=ids, labels=ids, **sparse)
    want.loss.backward()
    near(model.logits(params, ids), want.logits.detach(), logits, "logits")
    batch = {"input_ids": ids, "labels": ids}
    near(model.loss(params, batch), want.loss.detach(), loss, "loss")
    got = tree.items(torch.func.grad(model.loss)(params, batch))
    expected = tree.items(hf_models.gradients(model, reference))
    for path, value in expected.items():
        near(got[path], value, gradients, path)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name: str) -> None:
    compare(CONFIGS[name], torch.float32, logits=1e-5, loss=1e-6, gradients=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe, mixed by step", "mixtral", "gpt_oss"])
def test_equals_transformers_in_float64(name: str) -> None:
    compare(CONFIGS[name], torch.float64, logits=1e-6, loss=1e-7, gradients=1e-5)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    size = 2 * draw(st.integers(1, 6))
    # a norm of few numbers has next to no gradient, and rounding would be compared: at least 6 of them
    out: dict[str, Any] = {
        "vocab_size": draw(st.integers(2, 40)),
        "hidden_size": heads * draw(st.integers(-(-6 // heads), 8)),
        "intermediate_size": draw(st.integers(1, 30)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(st.sampled_from([100.0, 1e4, 1e6]))},
    }
    kind = draw(st.sampled_from(["llama", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe"]))
    out["model_type"] = kind
    if kind in ("qwen3", "qwen3_moe"):
        out["head_dim"] = max(size, 6)  # heads have norms
    if kind != "mixtral":
        out["attention_bias"] = draw(st.booleans())
    if kind == "llama":
        out["mlp_bias"] = draw(st.booleans())
    if kind == "qwen3_moe":
        experts = draw(st.integers(1, 8))
        top_k = draw(st.integers(1, experts))
        out |= {
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": draw(st.integers(1, 20)),
            # with one choice that is made to sum to one, the router's gradient is zero, and rounding all there is to compare
            "norm_topk_prob": top_k > 1 and draw(st.booleans()),
            "decoder_sparse_step": draw(st.integers(1, 2)),
            "router_aux_loss_coef": draw(st.sampled_from([0.0, 0.1])),
        }
    if kind in ("mixtral", "gpt_oss"):
        experts = draw(st.integers(2, 8))
        out |= {
            "num_local_experts": experts,
            "num_experts_per_tok": draw(st.integers(2, experts)),
            # a window of one token leaves queries and keys without a gradient, as above
            "sliding_window": draw(st.sampled_from([None, 2, 5, 64])),
            "router_aux_loss_coef": draw(st.sampled_from([0.0, 0.1])),
        }
    if kind == "gpt_oss":
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        out |= {
            "sliding_window": draw(st.sampled_from([2, 5, 64])),
            "layer_types": draw(st.lists(kinds, min_size=out["num_hidden_layers"], max_size=out["num_hidden_layers"])),
            "swiglu_limit": draw(st.sampled_from([0.1, 7.0])),
        }
        if draw(st.booleans()):
            out["rope_parameters"] = out["rope_parameters"] | {"rope_type": "yarn"} | OSS_YARN
    if kind == "deepseek_v3":
        del out["head_dim"]
        out |= {
            "num_key_value_heads": heads,
            "q_lora_rank": draw(st.sampled_from([None, 7])),
            "kv_lora_rank": draw(st.integers(6, 9)),
            "qk_nope_head_dim": draw(st.integers(1, 7)),
            "qk_rope_head_dim": size,
            "v_head_dim": draw(st.integers(1, 7)),
        }
    if kind == "glm4_moe":
        out |= {"head_dim": 2 * max(size, 4), "use_qk_norm": draw(st.booleans())}
    if kind in ("deepseek_v3", "glm4_moe"):
        groups, each = draw(st.integers(1, 3)), draw(st.integers(2, 4))
        kept = draw(st.integers(1, groups))
        out |= {
            "n_routed_experts": groups * each,
            "n_group": groups,
            "topk_group": kept,
            "num_experts_per_tok": draw(st.integers(2, kept * each)),
            "n_shared_experts": draw(st.integers(1, 2)),
            "moe_intermediate_size": draw(st.integers(1, 20)),
            "norm_topk_prob": draw(st.booleans()),
            "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
            "first_k_dense_replace": draw(st.integers(0, 2)),
        }
    return out


@settings(max_examples=10)
@given(configs())
def test_random_configs_equal_transformers(hf_config: dict[str, Any]) -> None:
    compare(hf_config, torch.float64, logits=1e-5, loss=1e-6, gradients=1e-4)


@pytest.mark.full
@settings(max_examples=300)
@given(configs())
def test_many_random_configs_equal_transformers(hf_config: dict[str, Any]) -> None:
    compare(hf_config, torch.float64, logits=1e-5, loss=1e-6, gradients=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_round_trips(name: str, tmp_path: Any) -> None:
    """Through our own reading and writing, and through transformers', which must see the same model."""
    import transformers

    model = models.from_hf(CONFIGS[name])
    written = dict(model.hf_config)
    assert models.from_hf(written).config == model.config
    theirs = transformers.AutoConfig.for_model(written.pop("model_type"), **written)
    theirs.save_pretrained(tmp_path)
    assert models.from_hf(tmp_path).config == model.config


SAVED = ("llama, tied, no groups", "llama, head size and biases", "qwen2", "qwen3", "qwen3_moe, mixed by step", "deepseek_v3", "glm4_moe")


@pytest.mark.parametrize("name", [*SAVED, "deepseek_v3, biases, weights as they are", "mixtral", "gpt_oss"])
def test_names_are_those_on_disk(name: str, tmp_path: Any) -> None:
    from safetensors import safe_open

    from xtf.checkpoint_map import names

    model = models.from_hf(CONFIGS[name])
    hf_models.build(CONFIGS[name], torch.float32).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = set(file.keys())
    assert {leaf for source in model.sources.values() for leaf in names(source)} == saved
    assert set(model.sources) == set(tree.paths(model.specs))


@pytest.mark.parametrize("config", [QWEN3, DEEPSEEK], ids=["qwen3", "deepseek_v3"])
def test_packed_documents_equal_transformers_one_by_one(config: dict[str, Any]) -> None:
    model = models.from_hf(config)
    reference = hf_models.build(config, torch.float32)
    ids = torch.randint(37, (1, 10), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[4, 4, 4, 0, 7, 7, 7, 7, 7, 7]])
    got = model.logits(hf_models.parameters(model, reference), ids, document_ids=documents)
    with torch.no_grad():
        want = torch.cat([reference(input_ids=part).logits for part in ids.split([3, 1, 6], 1)], 1)
    near(got, want, 1e-5, "logits")
