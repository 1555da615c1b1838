"""The terminal: progress, metrics, plot, sampling, and the command line."""

from __future__ import annotations

import io
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import xtf
from xtf import cli
from xtf.data import demo_tokenizer
from xtf.run import MetricsWriter, Progress, generate, plot_loss, read_metrics
from xtf.run.interrupt import Interrupted, deferred_interrupt
from xtf.run.memory import available_memory, check_fits
from xtf.run.plot import smoothed

ROOT = Path(__file__).parents[1]

# ---- progress ----


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def train(progress: Progress, clock: Clock, steps: int, seconds: float = 1.0) -> None:
    with progress:
        clock.now += 30  # the first step compiles
        for step in range(1, steps + 1):
            clock.now += seconds
            progress.update(step, loss=8 / step, tokens=512)


def test_plain_lines_every_few_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    train(Progress(22, console=Console(file=out, width=80), every=5, clock=clock), clock, 22)
    lines = out.getvalue().splitlines()
    assert [line.split("   ")[0] for line in lines] == [f"step {n}/22" for n in (1, 6, 11, 16, 21, 22)]
    assert lines[0] == "step 1/22   loss 8.000"
    assert lines[1] == "step 6/22   loss 1.333   512 tokens/s   0:16 left"  # the first step's 31 seconds do not count
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


def test_pauses_do_not_count() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(3, console=Console(file=out, width=80), every=0, clock=clock) as progress:
        for step in (1, 2, 3):
            clock.now += 1
            progress.update(step, loss=None, tokens=10)
            progress.pause()
            clock.now += 60
            progress.resume()
    assert out.getvalue().splitlines()[-1] == "step 3/3   10 tokens/s   0:00 left"


def test_live_line_in_a_terminal() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    progress = Progress(3, console=console, clock=clock)
    train(progress, clock, 3)
    text = out.getvalue()
    assert "\x1b[?25l" in text and "\x1b[?25h" in text  # the cursor is hidden, and shown again
    assert "step 3/3" in text and "loss 2.667" in text and "512 tokens/s" in text and "0:00 left" in text
    assert text.count("\n") <= 2  # redrawn in place
    assert progress.tokens_per_second == pytest.approx(512)


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress(3, rank=1, clock=clock)
    train(progress, clock, 3)
    progress.message("hello")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("total", "done"), [(0, 0), (3, 4), (3, -1)])
def test_impossible_progress_is_refused(total: int, done: int) -> None:
    with pytest.raises(ValueError, match="total is"):
        Progress(total, done=done)


# ---- metrics ----


def test_metrics_are_there_at_once_and_finite_or_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step, loss in enumerate([2.5, math.nan, math.inf], 1):
            row = writer.write(step, {"loss": torch.tensor(loss), "tokens": torch.tensor(7), "lr": 0.1})
            assert row == {"step": step, "loss": loss if step == 1 else None, "tokens": 7, "lr": 0.1}
            assert read_metrics(tmp_path)[-1] == row  # flushed
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in lines] == [1, 2, 3]


def test_a_resumed_run_goes_on_in_its_file(tmp_path: Path) -> None:
    for rows in ([(1, 5.0), (2, 4.0)], [(2, 4.5), (3, 3.0)]):
        with MetricsWriter(tmp_path) as writer:
            for step, loss in rows:
                writer.write(step, {"loss": loss})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [(1, 5.0), (2, 4.5), (3, 3.0)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, active=False) as writer:
        assert writer.write(1, {"loss": 1.0}) == {"step": 1, "loss": 1.0}
    assert list(tmp_path.iterdir()) == []


def test_metrics_with_dims_become_lists(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(1, {"load": torch.tensor([[0.25, math.nan], [1.0, 2.0]]), "none": torch.zeros(0)})
    assert read_metrics(tmp_path) == [{"step": 1, "load": [[0.25, None], [1.0, 2.0]], "none": []}]


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    wrong: Any = {"load": "high"}
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="metric 'load' is a str"):
        writer.write(1, wrong)


