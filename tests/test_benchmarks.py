"""The scripts that print figures run, and what they count is right."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint, compile_time, cuda_figures, linear_cost, long_sequence, swap_activations


def test_swap_activations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--preset", "tiny-moe", "--layers", "2", "--tokens", "512", "--document", "100"]
    out = tmp_path / "figures.json"
    swap_activations.main(["--device", "cpu", *sizes, "--backend", "eager", "--rounds", "2", "--json", str(out)])
    figures = json.loads(out.read_text())
    assert figures["out"] == figures["back"] > 2 * 512 * 256 * 4
    assert "swapped ÷ kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("of", "others", "expected"),
    [([], [(0, 1)], 0), ([(0, 1)], [], 0), ([(0, 4)], [(1, 2), (1, 3), (2.5, 3)], 0.5), ([(0, 1), (1, 2)], [(-1, 9)], 1)],
)
def test_shared_time(of: list[tuple[float, float]], others: list[tuple[float, float]], expected: float) -> None:
    assert math.isclose(swap_activations.shared(of, others), expected)


def test_long_sequence(real_inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    long_sequence.main(["--inputs", str(real_inputs), "--tokens", "512", "--document", "128", "--json", str(out)])
    figures = json.loads(out.read_text())
    plain, again, chunked = figures["bytes"].values()
    assert plain > again > chunked
    assert abs(figures["loss"] - math.log(151_936)) < 0.5


def test_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    checkpoint.main(["--megabytes", "2", "--hidden", "64", "--rounds", "1", "--folder", str(tmp_path), "--json", str(out)])
    figures = json.loads(out.read_text())
    assert 1e6 < figures["bytes"] < 3e6 and len(figures["saves"]) == 7
    assert all(0 < row["pause"] <= row["total"] for row in figures["saves"].values())
    ours, theirs, default = figures["damage"].values()
    assert {row["untouched"] for row in (ours, theirs, default)} == {"loads what was saved"}
    missing, flipped = "a file missing (parameters are loaded)", "a bit flipped"
    assert ours[missing].startswith("error") and ours[flipped].startswith("error") and default[missing].startswith("error")
    assert all("are not what was saved" in said for said in (theirs[missing], theirs[flipped], default[flipped]))  # why xtf verifies
    assert "xtf.StateSaver, donated" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_compile_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--layers", "1", "2", "--hidden", "16", "--experts", "4", "--seq", "8", "--steps", "2"]
    compile_time.main(["--backend", "aot_eager", *sizes, "--json", str(out)])
    figures = json.loads(out.read_text())["xtf"]
    assert figures["seconds"].keys() == {"1", "2"}
    assert all(seconds > 0 for depth in figures["seconds"].values() for seconds in depth.values())
    assert math.isclose(figures["deeper"], figures["seconds"]["2"]["cold"] / figures["seconds"]["1"]["cold"])
    assert "2 layers ÷ 1 layers, cold" in capsys.readouterr().out


def test_linear_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--layers", "1", "--tokens", "32", "64", "--experts", "8", "16", "--expert-tokens", "32", "--document", "16"]
    linear_cost.main([*sizes, "--backend", "eager", "--rounds", "2", "--json", str(out)])
    figures = json.loads(out.read_text())
    assert figures["tokens"]["32"] == figures["experts"]["8"] == 1
    assert figures["tokens"]["64"] > 0 and "÷ the first" in capsys.readouterr().out


def test_cuda_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plumbing: every part gives its rows, one that fails loses only itself, and what there is no time for is said."""

    def broken(given: cuda_figures.Given) -> Iterator[cuda_figures.Row]:
        yield {"name": "before", "tflops": 1.0}
        raise RuntimeError("out of memory")

    monkeypatch.setitem(cuda_figures.PARTS, "machine", broken)
    out = tmp_path / "figures.json"
    assert cuda_figures.main(["--device", "cpu", "--tiny", "--together", "--json", str(out)]) == 1
    rows = json.loads(out.read_text())
    ops = [row for row in rows if row.get("part") == "ops"]
    assert len(ops) == 9 and all(row["right"] for row in ops)
    assert [row.get("failed") for row in rows if row.get("part") == "machine"] == [None, "RuntimeError: out of memory"]
    steps = [row for row in rows if row.get("part") == "step"]
    assert len(steps) == 2 and all(row["tokens_s"] > 0 and row["rehearsed_gb"] > 0 and math.isfinite(row["loss"]) for row in steps)
    assert {"transformers", "torchtitan"} == {row["name"].split(",")[0] for row in rows if row.get("part") == "peer"}
    assert "FAILED: RuntimeError" in capsys.readouterr().out
    cuda_figures.main(["--device", "cpu", "--tiny", "--together", "--seconds", "5", "--json", str(out)])
    assert all(row.get("left_out") == "no time left" for row in json.loads(out.read_text()) if "part" in row)


def test_parts_of_cuda_figures_run_in_processes_with_a_limit() -> None:
    given = argparse.Namespace(device="cpu", tiny=True, library="no_such_library", json=None)
    assert cuda_figures.in_process("peer", given, 120) == [{"left_out": "no_such_library is not installed"}]
    (late,) = cuda_figures.in_process("peer", given, 0.01)
    assert "not done after" in late["failed"]


def test_cuda_figures_need_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        cuda_figures.main(["--json", "never.json"])
    assert "there is no CUDA device" in capsys.readouterr().err


@pytest.mark.full
def test_a_sequence_of_64k_tokens(real_inputs: Path, tmp_path: Path) -> None:
    """In a process of its own, whose largest resident size counts."""
    out = tmp_path / "figures.json"
    script = Path(long_sequence.__file__)
    subprocess.run([sys.executable, script, "--inputs", real_inputs, "--json", out], check=True, timeout=3000)
    figures = json.loads(out.read_text())
    assert figures["tokens"] == 65_536
    assert figures["bytes"]["plain: everything kept"] > 80e9
    assert figures["peak_rss"] < 6e9
    assert abs(figures["loss"] - math.log(151_936)) < 0.5
