"""`xtf train` as it is used: by flags and by recipe files, stopped, resumed, on several ranks, with bad input."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run.small import chat, checkpoint, text
from safetensors.torch import load_file

from xtf import cli
from xtf.run import read_metrics

ROOT = Path(__file__).parents[2]
TIMED = {"seconds", "tokens_per_second", "mfu", "memory_bytes"}
"""Metrics that differ from run to run."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    checkpoint(folder / "model")
    chat(folder / "chat.jsonl")
    text(folder / "text.jsonl")
    return folder


def flags(inputs: Path, out: Path, *more: str) -> list[str]:
    """Eight steps on conversations."""
    return [
        "train", "--model", str(inputs / "model"), "--data", str(inputs / "chat.jsonl"), "--held-out", "8", "--steps", "8", "--seq", "128",
        "--tokens-per-step", "512", "--lr", "1e-2", "--evaluate-every", "4", "--save-every", "3", "--backend", "eager",
        "--cache", str(inputs / "cache"), "--out", str(out), *more,
    ]  # fmt: skip


def losses(out: Path) -> list[dict[str, Any]]:
    """What a run computed, without its times."""
    return [{name: value for name, value in row.items() if name not in TIMED} for row in read_metrics(out)]


@pytest.fixture(scope="module")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing stopped."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert cli.main(flags(inputs, out)) == 0
    return out


def spawn(arguments: list[str], ranks: int = 1, cwd: Path | None = None) -> subprocess.Popen[str]:
    launcher = (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else [sys.executable]
    )
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launcher, "-m", "xtf.cli", *arguments]
    return subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        file = out / "metrics.jsonl"
        if file.exists() and file.read_text().count("\n") > step:  # the row before training counts
            return
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        time.sleep(0.1)
    raise AssertionError("the run did not get on")


