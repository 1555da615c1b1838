"""A rank that dies or hangs: the others say which, end, and torchrun starts all of them again from the last saved state."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from run.small import chat, checkpoint
from run.test_train import ROOT, agree, losses

from xtf import cli
from xtf.run.lost import Place, place, told

RECIPE = '''
import dataclasses, os, signal, time
from pathlib import Path
import xtf
from xtf.run import Evaluation, FileData, Files, Recipe, Schedule
from xtf.transforms import shard

class Failing:
    """Batches at one of which the last rank dies or sleeps: what is listed, each once."""
    def __init__(self, inner, how, at, once):
        self.inner, self.how, self.at, self.once = inner, how, at, once
    def __getattr__(self, name):
        return getattr(self.inner, name)
    def __call__(self, step, rank=0, ranks=1):
        done = len(self.once.read_text()) if self.once.exists() else 0
        if step == self.at and rank == ranks - 1 and done < len(self.how):
            self.once.write_text("x" * (done + 1))
            if self.how[done] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)  # here it hangs
        return self.inner(step, rank, ranks)

@dataclasses.dataclass(frozen=True)
class Data(FileData):
    how: str = ""
    once: Path = Path()
    def open(self, mesh, console):
        opened = super().open(mesh, console)
        return opened._replace(batches=Failing(opened.batches, self.how.split(","), 4 if self.how else -1, self.once))

def recipe(*, inputs: str = "", how: str = "", once: str = "") -> Recipe:
    """A recipe."""
    mesh, folder = xtf.mesh(data=-1), Path(inputs)
    step = shard(mesh["data"])(xtf.train_step(xtf.models.from_hf(folder / "model"), xtf.optim.adamw(1e-2)))
    data = Data((folder / "chat.jsonl",), folder / "model", 4, 128, held_out=4, cache=folder / "cache", how=how, once=Path(once))
    return Recipe(mesh, step, data, Schedule(6, 2, wait_for_saves=True), Evaluation(0), Files(folder / "model"))
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    checkpoint(folder / "model")
    chat(folder / "chat.jsonl")
    (folder / "mine.py").write_text(RECIPE)
    return folder


def torchrun(inputs: Path, out: Path, how: str, *more: str, restarts: int = 0, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    settings = {"inputs": inputs, "how": how, "once": out.parent / f"{out.name}.once"}
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", *launcher, "-m", "xtf.cli", "train", str(inputs / "mine.py"), "--out", str(out), *sets, *more]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=170)


def test_a_rank_that_is_killed_and_one_that_hangs_are_named_and_the_run_goes_on_by_itself(inputs: Path, tmp_path: Path) -> None:
    """In step 5 a rank kills itself, the second time it hangs there: torchrun starts both again each time, and the losses are those of one
    process that nothing happened to."""
    done = torchrun(inputs, tmp_path / "out", "dies,sleeps", "--resume", "--timeout", "6", restarts=2)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"xtf: rank 1 of 2 did not come to .*", done.stderr)  # where ranks write at once a line may begin in another
    assert len(said) == 2, done.stderr
    killed, hung = said
    assert "on the axis 'data' and does not answer" in killed and "exitcode: 75" in done.stderr
    line = next(i for i, text in enumerate(RECIPE.splitlines(), 1) if "here it hangs" in text)
    assert f"in time: rank 1 is at {tmp_path / 'out' / 'recipe.py'}, line {line}, in Failing.__call__" in hung
    assert done.stderr.count("going on after step 4") == 2 and "run/train.py" not in done.stderr
    settings = ["--set", f"inputs={inputs}", "--set", f"once={tmp_path / 'once'}"]
    assert cli.main(["train", str(inputs / "mine.py"), "--out", str(tmp_path / "whole"), *settings]) == 0
    assert [row["step"] for row in losses(tmp_path / "out")] == list(range(7))
    agree(tmp_path / "out", tmp_path / "whole")


@pytest.mark.full
def test_of_four_ranks_those_that_are_alive_say_which_is_not(inputs: Path, tmp_path: Path) -> None:
    done = torchrun(inputs, tmp_path / "killed", "dies", "--resume", restarts=1, ranks=4)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("xtf: rank 3 of 4 did not come to ") == 1
    whole = torchrun(inputs, tmp_path / "whole", "", ranks=4)
    assert whole.returncode == 0, whole.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")  # bit for bit


def test_a_timeout_that_is_none(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--out", str(tmp_path / "out"), "--timeout", "0"]) == 2
    assert "--timeout is 0, expected seconds above 0" in capsys.readouterr().err


HERE, THERE = Place("all_reduce 'agree' on the axis 'data'", True), Place("all_gather 'embed' on the axis 'data'", True)
AWAY = Place("at data.py, line 7, in read", False)
CASES = [
    ({0: HERE, 2: HERE}, 4, "ranks 1, 3 of 4 did not come to all_reduce 'agree' on the axis 'data' and do not answer"),
    ({0: HERE, 1: AWAY}, 3, "rank 2 of 3 did not come"),  # rank 1 is only late
    ({0: HERE, 1: AWAY}, 2, "rank 1 of 2 did not come to all_reduce 'agree' on the axis 'data' in time: rank 1 is at data.py, line 7"),
    ({0: HERE, 1: THERE}, 2, "in different collectives: rank 0 in all_reduce 'agree' on the axis 'data'; rank 1 in all_gather 'embed'"),
    ({0: HERE, 1: HERE}, 2, "the connection of ranks that all run broke in all_reduce 'agree' on the axis 'data' (reset by peer)"),
]


@pytest.mark.parametrize(("answers", "size", "message"), CASES)
def test_what_is_said(answers: dict[int, Place], size: int, message: str) -> None:
    assert message in told(HERE, answers, size, "reset by peer")


def test_the_place_of_a_thread() -> None:
    go, at = threading.Event(), threading.Event()

    def here() -> None:
        at.set()
        go.wait()

    thread = threading.Thread(target=here)
    thread.start()
    at.wait()
    found = place(sys._current_frames()[thread.ident or 0])
    go.set()
    thread.join()
    assert not found.waits and "threading.py" in found.at
    assert place(None) == Place("at its end", False)
