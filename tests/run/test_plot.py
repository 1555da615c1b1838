"""The pictures of runs: what they are made of, at any length, with gaps; and `xtf plot`."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from xtf.run.compare import PlotOptions, overlay, run, run_names
from xtf.run.figure import Series, plain, series, smooth, smoothed, thinned
from xtf.run.plot import plot_experts, plot_loss, plot_run, plot_training


def make_run(folder: Path, steps: int, row: Callable[[int], dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"step": step} | row(step)) + "\n" for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def full_row(step: int) -> dict[str, Any]:
    load = [[0.4, 0.3, 0.2, 0.1], [0.25 + 0.01 * (step % 3), 0.25, 0.25, 0.25 - 0.01 * (step % 3)]]
    return {
        "loss": None if step == 7 else 5 - math.log(step),
        "grad_norm": 1 + 1 / step,
        "muon/lr": 1e-3,
        "adamw/lr": 1e-4,
        "tokens_per_second": 1e5,
        "mfu": 0.4,
        "padding": 0.01,
        "imbalance": 1.1,
        "memory_bytes": 6e10,
        "expert_load": load,
        "load_violation": [0.6, 0.04 * (step % 3)],
    } | ({"held_out_loss": 5.0} if step % 5 == 0 else {})


def ink(path: Path) -> float:
    """The share of a picture that is not white."""
    return float((imread(path)[..., :3] < 0.95).any(-1).mean())


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_a_run_has_three_pictures(tmp_path: Path, steps: int) -> None:
    folder = make_run(tmp_path / "run", steps, full_row)
    drawn = plot_run(folder)
    assert [path.name for path in drawn] == ["loss.png", "training.png", "experts.png"]
    assert sorted(path.name for path in folder.iterdir()) == ["experts.png", "loss.png", "metrics.jsonl", "training.png"]
    assert all(0.01 < ink(path) < 0.6 for path in drawn)


def test_panels_are_those_that_the_run_has(tmp_path: Path) -> None:
    def height(names: tuple[str, ...]) -> int | None:
        picture = plot_training(make_run(tmp_path / str(len(names)), 9, lambda step: dict.fromkeys(names, 1.0)))
        return None if picture is None else imread(picture).shape[0]

    none, two, three = (height(names) for names in (("loss",), ("loss", "lr", "grad_norm"), ("loss", "lr", "grad_norm", "mfu")))
    assert none is None and two is not None and three is not None and three > two
    one_rank = make_run(tmp_path / "one rank", 9, lambda step: {"lr": 1.0, "grad_norm": 1.0, "padding": 0.0, "imbalance": 1.0})
    picture = plot_training(one_rank)
    assert picture is not None and imread(picture).shape[0] == two  # nothing to see in those two
    assert plot_experts(tmp_path / "1") is None
    assert not (tmp_path / "1" / "training.png").exists()


def test_what_the_run_is_called_and_its_entropy_come_from_its_description(tmp_path: Path) -> None:
    folder = make_run(tmp_path, 9, lambda step: {"loss": 6.0})
    plain_picture = imread(plot_run(folder)[0])
    (folder / "run.json").write_text(json.dumps({"title": "my run", "data": {"unigram_entropy": 6.5}}))
    described = imread(plot_run(folder)[0])
    (folder / "run.json").write_text("[]")
    assert (imread(plot_run(folder)[0]) == plain_picture).all() and not (described == plain_picture).all()
    assert (imread(plot_loss(folder, entropy=6.5, title="my run")) == described).all()


def test_a_run_that_never_had_a_finite_loss_is_drawn_without_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", 9, lambda step: {"loss": None, "lr": 0.1, "grad_norm": None})
    assert [path.name for path in plot_run(folder)] == ["training.png"]
    with pytest.raises(ValueError, match="no finite number"):
        plot_run(make_run(tmp_path / "b", 9, lambda step: {"loss": None}))


def test_many_layers_and_experts(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)

    def row(step: int) -> dict[str, Any]:
        load = generator.dirichlet([1.0] * 64, size=48)
        return {"loss": 1.0, "expert_load": load.tolist(), "load_violation": (load.max(1) * 64 - 1).tolist()}

    path = plot_experts(make_run(tmp_path, 5, row))
    assert path is not None and ink(path) > 0.3


def test_a_long_run_is_drawn_in_seconds(tmp_path: Path) -> None:
    folder = make_run(tmp_path, 100_000, lambda step: {"loss": 3.0 + (step % 7) / 7, "grad_norm": 1.0, "lr": 1e-3})
    began = time.perf_counter()
    plot_run(folder)
    assert time.perf_counter() - began < 20  # 3 s where nothing else runs


# ---- curves ----


def test_a_metric_is_not_finite_only_where_it_was_written() -> None:
    rows: list[Any] = [{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "a": [[2.0, None], [5.0]]}]
    found = series(rows, "a")
    assert found.steps.tolist() == [1, 3, 4]
    assert found.finite.tolist() == [True, False, True] and found.values[2] == 5.0
    assert len(series(rows, "b").steps) == 0


def test_thinning_keeps_every_spike_and_the_order() -> None:
    values = np.sin(np.arange(50_000) / 1000)
    spikes = [17, 12_345, 49_999]
    values[spikes] = [50.0, -60.0, 70.0]
    values[20_000:21_000] = math.nan
    few = thinned(Series(np.arange(50_000.0), values), 1000)
    assert len(few.steps) <= 1000 and (np.diff(few.steps) >= 0).all()
    assert set(map(float, spikes)) <= set(few.steps.tolist())
    assert np.isnan(few.values).sum() == 10  # the gap is still one
    short = Series(np.arange(5.0), np.arange(5.0))
    assert thinned(short, 1000) is short


def test_smoothing_passes_over_gaps() -> None:
    values = [1.0] * 10 + [math.nan] * 3 + [1.0] * 10
    out = smoothed(values)
    assert [math.isnan(v) for v in out] == [math.isnan(v) for v in values]
    assert [v for v in out if not math.isnan(v)] == pytest.approx([1.0] * 20)
    assert smoothed([]) == []


def test_a_long_curve_is_smoothed_as_its_means_are() -> None:
    steps = np.arange(1.0, 10_001.0)
    noise = np.random.default_rng(0).normal(size=10_000)
    even = smooth(Series(steps, 0.001 * steps + noise), 500)
    assert len(even.steps) == 500 and even.steps[0] == pytest.approx(10.5)
    assert np.abs(even.values - 0.001 * even.steps)[50:450].max() < 0.2
    gap = np.where((steps > 3000) & (steps <= 4000), math.nan, 1.0)
    broken = smooth(Series(steps, gap), 500)
    assert np.isnan(broken.values).sum() == 50


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (12345.0, "12,345"), (0.0003, "0.0003"), (2e-6, "2e-6"), (999.5, "999.5")])
def test_numbers_on_axes(value: float, text: str) -> None:
    assert plain(value) == text


# ---- several runs ----


def test_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, steps, full_row) for name, steps in (("one", 1), ("three", 3), ("many", 40))]
    both = overlay(runs, tmp_path / "both.png")
    alone = overlay(runs[:1], tmp_path / "alone.png")
    assert not np.array_equal(imread(both), imread(alone)) and 0.01 < ink(both) < 0.5
    assert ink(overlay(runs * 5, tmp_path / "twelve.png", metric="load_violation")) > 0.01


def test_a_metric_that_a_run_lacks_is_refused_with_those_it_has(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", 3, lambda step: {"loss": 1.0, "grad_norm": 2.0})
    second = make_run(tmp_path / "second", 3, lambda step: {"loss": 1.0, "lr": 0.1, "nothing": None})
    with pytest.raises(ValueError, match=r"second has no metric 'grad_norm'\. It has: loss, lr$"):
        overlay([first, second], tmp_path / "x.png", metric="grad_norm")
    with pytest.raises(ValueError, match=r"first has no metric 'grad_nrom', but 'grad_norm'\. It has: loss, grad_norm$"):
        overlay([first], tmp_path / "x.png", metric="grad_nrom")
    with pytest.raises(ValueError, match=r"ends in \.png"):
        overlay([first], tmp_path / "x.jpg")
    with pytest.raises(ValueError, match="no run to draw"):
        overlay([], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_names_are_as_short_as_tells_runs_apart() -> None:
    assert run_names(["/r/a", "/r/b"]) == ["a", "b"]
    assert run_names(["/r/a/run", "/r/b/run", "/s/a/run"]) == ["r/a/run", "r/b/run", "s/a/run"]
    assert run_names(["/r/a", "/r/a"]) == ["a (1)", "a (2)"]
    assert run_names([]) == []


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tuple(make_run(Path(name), 3, full_row) for name in ("a", "b"))
    out = io.StringIO()
    console = Console(file=out, width=20)
    assert run(PlotOptions(runs[:1]), console=console) == [Path("a/loss.png"), Path("a/training.png"), Path("a/experts.png")]
    assert run(PlotOptions(runs), console=console) == [Path("compare.png")]
    assert run(PlotOptions(runs[:1], metric="mfu", out=Path("mfu.png")), console=console) == [Path("mfu.png")]
    assert out.getvalue().splitlines() == ["a/loss.png", "a/training.png", "a/experts.png", "compare.png", "mfu.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "compare.png", "mfu.png"]
    with pytest.raises(ValueError, match="at least one run"):
        run(PlotOptions(()))
    with pytest.raises(ValueError, match="cannot be read"):
        run(PlotOptions((Path("nowhere"),)))