def test_a_run_leaves_what_it_says(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {"run.json", "recipe.py", "metrics.jsonl", "loss.png", "checkpoints", "best", "checkpoint"} <= names
    rows = read_metrics(finished)
    assert [row["step"] for row in rows] == list(range(9))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [0, 4, 8]
    assert {"loss", "grad_norm", "lr", "tokens", "padding", "imbalance", "mfu", "memory_bytes", "epoch", "seconds"} <= rows[3].keys()
    first, last = (row["held_out_loss"] for row in (rows[0], rows[-1]))
    assert isinstance(first, float) and isinstance(last, float) and last < first - 0.1
    about = json.loads((finished / "run.json").read_text())
    assert about["settings"]["steps"] == 8 and about["versions"]["torch"] and "train --model" in about["command"]
    assert sorted(path.name for path in (finished / "checkpoints").glob("step-*")) == ["step-00000003", "step-00000006"]


def test_resumed_runs_have_the_same_losses_bit_for_bit(inputs: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    process = spawn(flags(inputs, out, "--steps", "8"))
    wait_for_step(out, 4, process)
    process.kill()
    process.communicate()
    assert cli.main(["train", "--out", str(out), "--resume"]) == 0
    assert losses(out) == losses(finished)
    ours, theirs = (load_file(run / "checkpoint" / "model.safetensors") for run in (out, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_says_how_to_go_on(inputs: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "stopped"
    process = spawn(flags(inputs, out, "--steps", "2000", "--save-every", "0", "--evaluate-every", "0"))
    wait_for_step(out, 2, process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    done = read_metrics(out)[-1]["step"]
    assert f"saved at step {done}" in said and "--resume" in said
    assert (out / "checkpoints" / f"step-{done:08d}").is_dir()


def on_ranks(inputs: Path, out: Path, ranks: int) -> Path:
    process = spawn(flags(inputs, out), ranks)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert said.count("held out 8 documents") == 1  # the first rank speaks
    return out


@pytest.fixture(scope="module")
def on_two(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing stopped."""
    return on_ranks(inputs, tmp_path_factory.mktemp("runs") / "two", 2)


def test_a_signal_to_one_rank_saves_and_stops_all(inputs: Path, tmp_path: Path) -> None:
    """As Slurm sends it to every process, or a person to one: here the second rank alone."""
    out = tmp_path / "stopped"
    process = spawn(flags(inputs, out, "--steps", "2000", "--save-every", "0", "--evaluate-every", "0"), 2)
    wait_for_step(out, 2, process)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    (second,) = [pid for pid in ranks if b"\0LOCAL_RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(second, signal.SIGUSR1)
    _, said = process.communicate(timeout=60)
    done = read_metrics(out)[-1]["step"]
    assert said.count(f"saved at step {done}") == 2 and f"exitcode  : {128 + signal.SIGUSR1}" in said, said
    assert (out / "checkpoints" / f"step-{done:08d}").is_dir()


def agree(ours: Path, theirs: Path) -> None:
    for mine, other in zip(read_metrics(ours), read_metrics(theirs), strict=True):
        for name in other.keys() & {"cross_entropy", "held_out_loss"}:
            assert mine[name] == pytest.approx(other[name], rel=1e-6)


def test_two_ranks_give_the_losses_of_one_process(finished: Path, on_two: Path) -> None:
    agree(on_two, finished)


@pytest.mark.full
def test_four_ranks_give_the_losses_of_one_process(inputs: Path, finished: Path, tmp_path: Path) -> None:
    agree(on_ranks(inputs, tmp_path / "four", 4), finished)


def test_a_stopped_run_of_ranks_goes_on_bit_for_bit(inputs: Path, on_two: Path, tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    process = spawn(flags(inputs, out), 2)
    wait_for_step(out, 4, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    process = spawn(["train", "--out", str(out), "--resume"], 2)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert losses(out) == losses(on_two)


def test_a_run_of_two_ranks_goes_on_on_one_from_another_folder(inputs: Path, finished: Path, tmp_path: Path) -> None:
    """Begun with a fixed mesh and paths relative to where it was begun."""
    out = tmp_path / "moved"
    arguments = [argument.removeprefix(f"{inputs}/") for argument in flags(inputs, out, "--mesh", "data=2")]
    process = spawn(arguments, 2, inputs)
    wait_for_step(out, 4, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    process = spawn(["train", "--out", "moved", "--resume", "--mesh", "data=1"], cwd=tmp_path)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0 and "going on after step" in said, said
    agree(out, finished)


MIXED = ["--packing", "balanced", "--mix", "3", "1", "--loss-weights", "1", "0.5", "--learn", "answers", "everything", "--held-out", "4"]


def mixed(inputs: Path, out: Path) -> list[str]:
    """Two sources in proportions, in balanced rows."""
    return flags(inputs, out, "--data", str(inputs / "chat.jsonl"), str(inputs / "text.jsonl"), *MIXED)


def test_a_mixture_in_balanced_rows_goes_on_bit_for_bit_on_other_ranks(inputs: Path, tmp_path: Path) -> None:
    whole, out, two = tmp_path / "whole", tmp_path / "stopped", tmp_path / "two"
    assert cli.main(mixed(inputs, whole)) == 0
    rows = read_metrics(whole)
    chats, texts = (float(str(rows[-1][f"{name}/epoch"])) for name in ("chat", "text"))
    assert chats > 0 and texts > 0 and {"chat/epoch", "text/epoch", "epoch"} <= rows[1].keys()
    about = json.loads((whole / "run.json").read_text())["data"]["sources"]
    assert [(source["name"], source["weight"]) for source in about] == [("chat", 3.0), ("text", 1.0)]
    drawn = [done * source["documents"] for done, source in zip((chats, texts), about, strict=True)]
    assert drawn[0] / sum(drawn) == pytest.approx(0.75, abs=0.12)
    process = spawn(mixed(inputs, out))
    wait_for_step(out, 4, process)
    process.kill()
    process.communicate()
    shutil.copytree(out, two)
    assert cli.main(["train", "--out", str(out), "--resume"]) == 0
    assert losses(out) == losses(whole)
    process = spawn(["train", "--out", str(two), "--resume"], 2)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    agree(two, whole)
    assert cli.main(["train", "--out", str(out), "--resume", "--mix", "1", "1"]) == 2


RECIPE = '''
from pathlib import Path
import xtf
from xtf.run import DemoText, Evaluation, Files, Recipe, Schedule
from xtf.data.text import TOKENIZER_FILE

def recipe(*, lr: float = 1e-3, steps: int = 2, model: str = "tiny-moe") -> Recipe:
    """A recipe.

    Args:
        lr: the rate.
    """
    mesh = xtf.mesh(data=-1)
    step = xtf.train_step(xtf.models.preset(model), xtf.optim.adamw(lr))
    return Recipe(mesh, step, DemoText(rows=8, seq=128), Schedule(steps), Evaluation(0), Files(TOKENIZER_FILE.parent), title="mine")
'''


def test_a_recipe_file_is_run_copied_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(RECIPE)
    assert cli.main(["train", str(file), "--set", "lr=2e-3", "--out", str(out)]) == 0
    assert (out / "recipe.py").read_text() == RECIPE
    about = json.loads((out / "run.json").read_text())
    assert (about["recipe"], about["settings"]) == ("mine.py", {"lr": 0.002, "steps": 2, "model": "tiny-moe"})
    assert read_metrics(out)[-1]["lr"] == pytest.approx(2e-3)
    assert cli.main(["train", str(file), "--set", "lr=2e-3", "--out", str(out), "--resume"]) == 0
    assert cli.main(["train", str(file), "--set", "lr=1e-3", "--out", str(out), "--resume"]) == 2
    assert "lr is 0.002 there and 0.001 here" in capsys.readouterr().err
    file.write_text(RECIPE + "\n# changed\n")
    assert cli.main(["train", str(file), "--out", str(out), "--resume"]) == 2
    assert "is not the one that was copied" in capsys.readouterr().err


def test_the_copied_recipe_does_the_same_again(inputs: Path, finished: Path, tmp_path: Path) -> None:
    assert cli.main(["train", str(finished / "recipe.py"), "--out", str(tmp_path / "again")]) == 0
    assert losses(tmp_path / "again") == losses(finished)


def test_print_shows_and_does_nothing(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(flags(inputs, tmp_path / "out", "--print", "--transforms", "chunk_loss=64,accumulate=2")) == 0
    shown = capsys.readouterr().out
    for part in ("chunk_loss(tokens=64) · accumulate(2)", "lr", "0.01", "512 (4 rows of 128)", "parameters", "MB", "chat.jsonl"):
        assert part in shown
    assert not (tmp_path / "out").exists()


def test_print_allocates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--print", "--seq", "1000000", "--tokens-per-step", "100000000"]) == 0
    assert "not estimated for a micro-batch of 100,000,000 tokens" in capsys.readouterr().out


def test_a_recipe_that_fails_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.py").write_text("def recipe():\n    return 1 / 0\n")
    assert cli.main(["train", str(tmp_path / "r.py")]) == 2
    assert capsys.readouterr().err == f"xtf: the recipe {tmp_path / 'r.py'}, line 2 fails: ZeroDivisionError: division by zero\n"


def test_damaged_states_are_passed_over_or_refused(
    inputs: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "damaged"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoint")  # as if it had been killed before the end
    newest = out / "checkpoints" / "step-00000006" / "rank-00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    both = tmp_path / "both"
    shutil.copytree(out, both)
    assert cli.main(["train", "--out", str(out), "--resume"]) == 0
    said = capsys.readouterr().err
    assert "step-00000006" in said and "damaged" in said and "going on after step 3 of 8" in said
    assert losses(out) == losses(finished)
    (both / "checkpoints" / "step-00000003" / "state.json").write_text("{")
    before = losses(both)
    assert cli.main(["train", "--out", str(both), "--resume"]) == 2
    assert "can be used" in capsys.readouterr().err
    assert losses(both) == before


def test_a_flipped_byte_is_found_when_a_run_goes_on(
    inputs: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "flipped"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoint")
    newest = out / "checkpoints" / "step-00000006" / "rank-00000.safetensors"
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    assert cli.main(["train", "--out", str(out), "--resume"]) == 0
    said = capsys.readouterr().err
    assert "step-00000006 is passed over" in said and "checksum" in said and "going on after step 3 of 8" in said
    assert losses(out) == losses(finished)


def test_some_states_are_kept_for_good(inputs: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kept"
    more = ["--save-every", "1", "--keep", "1", "--keep-every", "3", "--wait-for-saves"]
    assert cli.main(flags(inputs, out, *more)) == 0
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest", *(f"step-0000000{n}" for n in (3, 6, 7))]
    assert losses(out) == losses(finished)
    assert cli.main(flags(inputs, tmp_path / "bad", "--save-every", "2", "--keep-every", "3")) == 2
    assert "keep_every is 3, expected a multiple of save_every (2)" in capsys.readouterr().err


def test_pretraining_text(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "text"
    more = ["--data", str(inputs / "text.jsonl"), "--steps", "2", "--transforms", "chunk_loss,accumulate=2"]
    assert cli.main(flags(inputs, out, *more)) == 0
    assert json.loads((out / "run.json").read_text())["data"]["held_out_documents"] >= 8  # long ones are split


BAD: list[tuple[list[str], str]] = [
    (["--data", "no.jsonl"], "no.jsonl does not exist"),
    (["--data", "."], f"the data file {Path.cwd()} is a folder"),
    (["--mesh", "data=2"], "--mesh data=2: the axes {'data': 2} hold 2 ranks, but there are 1"),
    (["--transforms", "expert_parallel=expert/2"], "expert_parallel=expert/2: the mesh has no axis expert; it has data"),
    (
        ["--transforms", "expert_parallel=data/2.5"],
        "expert_parallel=data/2.5: expected an axis and a number of parts, as expert_parallel=data/2",
    ),
    (["--transforms", "expert_parallel=data"], "the model 'llama' has no experts"),
    (["--seq", "2", "--tokens-per-step", "8"], "rows of more tokens (--seq)"),
    (["--clip", "nan"], "--clip is nan"),
    (["--keep", "0"], "--keep is 0, expected at least 1"),
    (["--seed", "-1"], "--seed is -1"),
    (["--model", "no/such"], "no/such"),
    (["--model", "tiny-mo"], "did you mean tiny-moe"),
    (["--transforms", "chunk_los"], "did you mean chunk_loss"),
    (["--transforms", "accumulate=x"], "accumulate=x: expected a number"),
    (["--transforms", "shard=model"], "the mesh has no axis model"),
    (["--mesh", "data"], "--mesh data: expected"),
    (["--tokens-per-step", "500"], "expected a multiple of --seq (128), as 512"),
    (["--lr", "2"], "--lr is 2.0, expected a rate between 0 and 1"),
    (["--held-out", "60"], "60 documents, 60 are to be held out"),
    (["--seq", "1"], "--seq is 1"),
    (["--template", "no.jinja"], "no.jinja"),
    (["--set", "lr=1"], "--set lr=1 is for a recipe file"),
    (["--mix", "1", "2"], "--mix has 2 values for 1 data files"),
    (["--mix", "-1"], "--mix is -1.0: expected finite numbers above 0"),
    (["--loss-weights", "0"], "--loss-weights is 0.0: expected finite numbers above 0"),
    (["--learn", "answers", "everything"], "--learn has 2 values for 1 data files"),
]


@pytest.mark.parametrize(("more", "message"), BAD, ids=[" ".join(more) for more, _ in BAD])
def test_bad_input_is_one_message(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    out = tmp_path / "out"
    assert cli.main(flags(inputs, out, *more)) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
    assert not out.exists()


ANSWER = {"role": "assistant", "content": "Hello."}
ASK = {"role": "user", "content": "Hi"}
GOOD = json.dumps({"messages": [ASK, ANSWER]})
BAD_ROWS: list[tuple[str, str]] = [
    ("{not json", "not JSON"),
    ('{"question": "Hi", "answer": "Hello."}', "question"),
    (json.dumps({"messages": [{"role": "robot", "content": "Hi"}, ANSWER]}), "robot"),
    (json.dumps({"messages": [ANSWER, ASK]}), "message 0"),
    (json.dumps({"messages": []}), "messages"),
    (json.dumps({"messages": [ASK]}), "assistant"),
    (json.dumps({"messages": [ASK, ANSWER | {"loss_weight": 0}]}), "nothing to train on"),
    (json.dumps({"messages": [ASK, {"role": "assistant", "content": [{"type": "image"}]}]}), "image"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS, ids=[reason for _, reason in BAD_ROWS])
def test_a_bad_line_is_named_or_skipped(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, reason: str) -> None:
    file, out = tmp_path / "bad.jsonl", tmp_path / "out"
    file.write_text("\n".join([GOOD] * 20 + [row] + [GOOD] * 20))
    more = ["--data", str(file), "--cache", str(tmp_path / "cache"), "--steps", "1", "--evaluate-every", "0"]
    assert cli.main(flags(inputs, out, *more)) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"xtf: {file}, line 21: ") and reason in said
    assert not out.exists()
    assert cli.main(flags(inputs, out, *more, "--skip-bad-lines")) == 0
    said = capsys.readouterr().err
    assert f"skipped {file}, line 21: " in said and reason in said
    assert json.loads((out / "run.json").read_text())["data"]["skipped_lines"] == 1


def test_a_tokenizer_without_a_template(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(inputs / "model", bare)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    assert cli.main(flags(inputs, tmp_path / "out", "--tokenizer", str(bare))) == 2
    said = capsys.readouterr().err
    assert "chat_template" in said and "chatml" in said
    assert not (tmp_path / "out").exists()


def test_a_full_disk_loses_nothing(inputs: Path, finished: Path, tmp_path: Path) -> None:
    """Files may have 200 kB: the first state does not fit, and the run goes on when there is room."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))

    out = tmp_path / "out"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "xtf.cli", *flags(inputs, out)]
    done = subprocess.run(command, env=env, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "File too large" in done.stderr.splitlines()[-1] and str(out) in done.stderr.splitlines()[-1]
    assert not list((out / "checkpoints").iterdir())
    assert cli.main(["train", "--out", str(out), "--resume"]) == 0
    assert losses(out) == losses(finished)


def test_a_vocabulary_larger_than_the_models(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "narrow", vocab_size=300)
    assert cli.main(flags(inputs, tmp_path / "out", "--model", str(tmp_path / "narrow"))) == 2
    assert "the model's vocabulary is 300" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_taken(inputs: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = losses(finished)
    assert cli.main(flags(inputs, finished)) == 2
    assert "go on with it by --resume" in capsys.readouterr().err
    assert cli.main(flags(inputs, finished, "--resume", "--lr", "5e-4")) == 2
    assert "lr is 0.01 there and 0.0005 here" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert cli.main(flags(inputs, tmp_path / "full")) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(flags(inputs, finished, "--resume")) == 0
    assert "is finished: 8 steps are done" in capsys.readouterr().err
    assert losses(finished) == before
