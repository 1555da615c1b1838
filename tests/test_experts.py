"""A mixture of experts from end to end: a real dense model upcycled, trained with its experts on two gloo ranks, and loaded elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import xtf
from xtf.checkpoint import read_config
from xtf.data import encode_chat, read_chat_jsonl
from xtf.mesh import Mesh, simulate
from xtf.run import upcycle
from xtf.run.source import LAST
from xtf.transforms import chunk_loss, expert_parallel, shard

ROOT = Path(__file__).parent.parent


def dense(real_inputs: Path, out: Path, layers: int | None) -> Path:
    """The real model, or its first layers."""
    whole = real_inputs / "smollm2-135m"
    if layers is None:
        return whole
    config = read_config(whole)
    rest = [rf"model\.layers\.{i}\..*" for i in range(layers, config["num_hidden_layers"])]
    model = xtf.models.from_hf(config | {"num_hidden_layers": layers})
    xtf.save_params(model, xtf.load_params(model, whole, ignore=rest), out, tokenizer_from=whole)
    return out


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = xtf.models.from_hf(folder)
    with torch.no_grad():
        return model.logits(xtf.load_params(model, folder), ids)


def train(moe: Path, data: Path, out: Path, *flags: str) -> list[dict[str, float]]:
    """Train on two ranks that share the experts; the rows of metrics."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "xtf.cli", "train"]
    command += ["--model", str(moe), "--data", str(data), "--held-out", "64", "--out", str(out), "--cache", str(out.parent / "cache")]
    command += ["--mesh", "expert=2", "--transforms", "shard,chunk_loss,expert_parallel=expert/2", *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder: Path, data: Path, experts: int) -> list[float]:
    """Of some conversations, with the checkpoint's experts spread over so many simulated ranks, by each rank."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [encode_chat(tokenizer, messages, 96) for messages in read_chat_jsonl(data)[:8]]
    ids = torch.zeros(8, 96, dtype=torch.int64)
    labels, documents = torch.full_like(ids, -100), torch.full_like(ids, -1)
    for i, (tokens, targets) in enumerate(rows):
        ids[i, : len(tokens)], labels[i, : len(tokens)], documents[i, : len(tokens)] = torch.tensor(tokens), torch.tensor(targets), 0
    batch = {"input_ids": ids, "labels": labels, "document_ids": documents}
    plain = xtf.train_step(xtf.models.from_hf(folder), xtf.optim.sgd(lr=1.0))

    def loss(mesh: Mesh) -> float:
        step = xtf.compose(shard(mesh["expert"]), chunk_loss(), expert_parallel(mesh["expert"], overlap=2))(plain)
        return float(step.loss(xtf.load(step, folder).params, xtf.split_batch(batch, mesh)))

    return simulate(loss, expert=experts)


@pytest.mark.parametrize(
    ("layers", "flags"),
    [
        (2, ("--steps", "12", "--seq", "128", "--tokens-per-step", "1024", "--lr", "1e-3", "--backend", "eager")),
        pytest.param(None, ("--steps", "50", "--seq", "256", "--tokens-per-step", "2048", "--lr", "2e-4"), marks=pytest.mark.full),
    ],
    ids=["first layers", "whole"],
)
def test_upcycled_and_trained_on_two_ranks(layers: int | None, flags: tuple[str, ...], real_inputs: Path, tmp_path: Path) -> None:
    source, moe, out = dense(real_inputs, tmp_path / "dense", layers), tmp_path / "moe", tmp_path / "run"
    data = real_inputs / "chat" / "alpaca_en.jsonl"
    upcycle.run(upcycle.UpcycleOptions(source, moe, experts=8, top_k=2))
    ids = AutoTokenizer.from_pretrained(source)("It is a truth universally acknowledged, that a", return_tensors="pt").input_ids
    want = logits(source, ids)
    assert float((logits(moe, ids) - want).abs().max()) <= 1e-5 * float(want.abs().max())

    rows = train(moe, data, out, *flags)
    held_out = [row["held_out_loss"] for row in rows if row.get("held_out_loss") is not None]
    assert held_out[-1] < held_out[0] - 0.1
    load = torch.tensor(rows[-1]["expert_load"])
    assert load.shape[1] == 8 and float(load.min()) > 0  # no expert has died
    assert all(row["dropped_tokens"] == 0 and row["skipped"] == 0 for row in rows if "loss" in row)

    found = [loss for experts in (1, 2, 3) for loss in losses(out / LAST, data, experts)]
    assert max(found) - min(found) <= 1e-6 * max(found)
