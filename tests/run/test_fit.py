"""`xtf memory` and `xtf train --fit`: what a step takes by flags, as a table, a picture and JSON, and micro-batches that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import xtf
from xtf import cli
from xtf.cli.memory import timeline_of
from xtf.memory import KINDS, Timeline, rehearse
from xtf.run import standard
from xtf.run.fit import free_bytes, micro_batches_of, parse_bytes
from xtf.run.memory_picture import draw_memory, unit_of
from xtf.run.metrics import read_metrics
from xtf.run.standard import parse_mesh
from xtf.transforms import swap_activations

PNG = b"\x89PNG\r\n\x1a\n"
SMALL = ["--seq", "32", "--tokens-per-step", "256", "--backend", "eager"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_table_and_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", *SMALL, "--transforms", "swap_activations", "--json", "m.json"]) == 0
    out = capsys.readouterr().out
    told: Any = json.loads(Path("m.json").read_text())
    assert Path("memory.png").read_bytes().startswith(PNG)
    assert f"the peak is in {told['peak']['stage']}, {told['peak']['direction']}: {told['peak']['bytes']:,} bytes, counted" in out
    assert all(kind in out for kind in (*KINDS, "in host memory")) and "256 tokens" in out
    assert f"{told['peak']['by_kind']['parameters'] / 1e6:.2f}" in out
    step = standard(seq=32, tokens_per_step=256, transforms="swap_activations", backend="eager").step
    assert told["peak"]["bytes"] == rehearse(step, 256).peak.peak


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", *SMALL, "--transforms", "accumulate=2", "--json", "-", "--out", "a.png"]) == 0
    told: Any = json.loads(capsys.readouterr().out)
    assert (told["tokens"], told["micro_batches"]) == (128, 2)
    assert Path("a.png").read_bytes().startswith(PNG)


def test_ranks_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--transforms", "shard,expert_parallel,chunk_loss", "--seq", "32", "--tokens-per-step", "4096"]
    assert cli.main(["memory", "--mesh", "data=8,expert=8", *flags]) == 0
    assert "64 tokens, one of 64 ranks" in capsys.readouterr().out
    assert parse_mesh("plan:data=-1,expert=4").sizes == {"data": 1, "expert": 4}
    # and they train nothing
    assert cli.main(["train", "--mesh", "plan:data=2", *SMALL, "--out", "run"]) == 2
    assert "planned, they hold no values" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_recipe_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.py").write_text(
        "from xtf.run import Recipe, standard\n\n\ndef recipe(*, seq: int = 32) -> Recipe:\n"
        "    return standard(seq=seq, tokens_per_step=2 * seq)\n"
    )
    assert cli.main(["memory", "r.py", "--set", "seq=16"]) == 0
    assert "32 tokens" in capsys.readouterr().out
    assert cli.main(["train", "r.py", "--fit"]) == 2
    assert "in a recipe file use accumulate and xtf.fit_tokens" in capsys.readouterr().err


def test_the_fewest_micro_batches_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    budget = 55_000_000
    flags = ["train", "--seq", "32", "--tokens-per-step", "1024", "--backend", "eager", "--fit", "--budget", "55MB", "--print"]
    assert cli.main(flags) == 0
    shown = capsys.readouterr()
    number = int(shown.out.split("chunk_loss,accumulate=")[1].split()[0])
    assert number > 2 and f"fit: {number} × " in shown.err and "1,024 (32 rows of 32)" in shown.out

    def peak(n: int) -> int:
        recipe = standard(seq=32, tokens_per_step=1024, transforms=f"chunk_loss,accumulate={n}", backend="eager")
        tokens, micro_batches = micro_batches_of(recipe)
        assert micro_batches == n
        return rehearse(recipe.step, tokens, micro_batches=n).peak.peak

    assert peak(number) <= budget < peak(number - 1)


def test_rows_that_do_not_divide_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--backend", "eager", "--fit", "--budget", "60MB", "--print"]) == 0
    assert "fit: 3 × at most 384 tokens for each update" in capsys.readouterr().err


def test_a_run_that_goes_on_keeps_its_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--seq", "32", "--tokens-per-step", "512", "--backend", "eager", "--evaluate-every", "0", "--sample", "1"]
    assert cli.main(["train", *rest, "--steps", "4", "--fit", "--budget", "54MB", "--out", "a"]) == 0
    kept: Any = json.loads(Path("a", "run.json").read_text())
    transforms = kept["settings"]["transforms"]
    assert "accumulate=" in transforms and kept["tokens_per_step"] == 512 and "fit" not in kept["settings"]
    assert f"transforms={transforms!r}" in Path("a", "recipe.py").read_text()
    # the same by its numbers alone: the same bits
    assert cli.main(["train", *rest, "--steps", "4", "--transforms", transforms, "--out", "b"]) == 0
    losses = [[row["loss"] for row in read_metrics(Path(name)) if "loss" in row] for name in ("a", "b")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    capsys.readouterr()
    assert cli.main(["train", "--out", "a", "--resume", "--fit", "--budget", "1GB", "--print"]) == 0
    shown = capsys.readouterr()
    assert transforms in shown.out and "fit:" not in shown.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--budget", "1GB"], "--budget 1GB is for --fit"),
        (["train", "--fit", "--budget", "much"], "'much' is no size: expected a number with a unit"),
        (["train", "--fit", "--budget", "1MB"], "--fit: a micro-batch of 128 tokens does not fit 1.0 MB: the step takes"),
        (["train", "--fit", "--transforms", "chunk_loss, accumulate=2"], "--fit chooses accumulate, but --transforms has accumulate=2"),
        (["memory", "--out", "a.jpg"], "expected a file name that ends in .png"),
        (["train", "--fit", "--budget", "2"], "'2' is no size: expected a number with a unit, as 20GB"),
        (["memory", "--mesh", "foo"], "xtf: --mesh foo: expected different axes with sizes"),
        (["memory", "--mesh", "data=1000000"], "xtf: --mesh data=1000000: {'data': 1000000} are 1,000,000 ranks, expected 16,384 at most"),
        (["memory", "--mesh", "rank=2"], "--mesh rank=2: an axis of ranks that are not there cannot have the name rank"),
        (["memory", "--mesh", "data"], "expected different axes with sizes"),
        (["memory", "--set", "a=1"], "--set a=1 is for a recipe file"),
    ],
)
def test_wrong_input_is_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(Path().iterdir())


def test_ranks_without_rows_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--transforms", "shard,chunk_loss", "--seq", "16", "--backend", "eager"]
    assert cli.main(["memory", "--mesh", "data=6", *flags, "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["tokens"] == 32
    assert "8 rows of 16 for 6 ranks: as in xtf train, each takes 2, filled up with padding (192 tokens together" in shown.err
    assert cli.main(["memory", "--mesh", "data=4", *flags]) == 0
    assert not capsys.readouterr().err


def test_sizes() -> None:
    assert free_bytes(torch.device("cpu")) > 0
    assert parse_bytes("2tib") == 2**41
    for wrong in ("", "GB", "-1GB", "1 XB", "0", "2", "0GB", "9" * 400 + "GB"):
        with pytest.raises(ValueError, match="is no size"):
            parse_bytes(wrong)
    assert [unit_of(10**p)[1] for p in (3, 6, 9)] == ["kB", "MB", "GB"]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_pictures_of_any_depth(micro_batches: int, tmp_path: Path) -> None:
    step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
    path = draw_memory(rehearse(step, 64, micro_batches=micro_batches), tmp_path / "m.png", title="a title")
    assert path.read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match=r"ends in \.png"):
        draw_memory(rehearse(step, 64), tmp_path / "m.svg")


def test_the_host_is_a_note_beside_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("xtf.run.memory_picture.write_png", lambda figure, path: figures.append(figure))  # pyright: ignore
    line = rehearse(swap_activations()(xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))), 64)
    line = Timeline(tuple(m._replace(host=10**11) for m in line.moments), line.tokens)
    draw_memory(line, tmp_path / "m.png")
    (axes,) = figures[0].axes
    assert axes.get_ylim() == (0, pytest.approx(1.16 * line.peak.peak / 10**6))  # the device's peak alone sets it
    assert "host memory, up to 100,000 MB" in [text.get_text() for text in figures[0].legends[0].get_texts()]


def test_a_cpu_counts() -> None:
    recipe = standard(seq=32, tokens_per_step=64, backend="eager")
    assert not timeline_of(recipe).measured
