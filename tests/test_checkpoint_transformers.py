"""Checkpoints go between transformers and xtf, in and out, with equal bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from xtf import models, optim, tree
from xtf.checkpoint import CheckpointError, load, load_params, save, save_params
from xtf.mesh import Mesh, simulate
from xtf.step import train_step
from xtf.transforms import shard

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama-tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SMALL, tie_word_embeddings=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SMALL, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2),
    "gpt_oss": transformers.GptOssConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2, sliding_window=4),
}


def transformers_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    with torch.no_grad():
        for leaf in model.parameters():  # norms start as ones: every leaf gets its own values
            leaf.add_(torch.randn_like(leaf) * 0.1)
    return model


def read_by_transformers(folder: Path) -> Mapping[str, Tensor]:
    """The tensors that transformers reads from a folder; nothing missing, nothing unexpected."""
    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert {key: list(names) for key, names in info.items() if names} == {}
    return model.state_dict()


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if found[name].dtype != wanted[name].dtype or not torch.equal(found[name], wanted[name])]
    assert different == []


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sharded", [True, False])
def test_in_and_out_with_equal_bits(tmp_path: Path, name: str, sharded: bool) -> None:
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB" if sharded else "5GB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1 or not sharded
    model = models.from_hf(tmp_path / "theirs")
    params = load_params(model, tmp_path / "theirs")
    save_params(model, params, tmp_path / "ours", shard_bytes=20_000 if sharded else 5_000_000_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1 or not sharded
    assert_same(read_by_transformers(tmp_path / "ours"), theirs.state_dict())
    again = load_params(models.from_hf(tmp_path / "ours"), tmp_path / "ours")
    assert_same(tree.items(again), tree.items(params))


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    theirs = transformers_model("qwen3_moe", torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    model = models.from_hf(tmp_path / "theirs", dtype=torch.bfloat16)
    save_params(model, load_params(model, tmp_path / "theirs"), tmp_path / "ours")
    assert_same(read_by_transformers(tmp_path / "ours"), theirs.state_dict())


def test_a_checkpoint_saved_with_its_tied_head_loads(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs = transformers_model("llama-tied")
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, metadata={"format": "pt"})
    model = models.from_hf(tmp_path / "theirs")
    assert "lm_head.weight" not in {str(path) for path in tree.paths(model.specs)}
    save_params(model, load_params(model, tmp_path / "theirs"), tmp_path / "ours")
    assert_same(read_by_transformers(tmp_path / "ours"), theirs.state_dict())


def test_sharded_ranks_load_and_save_what_transformers_wrote(tmp_path: Path) -> None:
    theirs = transformers_model("qwen3_moe")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    model = models.from_hf(tmp_path / "theirs")

    def run(ranks: Mesh) -> None:
        step = shard(ranks["data"])(train_step(model, optim.adamw(lr=1e-3)))
        save(step, load(step, tmp_path / "theirs"), tmp_path / "ours", shard_bytes=30_000)

    simulate(run, data=3)
    assert_same(read_by_transformers(tmp_path / "ours"), theirs.state_dict())


@pytest.mark.parametrize("modules", [1, 2])
def test_modules_that_predict_further_tokens_are_read_over(tmp_path: Path, modules: int) -> None:
    """DeepSeek-V3's checkpoint has them after the last layer; what stands anywhere else is refused as ever."""
    from safetensors.torch import load_file, save_file

    config = {**models.preset("deepseek-v3").hf_config, **SMALL, "head_dim": None}
    config |= {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
    config |= {"v_head_dim": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    model = models.from_hf(config | {"moe_intermediate_size": 8, "num_nextn_predict_layers": modules})
    params = model.init(0)
    save_params(model, params, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = {f"model.layers.{2 + i}.eh_proj.weight": torch.ones(3) for i in range(modules)}
    save_file(tensors | further, tmp_path / "model.safetensors")
    again = load_params(models.from_hf(tmp_path), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(params), strict=True))
    save_file(tensors | further | {f"model.layers.{2 + modules}.enorm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"1 extra, unknown to the model:\s+model\.layers\.{2 + modules}\.enorm\.weight"):
        load_params(models.from_hf(tmp_path), tmp_path)
