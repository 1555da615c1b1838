"""The examples, as a user runs them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from xtf.data import encode_chat, read_chat_jsonl

ROOT = Path(__file__).parent.parent


def test_new_layout(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "new_layout.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "qwen3 on tensor=2: holds" in out and "qwen3 on data=3, tensor=2: holds" in out
    assert "shard(data=3) · tensor_parallel(tensor=2) · chunk_loss(tokens=7)" in out


def test_new_layout_is_short() -> None:
    source = (ROOT / "examples" / "new_layout.py").read_text()
    transform = source[source.index("def tensor_parallel") : source.index("def main")]
    assert len(transform.splitlines()) < 100


def finetune(real_inputs: Path, out: Path, ranks: int, *flags: str) -> tuple[float, float]:
    """Run the example; the held-out loss before and after."""
    example = [str(ROOT / "examples" / "finetune.py"), "--model", str(real_inputs / "smollm2-135m"), "--out", str(out)]
    launcher = (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else [sys.executable]
    )
    command = [*launcher, *example, "--data", str(real_inputs / "chat" / "alpaca_en.jsonl"), *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"held-out loss ([\d.]+) before, ([\d.]+) after; saved to", done.stdout)
    assert found is not None, done.stdout
    return float(found[1]), float(found[2])


def loss_in_transformers(folder: Path, real_inputs: Path, rows: int, seq: int) -> float:
    """Mean cross-entropy per supervised token of the held-out conversations, one by one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for messages in read_chat_jsonl(real_inputs / "chat" / "alpaca_en.jsonl")[:rows]:
        ids, labels = encode_chat(tokenizer, messages, seq)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        total += float(F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
        count += sum(label >= 0 for label in labels[1:])
    return total / count


@pytest.mark.parametrize("ranks", [1, 2])
def test_finetune_first_layers(ranks: int, real_inputs: Path, tmp_path: Path) -> None:
    flags = ["--layers", "2", "--steps", "6", "--rows", "4", "--seq", "128", "--lr", "1e-3"]
    before, after = finetune(real_inputs, tmp_path / "out", ranks, *flags)
    assert after < before - 0.1
    if ranks == 2:
        assert loss_in_transformers(tmp_path / "out", real_inputs, 64, 128) == pytest.approx(after, abs=1e-4)


@pytest.mark.full
def test_finetune_whole_model_on_two_ranks(real_inputs: Path, tmp_path: Path) -> None:
    before, after = finetune(real_inputs, tmp_path / "out", 2, "--steps", "32", "--rows", "8", "--seq", "256", "--lr", "2e-4")
    assert after < before - 0.1
    assert loss_in_transformers(tmp_path / "out", real_inputs, 64, 256) == pytest.approx(after, abs=1e-4)