def test_tensorboard_files(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(1, {"loss": 2.0, "bad": math.nan})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["loss/loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss/loss")] == [(1, 2.0)]


@pytest.mark.parametrize(("line", "message"), [("{", "line 2: not JSON"), ("[]", "line 2: expected an object"), ("{}", 'integer "step"')])
def test_wrong_metrics_are_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_metrics(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_metrics(tmp_path / "elsewhere")


# ---- plot ----


def test_plot_is_a_png_with_every_part(tmp_path: Path) -> None:
    from matplotlib.image import imread

    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 41):
            held_out = {"held_out_loss": 4.0} if step % 10 == 0 else {}
            writer.write(step, {"loss": math.nan if step == 3 else 5.0 - step / 40, **held_out})
    plain = imread(plot_loss(tmp_path))
    with_line = imread(plot_loss(tmp_path, entropy=4.6))
    assert plain.shape == (675, 1200, 4)
    assert not (plain == with_line).all()
    with MetricsWriter(tmp_path) as writer:
        writer.write(41, {"loss": 3.9, "load_violation": torch.tensor([0.2, 0.5])})
    assert imread(plot_loss(tmp_path, entropy=4.6)).shape == (810, 1200, 4)  # the panel of the experts' load
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_plot_of_one_step_and_of_none(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="nothing to draw"):
            plot_loss(tmp_path)
        writer.write(1, {"loss": 5.0})
    assert plot_loss(tmp_path, entropy=6.0, title="one").is_file()


def test_smoothing_keeps_straight_lines_inside_and_does_not_lag() -> None:
    line = [float(i) for i in range(200)]
    assert smoothed(line)[50:150] == pytest.approx(line[50:150], abs=1e-9)
    assert smoothed([3.0]) == [3.0]


# ---- sampling ----


class Bigram:
    """A model that knows which token follows which: ``scores`` is (vocab, vocab)."""

    def __init__(self, scores: Tensor) -> None:
        self.vocab = len(scores)
        self.seen: list[int] = []
        self._scores = scores

    def logits(self, params: Any, input_ids: Tensor) -> Tensor:
        self.seen.append(input_ids.shape[1])
        return self._scores[input_ids]


def successor() -> Bigram:
    """Each token is followed by the next, almost surely."""
    return Bigram(torch.eye(2048).roll(1, 1) * 50)


def ids_of(text: str) -> list[int]:
    return demo_tokenizer().encode(text, add_special_tokens=False).ids


def test_generate_follows_the_model() -> None:
    (start,) = ids_of("A")
    for temperature in (0.0, 0.8):
        text = generate(successor(), None, demo_tokenizer(), "A", tokens=5, temperature=temperature)
        assert text == demo_tokenizer().decode(list(range(start + 1, start + 6)))
    assert generate(successor(), None, demo_tokenizer(), "A", tokens=5, stop=start + 3) == demo_tokenizer().decode([start + 1, start + 2])
    assert generate(successor(), None, demo_tokenizer(), "A", tokens=0) == ""


def test_generate_is_a_function_of_its_seed() -> None:
    model = Bigram(torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0)))
    texts = [generate(model, None, demo_tokenizer(), "A", tokens=20, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_generate_sees_no_more_than_its_window() -> None:
    model = successor()
    generate(model, None, demo_tokenizer(), "A B C", tokens=6, window=5)
    assert model.seen[0] == len(ids_of("A B C")) and max(model.seen) == 5


def test_nucleus_keeps_the_smallest_set_that_is_enough() -> None:
    probabilities = torch.zeros(2048, dtype=torch.float64)
    probabilities[ord("a") - 30 : ord("a") - 26] = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    model = Bigram(probabilities.log().expand(2048, -1))
    decode: Callable[[int], str] = lambda i: demo_tokenizer().decode([ord("a") - 30 + i])  # noqa: E731

    def drawn(top_p: float) -> set[str]:
        return {generate(model, None, demo_tokenizer(), "A", tokens=1, temperature=1.0, top_p=top_p, seed=seed) for seed in range(200)}

    assert drawn(0.5) == {decode(0)}
    assert drawn(0.7) == {decode(0), decode(1)}
    assert drawn(0.9) == {decode(0), decode(1), decode(2)}
    assert drawn(1.0) == {decode(0), decode(1), decode(2), decode(3)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": -1}, "tokens is -1"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"window": 0}, "window is 0"),
        ({"prompt": ""}, "prompt is empty"),
        ({"model": Bigram(torch.zeros(4, 4))}, "vocabulary is 4"),
        ({"model": Bigram(torch.full((2048, 2048), math.nan))}, "not numbers"),
    ],
)
def test_impossible_samples_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"model": successor(), "params": None, "tokenizer": demo_tokenizer(), "prompt": "A", "tokens": 3} | changes
    with pytest.raises(ValueError, match=message):
        generate(**arguments)


