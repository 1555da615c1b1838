"""The progress line: what it says, at any width, and of resumed runs. And the files of metrics."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from xtf.run.metrics import MetricsWriter, read_metrics
from xtf.run.progress import Progress


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def advance(progress: Progress, clock: Clock, steps: range, **values: Any) -> None:
    for step in steps:
        clock.now += 1
        progress.update(step, loss=2.3456, tokens=12345, **values)


def test_everything_that_is_known_is_said() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(9, console=Console(file=out, width=120), every=0, clock=clock) as progress:
        advance(progress, clock, range(1, 3), mfu=0.0456, memory=812_000_000)
        progress.held_out(2.5)
        advance(progress, clock, range(3, 5), mfu=0.5)
    assert out.getvalue().splitlines() == [
        "step 1/9   loss 2.346   0.81 GB",  # the first step compiles: no rates yet
        "step 2/9   loss 2.346   12,345 tokens/s   MFU 4.6%   0.81 GB   0:07 left",
        "step 2/9   held-out loss 2.500",
        "step 3/9   loss 2.346   held-out 2.500   12,345 tokens/s   MFU 6.8%   0.81 GB   0:06 left",
        "step 4/9   loss 2.346   held-out 2.500   12,345 tokens/s   MFU 9.0%   0.81 GB   0:05 left",
    ]


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (120, ["held-out", "tokens/s", "MFU", "GB", "left"]),
        (80, ["held-out", "tokens/s", "left"]),
        (60, ["left"]),
        (40, []),
        (12, []),
    ],
)
@pytest.mark.parametrize("live", [False, True])
def test_the_least_important_words_go_first(width: int, words: list[str], live: bool) -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=width, force_terminal=live, color_system=None)
    with Progress(100_000, done=12_340, console=console, every=0, clock=clock) as progress:
        progress.held_out(2.5)
        advance(progress, clock, range(12_341, 12_345), mfu=0.412, memory=61_234_000_000)
    shown = out.getvalue().replace("\x1b[2K", "").replace("\r", "\n").split("\n")
    line = next(line for line in reversed(shown) if line.startswith("step") and "held-out loss" not in line)
    if width > 12:
        assert line.startswith("step 12344/100000") and "loss 2.346" in line and len(line.rstrip()) <= width
    assert [word for word in ("held-out", "tokens/s", "MFU", "GB", "left") if word in line] == words


def test_a_resumed_run_counts_only_what_it_made_itself() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(100, done=90, console=Console(file=out, width=80), every=0, clock=clock) as progress:
        assert progress.step == 90
        clock.now += 60  # loading, compiling
        advance(progress, clock, range(91, 101))
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 91/100   loss 2.346"
    assert lines[1] == "step 92/100   loss 2.346   12,345 tokens/s   0:08 left"
    assert lines[-1] == "step 100/100   loss 2.346   12,345 tokens/s   0:00 left"
    assert progress.seconds_per_step == pytest.approx(1.0)


def test_the_bar_of_a_resumed_run_begins_where_it_stopped() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(100, done=50, console=Console(file=out, width=80, force_terminal=True, color_system=None), clock=clock):
        pass
    last = out.getvalue().split("\r")[-1]
    assert last.count("━") == 12 and "step 50/100" in last  # of 24


# ---- metrics ----


def write(folder: Path, steps: range, loss: float, **options: Any) -> None:
    with MetricsWriter(folder, **options) as writer:
        for step in steps:
            writer.write(step, {"loss": loss})


def steps_and_losses(folder: Path) -> list[tuple[Any, Any]]:
    """As the file has them, line by line."""
    return [(row["step"], row["loss"]) for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


@pytest.mark.parametrize("broken", ["", '{"step": 6, "lo', '{"step": 3, "loss": 9.0}'])
def test_a_resumed_run_has_each_step_once_and_in_order(tmp_path: Path, broken: str) -> None:
    write(tmp_path, range(1, 6), 5.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(broken)  # killed while writing
    write(tmp_path, range(4, 7), 1.0, resume_at=3)
    assert steps_and_losses(tmp_path) == [(1, 5.0), (2, 5.0), (3, 5.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_in_disorder_is_put_in_order(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "loss": {v}}}\n' for s, v in [(2, 1.0), (1, 2.0), (2, 3.0), (7, 4.0)]))
    write(tmp_path, range(3, 4), 5.0, resume_at=2)
    assert steps_and_losses(tmp_path) == [(1, 2.0), (2, 3.0), (3, 5.0)]


def test_a_run_that_begins_anew_keeps_nothing(tmp_path: Path) -> None:
    write(tmp_path, range(3), 5.0)
    write(tmp_path, range(2), 4.0, resume_at=0)
    assert steps_and_losses(tmp_path) == [(0, 4.0), (1, 4.0)]


def test_a_file_that_needs_no_mending_is_not_written_again(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), 5.0)
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    write(tmp_path, range(4, 5), 5.0, resume_at=3)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before


@pytest.mark.parametrize("lines", [0, 1, 3])
def test_a_broken_last_line_is_cut_before_more_is_written(tmp_path: Path, lines: int) -> None:
    write(tmp_path, range(1, 1 + lines), 5.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "x": [' + "1, " * 50_000)
    write(tmp_path, range(9, 10), 1.0)
    assert steps_and_losses(tmp_path) == [*((s, 5.0) for s in range(1, 1 + lines)), (9, 1.0)]


def test_a_resumed_run_refuses_what_is_no_metrics_file_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        MetricsWriter(tmp_path, resume_at=3)
    path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        MetricsWriter(tmp_path, resume_at=3)
    assert path.read_bytes() == b"\xff\n"
    with pytest.raises(ValueError, match="resume_at is -1"):
        MetricsWriter(tmp_path, resume_at=-1)


def test_lists_have_seven_figures(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": torch.tensor(0.1), "load": torch.tensor([[0.1, 1e-9], [2.0, math.inf]])})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": torch.tensor(0.1).item(), "load": [[0.1, 1e-9], [2.0, None]]}]


def board(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0}).Reload()


def test_tensorboard_groups_and_layers(tmp_path: Path) -> None:
    load = torch.full((2, 8), 0.125)
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        for step in range(1, 201):
            writer.write(
                step,
                {
                    "loss": 2.0,
                    "held_out_loss": math.nan,
                    "muon/lr": 0.1,
                    "mfu": 0.4,
                    "epoch": 1,
                    "mine": 3.0,
                    "load_violation": torch.tensor([0.5, 1.5]),
                    "expert_load": load,
                },
            )
    events = board(tmp_path)
    layers = ["router/load_violation/layer 00", "router/load_violation/layer 01"]
    assert sorted(events.Tags()["scalars"]) == ["data/epoch", "loss/loss", "optim/muon/lr", "other/mine", *layers, "speed/mfu"]
    assert [e.value for e in events.Scalars(layers[1])] == [1.5] * 200
    assert events.Tags()["histograms"] == ["router/expert_load/layer 00", "router/expert_load/layer 01"]
    shown = [e.step for e in events.Histograms("router/expert_load/layer 01")]
    assert shown[:3] == [1, 2, 3] and 40 < len(shown) < 80  # ever more seldom
    assert events.Histograms("router/expert_load/layer 01")[0].histogram_value.num == 8


def test_tensorboard_of_a_resumed_run_drops_what_is_made_again(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6), 5.0, tensorboard=True)
    write(tmp_path, range(3, 5), 1.0, tensorboard=True, resume_at=2)
    assert [(e.step, e.value) for e in board(tmp_path).Scalars("loss/loss")] == [(1, 5.0), (2, 5.0), (3, 1.0), (4, 1.0)]
