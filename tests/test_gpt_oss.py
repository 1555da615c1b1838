"""What is GPT-OSS's own: its experts, its published configs and weights, and the laws of transforms on a model with sinks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from xtf import models, testing, tree
from xtf.checkpoint import load_params
from xtf.models.gpt_oss import expert_fn
from xtf.ops import Ops
from xtf.ops.cpu import CPU
from xtf.ops.reference import REFERENCE
from xtf.step import compose
from xtf.transforms import accumulate, shard

SMALL: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 61,
    "hidden_size": 20,
    "intermediate_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 3,
    "initializer_range": 0.3,
    "router_aux_loss_coef": 0.1,
}


def params_of(experts: int, hidden: int = 4, inner: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(experts)
    shapes = {
        "gate_up": (experts, 2 * inner, hidden),
        "gate_up_bias": (experts, 2 * inner),
        "down": (experts, hidden, inner),
        "down_bias": (experts, hidden),
    }
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def one_by_one(params: dict[str, Tensor], rows: Tensor, offsets: Tensor, alpha: float, limit: float) -> Tensor:
    """Row by row, with torch's own derivatives."""
    out, ends = [], [int(end) for end in offsets]
    for r in range(rows.shape[0]):
        e = next(e for e, end in enumerate(ends) if r < end)
        gate, up = (params["gate_up"][e] @ rows[r] + params["gate_up_bias"][e]).chunk(2)
        gate, up = torch.minimum(gate, torch.full_like(gate, limit)), up.clamp(-limit, limit)
        out.append(params["down"][e] @ ((up + 1) * gate * torch.sigmoid(alpha * gate)) + params["down_bias"][e])
    return torch.stack(out) if out else rows * 0 + 0 * sum(p.sum() for p in params.values())


@settings(deadline=None, max_examples=25)
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=5), limit=st.sampled_from([0.3, 7.0]))
@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=lambda ops: ops.name)
def test_experts_are_the_formula(ops: Ops, counts: list[int], limit: float) -> None:
    """Any number of experts and rows, none included, in value and in every gradient."""
    params, rows = params_of(len(counts)), torch.randn(sum(counts), 4, dtype=torch.float64)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    compute = expert_fn(ops.grouped_mm, 1.702, limit)
    want, want_back, *_ = torch.func.vjp(lambda p, x: one_by_one(p, x, offsets, 1.702, limit), params, rows)
    got, back, *_ = torch.func.vjp(lambda p, x: compute(p, x, offsets), params, rows)
    dout = torch.randn(want.shape, dtype=torch.float64)
    for a, b in zip(tree.leaves((got, *back(dout))), tree.leaves((want, *want_back(dout))), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_of_biases_are_no_scattered_sums() -> None:
    """Which code may add up in another order each time."""
    params, rows, offsets = params_of(3), torch.randn(5, 4, dtype=torch.float64), torch.tensor([2, 2, 5], dtype=torch.int32)

    def gradients(params: dict[str, Tensor], rows: Tensor, offsets: Tensor) -> Any:
        return torch.func.grad(lambda p: expert_fn(CPU.grouped_mm, 1.7, 7.0)(p, rows, offsets).square().sum())(params)

    called = {str(node.target) for node in make_fx(gradients)(params, rows, offsets).graph.nodes if node.op == "call_function"}
    assert any("aten.mm" in name for name in called)
    assert not [name for name in called if any(word in name for word in ("index", "scatter", "put", "embedding", "bincount"))]


def test_laws_hold() -> None:
    model = models.from_hf(SMALL, dtype=torch.float64, router_z_loss=0.01)
    testing.check(lambda mesh: shard(mesh["data"]), model=model, data=3)
    testing.check(lambda mesh: compose(shard(mesh["data"], replicate=mesh["copy"]), accumulate(2)), model=model, data=2, copy=2)


def test_the_published_config() -> None:
    """As on the hub, with what it says twice and how its weights are stored."""
    published = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
        "pad_token_id": 199999, "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False}, "rope_theta": 150000,
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True,
        "vocab_size": 201088,
    }  # fmt: skip
    model: Any = models.from_hf(published)
    assert replace(model.config, router_aux_loss_coef=0.001) == models.PRESETS["gpt-oss-20b"]
    assert model.hf_config["eos_token_id"] == 200002 and "quantization_config" not in model.hf_config
    short = {name: published[name] for name in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    filled: Any = models.from_hf(short | {"num_hidden_layers": 36})  # the rest is what transformers fills in
    assert filled.config == models.PRESETS["gpt-oss-120b"]


def test_published_weights_give_the_logits_of_transformers(tmp_path: Path) -> None:
    """Experts in MXFP4, everything else in bfloat16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = SMALL | {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4}
    reference = hf_models.build(config, torch.float32)  # in bfloat16 it would round its rotary table too
    stored: dict[str, Tensor] = {}
    g = torch.Generator().manual_seed(0)
    for name, parameter in reference.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, into, out = parameter.shape
            blocks = torch.randint(256, (experts, out, into // 32, 16), generator=g, dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, out, into // 32), generator=g, dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))
        else:
            stored[name] = parameter.detach().bfloat16()
            parameter.data.copy_(stored[name])
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    model = models.from_hf(tmp_path)
    ids = torch.randint(61, (2, 9), generator=g)
    with torch.no_grad():
        want = reference(input_ids=ids).logits
    got = model.logits(load_params(model, tmp_path), ids)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
