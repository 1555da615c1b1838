"""What ``xtf export`` of a training checkpoint needs: no training job, the same logits in transformers, and little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import xtf
from tests.parity.test_transformers import DEEPSEEK, GLM, LLAMA, MIXTRAL, MOE, OSS, QWEN3
from xtf import cli, models, optim, testing
from xtf.checkpoint import open_leaves, save_blocks, save_state
from xtf.mesh import Mesh, simulate, split_batch
from xtf.transforms import expert_parallel, shard

FAMILIES: dict[str, dict[str, Any]] = {
    str(config["model_type"]): config for config in (LLAMA, QWEN3, MOE, MIXTRAL, OSS, DEEPSEEK, GLM)
}  # fmt: skip


def trained(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Two steps on two ranks, saved; the parameters as they were."""
    model = models.from_hf(config)

    def work(mesh: Mesh) -> Any:
        axis = mesh["data"]
        parts = [expert_parallel(axis)] if any("expert" in spec.axes for spec in xtf.tree.leaves(model.specs)) else []
        step = xtf.compose(*parts, shard(axis))(xtf.train_step(model, optim.adamw(lr=0.1)))
        state = step.init(0)
        for seed in range(2):
            state, _ = step(state, split_batch(testing.random_batch(config["vocab_size"], seed=seed), mesh))
        save_state(step, state, folder)
        return step.full(state.params)

    return simulate(work, data=2)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_of_each_family_is_exported(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    params = trained(tmp_path / "step", FAMILIES[family])
    assert cli.main(["export", str(tmp_path / "step"), str(tmp_path / "out"), "--shard-size", "9KB"]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(2 * 11).view(2, 11) % FAMILIES[family]["vocab_size"]
    with torch.no_grad():
        want = theirs.eval()(ids).logits
    got = models.from_hf(FAMILIES[family]).logits(params, ids)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 24])
def test_pieces_of_any_size_make_the_same_files(tmp_path: Path, family: str, piece_bytes: int) -> None:
    model = models.from_hf(FAMILIES[family], dtype=torch.bfloat16)
    params = model.init(3)
    xtf.save_params(model, params, tmp_path / "whole", shard_bytes=9000)
    with open_leaves(model, tmp_path / "whole", mapped_bytes=2000) as read:
        save_blocks(model, read, tmp_path / "pieces", shard_bytes=9000, piece_bytes=piece_bytes)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "pieces" / file.name).read_bytes() == file.read_bytes(), file.name


# Memory

CODE = """
import json, sys
from pathlib import Path
import torch, tyro
import xtf.models, xtf.run.export, xtf.checkpoint
from xtf.cli import main
from xtf.run.export import ExportOptions

def kib(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0])

torch.empty(1 << 20).add_(1).to(torch.bfloat16)  # the machinery that any tensor needs
before = kib("VmRSS")
code = main(sys.argv[1:])
print(json.dumps([code, before * 1024, kib("VmHWM") * 1024]))
"""
"""The peak is that of this program: ``ru_maxrss`` of a child begins with that of the process it was forked from."""


def checkpoint_of(folder: Path, experts: int, vocab: int) -> int:
    """A training checkpoint on two ranks, half of its bytes in one leaf; the bytes of its parameters."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": vocab, "max_position_embeddings": 512, "num_experts": experts,
        "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True,
    }  # fmt: skip
    model = models.from_hf(config)

    def work(mesh: Mesh) -> None:
        step = shard(mesh["data"])(xtf.train_step(model, optim.sgd(lr=0.1)))
        save_state(step, step.init(0), folder)

    simulate(work, data=2)
    return 4 * model.param_count()[0]


def extra_bytes(*args: str) -> int:
    """Peak resident bytes of a command above those of the process that has imported all it needs."""
    done = subprocess.run([sys.executable, "-c", CODE, "export", *args], check=True, capture_output=True, text=True, timeout=300)
    code, before, after = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return after - before


def check_memory(tmp_path: Path, experts: int, vocab: int, limit: int, mapped: int) -> None:
    """``mapped`` is the limit for a Hugging Face folder, whose files are mapped: pages that the system leaves in memory count."""
    size = checkpoint_of(tmp_path / "step", experts, vocab)
    found = {
        "training checkpoint": extra_bytes(str(tmp_path / "step"), str(tmp_path / "out"), "--shard-size", "200MB"),
        "to bfloat16": extra_bytes(str(tmp_path / "step"), str(tmp_path / "half"), "--dtype", "bfloat16"),
        "Hugging Face folder": extra_bytes(str(tmp_path / "out"), str(tmp_path / "again")),
    }
    print(f"{size / 1e6:.0f} MB:", {name: f"{extra / 1e6:.0f} MB" for name, extra in found.items()})
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert size <= written <= size + 1e6
    assert found.pop("Hugging Face folder") <= mapped, found
    assert max(found.values()) <= limit, found


def test_an_export_needs_little_memory(tmp_path: Path) -> None:
    check_memory(tmp_path, 48, 16384, 80_000_000, mapped=170_000_000)


@pytest.mark.full
def test_an_export_of_a_gigabyte_needs_no_more(tmp_path: Path) -> None:
    check_memory(tmp_path, 256, 49152, 300_000_000, mapped=300_000_000)
