"""The command ``xtf upcycle``: what comes out computes what went in."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import xtf
from xtf import cli, models, tree
from xtf.data.text import TOKENIZER_FILE
from xtf.run import export, upcycle
from xtf.run.upcycle import TARGETS, UpcycleOptions, run

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 101, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
DENSE: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **SMALL, "tie_word_embeddings": True, "eos_token_id": [2, 3]},
    "qwen3-biases-window": {
        "model_type": "qwen3", **SMALL, "attention_bias": True, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0
    },
    "llama": {"model_type": "llama", **SMALL, "rope_theta": 1e4},
    "llama-scaled": {
        "model_type": "llama", **SMALL, "tie_word_embeddings": True, "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 32},
    },
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen2-tied": {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True},
}  # fmt: skip


def dense(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32, tokenizer: bool = False) -> Path:
    """A dense checkpoint in which every leaf has values of its own, norms and biases too."""
    model = models.from_hf(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    params = tree.map(lambda leaf: (leaf + 0.1 * torch.randn(leaf.shape, generator=generator)).to(dtype), model.init(0))
    xtf.save_params(model, params, folder, tokenizer_from=TOKENIZER_FILE.parent if tokenizer else None)
    return folder


def logits(folder: Path, ids: Tensor) -> Tensor:
    model = models.from_hf(folder)
    return model.logits(xtf.load_params(model, folder), ids)


IDS = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (3, 3), (2, 1)])
def test_logits_are_those_of_the_dense_model(tmp_path: Path, name: str, experts: int, top_k: int) -> None:
    source = dense(tmp_path / "dense", DENSE[name])
    out = run(UpcycleOptions(source, tmp_path / "out", experts, top_k))
    got, want = logits(out, IDS), logits(source, IDS)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    model = models.from_hf(out)
    assert model.family == TARGETS[DENSE[name]["model_type"]].family
    specs = tree.items(model.specs)
    assert specs["layers.1.moe.router"].shape == (experts, 32) and specs["layers.1.moe.gate_up"].shape == (experts, 80, 32)
    config = json.loads((out / "config.json").read_text())
    assert config["num_experts_per_tok"] == top_k and config.get("norm_topk_prob", True) is True
    assert config.get("eos_token_id") == DENSE[name].get("eos_token_id")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")  # no shared experts in a glm4_moe
@pytest.mark.parametrize("name", ["qwen3", "llama-scaled", "qwen2"])
def test_transformers_loads_it_and_gives_the_same(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    source = dense(tmp_path / "dense", DENSE[name])
    out = run(UpcycleOptions(source, tmp_path / "out", 4, 2))
    auto: Any = AutoModelForCausalLM
    theirs, info = auto.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    missing = {key: theirs.get_parameter(key).numel() for key in info.pop("missing_keys")}
    assert not any(info.values()) and not any(missing.values()) and len(missing) == (6 if name == "qwen2" else 0)
    want = logits(source, IDS)
    with torch.no_grad():
        assert (theirs(IDS).logits - want).abs().max() <= 1e-5 * want.abs().max()
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.equal(logits(tmp_path / "theirs", IDS), logits(out, IDS))


def test_experts_are_copies_and_routers_follow_the_seed(tmp_path: Path) -> None:
    source = dense(tmp_path / "dense", DENSE["qwen3"], torch.bfloat16)
    found = {
        seed: load_file(run(UpcycleOptions(source, tmp_path / f"out{seed}-{i}", 3, 2, seed=seed)) / "model.safetensors")
        for i, seed in enumerate((0, 1))
    }
    again = load_file(run(UpcycleOptions(source, tmp_path / "again", 3, 2, seed=1)) / "model.safetensors")
    before = load_file(source / "model.safetensors")
    for name, tensor in found[0].items():
        assert tensor.dtype == torch.bfloat16
        parts = name.split(".mlp.")
        if name.endswith("mlp.gate.weight"):
            assert not torch.equal(tensor, found[1][name]) and torch.equal(found[1][name], again[name])
            assert 0.2 < tensor.float().std() < 0.4
        elif len(parts) == 2 and parts[1].startswith("experts."):
            assert torch.equal(tensor, before[f"{parts[0]}.mlp.{parts[1].split('.', 2)[2]}"])
        else:
            assert torch.equal(tensor, before[name])
    assert len(found[0]) == len(before) + 2 * (1 + 2 * 3)
    routers = [found[0][f"model.layers.{i}.mlp.gate.weight"] for i in range(2)]
    assert not torch.equal(*routers)


def test_leaves_come_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the dense model no more is held than some leaves, of the mixture nothing but the leaf that is written."""
    source = dense(tmp_path / "dense", DENSE["llama"] | {"num_hidden_layers": 5})
    model = models.from_hf(source)
    largest = max(spec.numel for spec in tree.leaves(model.specs)) * 4
    plain_load, plain_leaf, read, most = export.load_leaves, export.leaf_by_leaf, list[weakref.ref[Tensor]](), [0]

    def watched_load(*args: Any) -> dict[str, Tensor]:
        found = plain_load(*args)
        read.extend(weakref.ref(leaf) for leaf in found.values() if leaf.numel())
        return found

    def watched_leaf(model: Any, folder: Path) -> Any:
        get_leaf = plain_leaf(model, folder, largest)

        def get(path: str) -> Tensor:
            leaf = get_leaf(path)
            most[0] = max(most[0], sum(kept.nbytes for ref in read if (kept := ref()) is not None))
            return leaf

        return get

    monkeypatch.setattr(export, "load_leaves", watched_load)
    monkeypatch.setattr(upcycle, "leaf_by_leaf", watched_leaf)
    out = run(UpcycleOptions(source, tmp_path / "out", 4, 2))
    whole = sum(spec.numel for spec in tree.leaves(model.specs)) * 4
    assert len(read) == len(tree.leaves(model.specs)) and largest <= most[0] <= 2 * largest < whole / 3
    expert = tree.items(xtf.load_params(models.from_hf(out), out))["layers.3.moe.down"]
    assert all(torch.equal(one, expert[0]) for one in expert)


