"""A run of two real ranks on real text, killed with SIGKILL: between saves and inside them, all ranks and one only. It goes on each time,
and has the losses of a run that nobody killed, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from xtf.run import read_metrics

ROOT = Path(__file__).parents[2]
TIMED = {"seconds", "tokens_per_second", "mfu", "memory_bytes"}


def losses(out: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMED} for row in read_metrics(out)]


def check_killed(folder: Path, kills: int, seed: int) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, sys.path)])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "run.killed", str(folder), str(kills), str(seed)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60 + 30 * kills)
    log = (folder / "log.txt").read_text()[-3000:] if (folder / "log.txt").exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log
    *found, end = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == kills
    for kill in found:
        assert -signal.SIGKILL in kill["codes"] and None not in kill["codes"], kill  # no rank hangs when the other has died
        assert kill["after"] >= kill["before"], kill  # what latest named is never lost
        assert kill["codes"][0] == -signal.SIGKILL or kill["hidden"] == [], kill  # the first rank, alive, drops what it cannot finish
        assert len(kill["hidden"]) <= 3, kill  # of one save, one removal and one pointer, whatever was left before
    assert [kill["before"] for kill in found] == sorted(kill["before"] for kill in found)
    assert sum(any(name.startswith(".step-") for name in kill["hidden"]) for kill in found) >= kills // 5  # inside a save
    kept = [*range(5, 6 * kills - 2, 5), 6 * kills - 2, 6 * kills - 1]
    assert end["hidden"] == [] and end["states"] == [f"step-{step:08d}" for step in sorted(set(kept))]
    assert losses(folder / "killed") == losses(folder / "whole")
    ours, theirs = (load_file(folder / name / "checkpoint" / "model.safetensors") for name in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_killed_at_random_instants(tmp_path: Path) -> None:
    check_killed(tmp_path, 5, seed=1)


@pytest.mark.full
def test_killed_at_many_random_instants(tmp_path: Path) -> None:
    check_killed(tmp_path, 20, seed=2)
