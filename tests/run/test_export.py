"""The command ``xtf export``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import xtf
from xtf import cli, models, tree
from xtf.checkpoint import load_leaves, save_state
from xtf.run import export
from xtf.run.export import ExportOptions, leaf_by_leaf, parse_bytes, run


def params(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return tree.items(xtf.load_params(models.from_hf(path, dtype=dtype), path))


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
def test_what_is_exported_is_the_source(folder: Path, tmp_path: Path, dtype: Any) -> None:
    out = run(ExportOptions(folder, tmp_path / "out", dtype=dtype))
    kind = getattr(torch, dtype or "float32")
    got, want = params(out, kind), params(folder)
    assert got.keys() == want.keys()
    assert all(got[path].dtype == kind and torch.equal(got[path], want[path].to(kind)) for path in want)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == (dtype or "float32") and config["model_type"] == "qwen3_moe"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()}


def test_transformers_loads_it_and_gives_the_same(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = run(ExportOptions(folder, tmp_path / "out", shard_size="300KB"))
    assert len(list(out.glob("model-*.safetensors"))) > 2 and (out / "model.safetensors.index.json").is_file()
    theirs: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([tokenizer("It is a truth")["input_ids"]])
    model = models.from_hf(folder)
    with torch.no_grad():
        want = theirs(ids).logits
    got = model.logits(xtf.load_params(model, folder), ids)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert tokenizer.chat_template


def test_leaves_are_read_in_groups_and_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.from_hf(folder)
    reads: list[int] = []

    def watched(*args: Any) -> dict[str, Tensor]:
        found = load_leaves(*args)
        reads.append(sum(leaf.nbytes for leaf in found.values()))
        return found

    monkeypatch.setattr(export, "load_leaves", watched)
    limit = 200_000
    get_leaf, want = leaf_by_leaf(model, folder, limit), params(folder)
    for path, value in want.items():
        assert torch.equal(get_leaf(path), value)
    largest = max(value.nbytes for value in want.values())
    assert sum(reads) == sum(value.nbytes for value in want.values())
    assert max(reads) <= max(limit, largest) and len(reads) > 4


def test_a_run_gives_its_best_or_its_last(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models.from_hf(folder)
    source = tmp_path / "run"
    for seed, name in ((2, "best"), (3, "checkpoint")):
        xtf.save_params(model, model.init(seed), source / name, tokenizer_from=folder)
    for prefer, seed in (("best", 2), ("last", 3)):
        assert cli.main(["export", str(source), str(tmp_path / prefer), "--prefer", prefer]) == 0
        assert torch.equal(params(tmp_path / prefer)["norm.weight"], model.init(seed)["norm"]["weight"])
        assert torch.equal(params(tmp_path / prefer)["embed.weight"], model.init(seed)["embed"]["weight"])
    assert f"xtf: checkpoint {source / 'best'}\n" in capsys.readouterr().err


def test_a_training_checkpoint_is_exported_and_generates(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models.from_hf(folder)
    step = xtf.train_step(model, xtf.optim.adamw(lr=1e-3))
    state = xtf.load(step, folder)
    place = tmp_path / "run" / "checkpoints" / "step-00000000"
    save_state(step, state, place, tokenizer_from=folder)
    out = run(ExportOptions(tmp_path / "run", tmp_path / "out"))
    got, want = params(out), params(folder)
    assert got.keys() == want.keys() and all(torch.equal(got[path], want[path]) for path in want)
    assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()}
    texts = []
    for source in (place, out, folder):
        assert cli.main(["generate", str(source), "It is", "--tokens", "5"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) > 1


def test_a_source_without_tokenizer_is_exported_and_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, tmp_path / "bare", ignore=lambda _, names: [name for name in names if name.startswith("tokenizer")])
    assert cli.main(["export", str(tmp_path / "bare"), str(tmp_path / "out")]) == 0
    assert "has no tokenizer" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["{folder}", "{taken}"], "will not be overwritten"),
        (["{folder}", "{folder}"], "is the checkpoint that is exported"),
        (["{folder}", "{out}", "--shard-size", "big"], "--shard-size is 'big'"),
        (["nowhere", "{out}"], "no checkpoint folder at nowhere"),
        (["{taken}", "{out}"], "no checkpoint in"),
    ],
)
def test_bad_input_is_one_message(args: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("kept")
    places = {"folder": folder, "taken": tmp_path / "taken", "out": tmp_path / "out"}
    assert cli.main(["export", *(arg.format(**places) for arg in args)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("xtf: ") and err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"taken"} and (tmp_path / "taken" / "thesis.txt").read_text() == "kept"


@pytest.mark.parametrize("text", ["", "GB", "0", "-5GB", "5PB", "0.1B", "five"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--shard-size"):
        parse_bytes(text)