# ---- Ctrl-C ----


def test_ctrl_c_waits_for_the_end_of_a_step() -> None:
    told: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt(lambda: told.append(1)) as interrupt:
        with interrupt.held():
            signal.raise_signal(signal.SIGINT)
            assert interrupt.asked and told == [1]
        with pytest.raises(KeyboardInterrupt), interrupt.held():
            signal.raise_signal(signal.SIGINT)  # the second does not wait
    with deferred_interrupt(lambda: None) as interrupt, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # between steps nothing waits
    assert signal.getsignal(signal.SIGINT) == before


# ---- the command line ----


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"xtf {xtf.__version__}\n"


def test_help_shows_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert all(name in capsys.readouterr().out for name in ["train"])
    assert cli.main([]) == 2
    assert "usage: xtf COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: xtf {name}" in capsys.readouterr().out


def test_train_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("--steps", "--seed", "--out RUN_DIR", "--backend", "Updates to make (default: 300)", "xtf train --out RUN --resume"):
        assert words in shown


@pytest.mark.parametrize("args", [["train", "--step", "3"], ["train", "--steps", "many"], ["train", "--backend", "fast"]])
def test_what_cannot_be_parsed_ends_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    assert "xtf train --help" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "hint"), [("trian", "did you mean train?"), ("fly", f"there is {', '.join(cli.COMMANDS)}.")])
def test_unknown_commands_name_known_ones(command: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command]) == 2
    assert capsys.readouterr().err == f"xtf: no command {command!r}; {hint} See xtf --help\n"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[alloc_cpu.cpp:132] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation"),
        MemoryError(),
    ],
)
def test_too_little_memory_is_one_message(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*given: Any) -> None:
        raise error

    monkeypatch.setattr("xtf.cli.train.run", fail)
    assert cli.main(["train"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("xtf: out of memory") and err.count("\n") == 1 and "try a smaller --tokens-per-step" in err
    assert str(error).partition("\n")[0] in err


def test_other_failures_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("xtf.cli.train.run", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        cli.main(["train"])


def test_a_model_that_does_not_fit_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("xtf.run.train.available_memory", lambda: 24 * 10**9)
    assert cli.main(["train", "--model", "llama-3.1-8b", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert "llama-3.1-8b" in err and "needs 128.5 GB for 8.03 B parameters" in err and "24.0 GB available" in err
    assert not (tmp_path / "run").exists()


def test_available_memory_is_a_number_of_bytes() -> None:
    import psutil

    available = available_memory()
    assert available is not None and 0 < available <= psutil.virtual_memory().total
    check_fits(10**18, None, "a model")  # where it is not known, nothing is refused


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--steps", "0"], "--steps is 0, expected at least 1"),
        (["--lr", "-1"], "--lr is -1.0, expected a rate between 0 and 1"),
        (["--seq", "1"], "--seq is 1, expected at least 2"),
        (["--seq", "999999"], "give a longer text or a smaller seq"),
        (["--prompt", ""], "--prompt is empty"),
        (["--model", "no-such"], "no-such"),
    ],
)
def test_impossible_options_end_with_2_and_one_message(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["train", "--out", str(tmp_path / "run"), *args]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.splitlines()[-1].startswith("xtf: ") and "Traceback" not in err and out == ""
    assert not (tmp_path / "run").exists()


def test_no_run_is_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("kept")
    assert cli.main(["train", "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(["train", "--out", str(tmp_path / "kept.txt")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_its_number_and_says_what_is_saved(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def stopped(*given: Any) -> None:
        raise Interrupted(tmp_path, 3, 9, 2, number)

    monkeypatch.setattr("xtf.cli.train.run", stopped)
    assert cli.main(["train"]) == 128 + number
    said = f"xtf: stopped after step 3 of 9; saved at step 2, go on with: xtf train --out {tmp_path} --resume\n"
    assert capsys.readouterr().err == said


def test_ctrl_c_outside_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("xtf.cli.train.run", stopped)
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "xtf: stopped\n"


SMALL = ["--backend", "eager", "--tokens-per-step", "64", "--seq", "32", "--evaluate-every", "0", "--sample", "5", "--seed", "3"]
TIMED = {"seconds", "tokens_per_second", "mfu", "memory_bytes"}
"""Metrics that differ from run to run."""


def test_train_from_start_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        assert cli.main(["train", "--steps", "3", "--out", str(folder), *SMALL]) == 0
    out, err = capsys.readouterr()
    one, other = (read_metrics(folder) for folder in folders)
    assert [row["step"] for row in one] == [0, 1, 2, 3]
    assert all(math.isfinite(number(row["loss"])) and row["tokens"] == 2 * 31 for row in one[1:])
    assert number(one[-1]["tokens_per_second"]) > 0
    assert number(one[-1]["held_out_loss"]) < math.log(2048) + 0.5 and "held_out_loss" not in one[1]
    timeless = [[{k: v for k, v in row.items() if k not in TIMED} for row in rows] for rows in (one, other)]
    assert timeless[0] == timeless[1]  # a run is a function of its options
    files = {"run.json", "metrics.jsonl", "loss.png", "checkpoint", "sample.txt"}
    assert files <= {path.name for path in folders[0].iterdir()}
    assert all(str(folders[0] / name) in out for name in files)
    assert "step 3/3" in err and "unigram entropy is 6.2" in out
    config = json.loads((folders[0] / "run.json").read_text())
    assert config["settings"]["steps"] == 3 and config["versions"]["torch"] == torch.__version__
    sample = (folders[0] / "sample.txt").read_text()
    assert sample.startswith("Elizabeth could not but smile at") and sample.strip() in out
    tokenizer = AutoTokenizer.from_pretrained(folders[0] / "checkpoint")
    model = xtf.models.from_hf(folders[0] / "checkpoint")
    params = xtf.load_params(model, folders[0] / "checkpoint")
    text = generate(model, params, tokenizer, "Elizabeth could not but smile at", tokens=5, seed=3, window=32)
    assert "Elizabeth could not but smile at" + text + "\n" == sample  # the checkpoint is the model that wrote


def test_ctrl_c_before_the_first_step_says_that_nothing_was_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def pressed(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("xtf.step.TrainStep.__call__", pressed)
    assert cli.main(["train", "--steps", "9", "--out", str(tmp_path / "run"), *SMALL]) == 130
    assert "xtf: stopped before the first step was done: nothing was trained\n" in capsys.readouterr().err


def test_ctrl_c_keeps_the_steps_that_were_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from xtf.step import TrainStep

    plain, calls = TrainStep.__call__, [0]

    def pressed_in_the_second(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            signal.raise_signal(signal.SIGINT)
        return plain(*args, **options)

    monkeypatch.setattr(TrainStep, "__call__", pressed_in_the_second)
    assert cli.main(["train", "--steps", "9", "--out", str(tmp_path / "run"), *SMALL]) == 130
    err = capsys.readouterr().err
    assert f"xtf: stopped after step 2 of 9; saved at step 2, go on with: xtf train --out {tmp_path / 'run'} --resume\n" in err
    assert "Ctrl-C again stops at once and loses the steps that are not saved yet" in err
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert xtf.load_params(xtf.models.from_hf(saved), saved)


def number(value: Any) -> float:
    assert isinstance(value, (int, float))
    return value
