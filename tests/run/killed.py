"""A run of two real ranks that is killed again and again; used by `test_kill`, in a process of its own.

That process imports everything once and forks the ranks, which then start in a second. What torchrun does when a rank has died is done
here: the other is asked to end, and killed when it does not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run.small import checkpoint, text

import xtf.cli.train
import xtf.run.plot
import xtf.run.train  # noqa: F401  # imported once, for all ranks
from xtf import cli
from xtf.checkpoint.training_index import read_index

RANKS, PATIENCE = 2, 60.0


def flags(inputs: Path, out: Path, steps: int) -> list[str]:
    return [
        "train", "--model", str(inputs / "model"), "--data", str(inputs / "text.jsonl"), "--held-out", "8", "--steps", str(steps),
        "--seq", "64", "--tokens-per-step", "256", "--lr", "1e-2", "--evaluate-every", "7", "--save-every", "1", "--keep-every", "5",
        "--backend", "eager", "--cache", str(inputs / "cache"), "--out", str(out),
    ]  # fmt: skip


def forked(work: Callable[[], int], log: Path) -> int:
    """A process that does some work; its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = work()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ranks(arguments: list[str], log: Path) -> list[int]:
    """The processes of two ranks that run a command."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank: int) -> int:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        return cli.main(arguments)

    return [forked(lambda rank=rank: work(rank), log) for rank in range(RANKS)]


def ended(pid: int, seconds: float) -> int | None:
    """How a process ended: its exit status, or minus the signal; ``None`` if it has not."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)


def rows(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def pointed(out: Path) -> int:
    """The step that ``latest`` names, 0 for none."""
    file = out / "checkpoints" / "latest"
    return int(file.read_text().strip().removeprefix("step-")) if file.exists() else 0


def hidden(out: Path) -> list[str]:
    folder = out / "checkpoints"
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) if folder.is_dir() else []


def check_loadable(path: Path) -> None:
    """Read every byte of a training checkpoint."""
    index = read_index(path)
    index.check_files(contents=True)
    out = {name: torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype)) for name, leaf in index.leaves.items()}
    index.read({name: ([(0, n) for n in value.shape], value) for name, value in out.items()})


def kill_once(out: Path, pids: list[int], kind: str, chosen: random.Random) -> dict[str, Any]:
    """Kill ranks that run, at a random instant."""
    begun, deadline, goal = rows(out), time.monotonic() + PATIENCE, chosen.randrange(1, 4)
    while rows(out) < begun + goal or (begun and pointed(out) < 2):
        alive = [os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in pids]
        assert all(alive) and time.monotonic() < deadline, "the run did not get on"
        time.sleep(0.002)
    if "inside" in kind:
        while not any(name.startswith(".step-") for name in hidden(out)):
            assert time.monotonic() < deadline, "nothing was saved"
    time.sleep(chosen.random() * (0.02 if "inside" in kind else 0.2))
    before = pointed(out)
    victims = [chosen.randrange(RANKS)] if "one" in kind else list(range(RANKS))
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    codes = {rank: ended(pids[rank], PATIENCE) for rank in victims}
    for rank in set(range(RANKS)) - set(victims):
        codes[rank] = ended(pids[rank], 1.0)
        if codes[rank] is None:
            os.kill(pids[rank], signal.SIGTERM)
            codes[rank] = ended(pids[rank], 20.0)
    return {"kind": kind, "before": before, "after": pointed(out), "codes": [codes[rank] for rank in range(RANKS)], "hidden": hidden(out)}


KINDS = ("both", "inside", "one", "inside, one")


def main(folder: Path, kills: int, seed: int) -> None:
    """Print what happened: a JSON object for each kill, and one for the end."""
    chosen, inputs, log = random.Random(seed), folder / "inputs", folder / "log.txt"
    inputs.mkdir()
    text(inputs / "text.jsonl")
    assert ended(forked(lambda: int(checkpoint(inputs / "model") is None), log), PATIENCE) == 0
    steps = 6 * kills
    whole, out = folder / "whole", folder / "killed"
    for pid in ranks(flags(inputs, whole, steps), log):
        assert ended(pid, 300) == 0, log.read_text()[-3000:]
    for at in range(kills):
        begun = rows(out) > 0
        pids = ranks(["train", "--out", str(out), "--resume"] if begun else flags(inputs, out, steps), log)
        found = kill_once(out, pids, KINDS[at % len(KINDS)], chosen)
        if found["after"]:
            check_loadable(out / "checkpoints" / f"step-{found['after']:08d}")
        print(json.dumps(found), flush=True)
    for pid in ranks(["train", "--out", str(out), "--resume"], log):
        assert ended(pid, 300) == 0, log.read_text()[-3000:]
    print(json.dumps({"kind": "end", "hidden": hidden(out), "states": sorted(p.name for p in (out / "checkpoints").glob("step-*"))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
