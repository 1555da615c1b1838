"""Experts one by one or fused, and language models inside larger ones: the same parameters however they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from xtf import models, optim, tree
from xtf.checkpoint import CheckpointError, load, load_params, save_params
from xtf.mesh import Mesh, simulate
from xtf.model import Model
from xtf.step import train_step
from xtf.transforms import shard

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 29, "moe_intermediate_size": 6, "num_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture
def model() -> Model:
    return models.from_hf(CONFIG)


@pytest.fixture
def saved(tmp_path: Path, model: Model) -> Path:
    save_params(model, model.init(0), tmp_path / "ckpt")
    return tmp_path / "ckpt"


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def fused(tensors: dict[str, Tensor], experts: int = 3) -> dict[str, Tensor]:
    """Experts of a layer in one tensor, as transformers holds them."""
    found = {name: t for name, t in tensors.items() if ".experts." not in name}
    for i in range(2):
        at = f"model.layers.{i}.mlp.experts"
        both = [torch.cat([tensors[f"{at}.{e}.{name}.weight"] for name in ("gate_proj", "up_proj")]) for e in range(experts)]
        found[f"{at}.gate_up_proj"] = torch.stack(both)
        found[f"{at}.down_proj"] = torch.stack([tensors[f"{at}.{e}.down_proj.weight"] for e in range(experts)])
    return found


def same(a: Any, b: Any) -> bool:
    left, right = tree.items(a), tree.items(b)
    return left.keys() == right.keys() and all(torch.equal(left[path], right[path]) for path in left)


def beside(name: str) -> str:
    """The place of a language model inside ``model.``, as in transformers 5."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


@pytest.mark.parametrize("prefix", [str, lambda name: f"language_model.{name}", beside], ids=["plain", "outside", "inside"])
@pytest.mark.parametrize("layout", [dict, fused], ids=["one by one", "fused"])
def test_every_layout_under_every_prefix(saved: Path, model: Model, prefix: Any, layout: Any) -> None:
    tensors = {prefix(name): t for name, t in layout(load_file(saved / "model.safetensors")).items()}
    other = {"model.visual.blocks.0.weight": torch.zeros(2), "vision_tower.x": torch.zeros(3)} if prefix is not str else {}
    rewrite(saved, tensors | other)
    assert same(load_params(model, saved), model.init(0))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_transformers_stacks_experts_as_the_fused_layout_does(tmp_path: Path, family: str) -> None:
    fields = CONFIG | {"model_type": family}
    if family == "mixtral":
        fields |= {"num_local_experts": fields.pop("num_experts"), "intermediate_size": fields.pop("moe_intermediate_size")}
    model = models.from_hf(fields)
    theirs: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields))
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "fused").mkdir()
    (tmp_path / "fused" / "config.json").write_bytes((tmp_path / "theirs" / "config.json").read_bytes())
    rewrite(tmp_path / "fused", {name: t.clone() for name, t in theirs.state_dict().items()})
    names = load_file(tmp_path / "fused" / "model.safetensors")
    assert names["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 12, 16)
    assert same(load_params(model, tmp_path / "fused"), load_params(model, tmp_path / "theirs"))


def test_ranks_read_their_parts_of_fused_experts(saved: Path, model: Model) -> None:
    rewrite(saved, {f"language_model.{name}": t for name, t in fused(load_file(saved / "model.safetensors")).items()})

    def run(ranks: Mesh) -> bool:
        step = shard(ranks["data"])(train_step(model, optim.sgd(lr=0.1)))
        return same(step.full(load(step, saved).params), model.init(0))

    assert all(simulate(run, data=4))


def test_what_is_saved_is_the_first_layout(saved: Path, model: Model, tmp_path: Path) -> None:
    before = load_file(saved / "model.safetensors")
    rewrite(saved, fused(before))
    save_params(model, load_params(model, saved), tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_no_layout_at_all_says_what_was_looked_for_and_what_is_near(saved: Path, model: Model) -> None:
    tensors = load_file(saved / "model.safetensors")
    rewrite(saved, {name.replace("mlp.experts.", "block_sparse_moe.experts."): t for name, t in tensors.items()})
    with pytest.raises(CheckpointError) as caught:
        load_params(model, saved)
    text = str(caught.value)
    assert (
        "the leaf layers.0.moe.gate_up in any layout, looked for model.layers.0.mlp.experts.0.gate_proj.weight to "
        "model.layers.0.mlp.experts.2.up_proj.weight (6 tensors), or model.layers.0.mlp.experts.gate_up_proj; near names: "
    ) in text
    assert "near names: model.layers.0.block_sparse_moe.experts.0.gate_proj.weight" in text
    assert "4 missing:" in text and len(caught.value.missing) == 2 * 9 and len(caught.value.extra) == 2 * 9


def test_one_lost_expert_is_named_and_nothing_else(saved: Path, model: Model) -> None:
    tensors = load_file(saved / "model.safetensors")
    lost = "language_model.model.layers.1.mlp.experts.2.down_proj.weight"
    rewrite(saved, {f"language_model.{name}": t for name, t in tensors.items() if f"language_model.{name}" != lost})
    with pytest.raises(CheckpointError) as caught:
        load_params(model, saved)
    assert caught.value.missing == (lost,) and caught.value.extra == () and lost in str(caught.value)


def test_unknown_tensors_of_the_language_model_are_refused_under_its_prefix(saved: Path, model: Model) -> None:
    tensors = {f"language_model.{name}": t for name, t in load_file(saved / "model.safetensors").items()}
    rewrite(saved, tensors | {"language_model.model.layers.0.extra": torch.zeros(1), "vision.x": torch.zeros(1)})
    with pytest.raises(CheckpointError) as caught:
        load_params(model, saved)
    assert caught.value.extra == ("language_model.model.layers.0.extra",)


@pytest.mark.parametrize("prefix", [str, lambda name: f"language_model.{name}"], ids=["plain", "outside"])
def test_a_tied_head_is_compared_under_the_prefix(saved: Path, prefix: Any) -> None:
    model = models.from_hf(CONFIG | {"tie_word_embeddings": True})
    tensors = load_file(saved / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(saved, {prefix(name): t for name, t in tensors.items()})
    load_params(model, saved)
    tensors["lm_head.weight"][0, 0] += 1
    rewrite(saved, {prefix(name): t for name, t in tensors.items()})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from .*model\.embed_tokens\.weight"):
        load_params(model, saved)


def test_layers_that_predict_further_tokens_are_passed_over(saved: Path, model: Model) -> None:
    tensors = load_file(saved / "model.safetensors")
    rewrite(saved, tensors | {"model.layers.2.eh_proj.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="1 extra"):
        load_params(model, saved)
    config = json.loads((saved / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (saved / "config.json").write_text(json.dumps(config))
    assert same(load_params(model, saved), model.init(0))
    rewrite(saved, tensors | {"model.layers.3.eh_proj.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="1 extra"):
        load_params(model, saved)