def test_the_command_writes_a_checkpoint_that_trains_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = dense(tmp_path / "dense", DENSE["qwen3"] | {"vocab_size": 2048}, tokenizer=True)
    assert cli.main(["upcycle", str(source), str(tmp_path / "out"), "--experts", "4", "--top-k", "2", "--shard-size", "100KB"]) == 0
    assert "qwen3_moe, 4 experts, " in capsys.readouterr().err
    out = tmp_path / "out"
    assert len(list(out.glob("model-*.safetensors"))) > 2 and [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    model = models.from_hf(out)
    step = xtf.train_step(model, xtf.optim.adamw(lr=1e-3))
    state = xtf.load(step, out)
    batch = {"input_ids": IDS, "labels": IDS}
    before = xtf.load_params(model, out)
    state, metrics = step(state, batch)
    assert abs(metrics["loss"].item() - models.from_hf(source).loss(xtf.load_params(models.from_hf(source), source), batch).item()) < 0.02
    assert not torch.equal(state.params["layers"][0]["moe"]["router"], before["layers"][0]["moe"]["router"])
    assert cli.main(["generate", str(out), "It is", "--tokens", "3"]) == 0


@pytest.mark.parametrize(
    ("config", "args", "message"),
    [
        ({}, ["--experts", "2", "--top-k", "3"], "--experts is 2, fewer than --top-k 3"),
        ({}, ["--top-k", "0"], "--top-k is 0, expected at least 1"),
        ({}, ["--shard-size", "big"], "--shard-size is 'big'"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1}, [],
         "a qwen3_moe cannot be made a mixture of experts; dense models that can: qwen3 (to qwen3_moe), llama (to mixtral), "
         "qwen2 (to glm4_moe)"),
        ({"model_type": "gemma"}, [], "model_type 'gemma' is not supported"),
        ({"model_type": "llama", "mlp_bias": True}, [], "the dense model has mlp_bias=True, and a mixtral has no biases"),
        ({"model_type": "llama", "attention_bias": True}, [], "the dense model has attention_bias=True"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, [],
         "the dense model has sliding_window=4, and a glm4_moe has no windows"),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, [], "a qwen3_moe has one window for all layers"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(
    config: dict[str, Any], args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text(json.dumps(DENSE["qwen3"] | config))
    assert cli.main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "out"), *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("xtf: ") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_folder_that_stands_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = dense(tmp_path / "dense", DENSE["qwen3"])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("kept")
    assert cli.main(["upcycle", str(source), str(tmp_path / "taken")]) == 2
    assert "will not be overwritten" in capsys.readouterr().err
    assert cli.main(["upcycle", str(source), str(source)]) == 2
    assert "is the dense checkpoint itself" in capsys.readouterr().err
    assert (tmp_path / "taken" / "thesis.txt").read_text() == "kept" and (source / "model.safetensors").is_file()
