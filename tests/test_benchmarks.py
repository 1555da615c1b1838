"""The scripts that print figures run, and what they count is right."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compile_time, long_sequence, swap_activations


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


def test_compile_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--layers", "1", "2", "--hidden", "16", "--experts", "4", "--seq", "8", "--steps", "2"]
    compile_time.main(["--backend", "aot_eager", *sizes, "--json", str(out)])
    figures = json.loads(out.read_text())["xtf"]
    assert figures["seconds"].keys() == {"1", "2"}
    assert all(seconds > 0 for depth in figures["seconds"].values() for seconds in depth.values())
    assert math.isclose(figures["deeper"], figures["seconds"]["2"]["cold"] / figures["seconds"]["1"]["cold"])
    assert "2 layers ÷ 1 layers, cold" in capsys.readouterr().out


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
