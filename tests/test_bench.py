"""``xtf bench``: contenders compute the same, rounds are fair, and what is printed and written says so."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

import xtf
from xtf.bench import jax_peer, titan
from xtf.bench.contenders import Entry, check_entries
from xtf.bench.machine import Machine
from xtf.bench.process import Worker
from xtf.bench.report import as_json, draw, reference, table
from xtf.bench.rounds import Result, Results, run_rounds
from xtf.bench.workload import SHAPES, Workload, document_lengths, shape_config
from xtf.cli import main
from xtf.cli.bench import BenchOptions, entries_of

TINY = ("--hidden", "32", "--layers", "1", "--head-dim", "8", "--experts", "4", "--top-k", "2", "--expert-width", "16", "--vocab", "64")


def tiny(tokens: int = 24, documents: str = "one") -> Workload:
    flags = {"hidden": 32, "layers": 1, "head_dim": 8, "experts": 4, "top_k": 2, "expert_width": 16, "vocab": 64}
    return Workload(shape_config("small-moe", flags), document_lengths(documents, tokens, 0))


def test_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as a user gives it: on packed documents both libraries have the same first loss, or it fails."""
    monkeypatch.setenv("COLUMNS", "80")  # of a terminal: every name is whole
    out, figures = tmp_path / "bench.png", tmp_path / "bench.json"
    asked = ["bench", *TINY, "--tokens", "24", "--documents", "mixed", "--backend", "eager", "--against", "transformers:eager"]
    assert main([*asked, "--rounds", "2", "--warmup", "0", "--threads", "1", "--json", str(figures), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "xtf eager" in said and "transformers eager" in said and "floor" in said
    found = json.loads(figures.read_text())
    own, other = found["results"]
    assert own["first_loss"] == pytest.approx(other["first_loss"], rel=1e-5)
    assert len(own["seconds"]) == len(other["seconds"]) == 2 and found["reference"] == "transformers eager"
    assert other["times_as_fast"] == 1 and own["peak_bytes"] > own["bytes_before_first_step"] / 2
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "weights"
    model = tiny().model()
    xtf.save_params(model, model.init(0), folder)
    return folder


def losses_of(entry: Entry, weights: Path, lengths: str) -> list[float]:
    workload = dataclasses.replace(tiny(documents=lengths), weights=str(weights))
    with Worker(entry, workload) as worker:
        worker.ask("open", workload=workload.json(), entry=list(entry))
        return [worker.ask(do)["loss"] for do in ("first", "step", "step")]


@pytest.mark.parametrize("documents", ["one", "mixed"])
@pytest.mark.parametrize(("library", "backend"), [("torchtitan", "eager"), ("jax", "blocks"), ("jax", "ragged_dot")])
def test_peers_train_alike(library: str, backend: str, documents: str, weights: Path) -> None:
    """Losses before and after updates are those of xtf: so are gradients and AdamW."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: it is no dependency, and takes part in xtf bench where a user has it")
    own = losses_of(Entry("xtf", "xtf", "eager"), weights, documents)
    assert losses_of(Entry(library, library, backend), weights, documents) == pytest.approx(own, rel=1e-6)
    assert own[0] - own[2] > 1e-4 * own[0]  # the updates are seen


@pytest.mark.parametrize(
    ("model", "flags", "dtype", "said"),
    [
        ("mixtral-8x7b", {"layers": 1}, "float32", "jax times llama, qwen3, qwen3_moe; got a mixtral"),
        ("small-moe", {}, "bfloat16", "jax is timed in float32; got --dtype bfloat16"),
    ],
)
def test_what_jax_refuses(model: str, flags: dict[str, int | None], dtype: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        jax_peer.check(Workload(shape_config(model, flags), (24,), dtype))


def test_what_torchtitan_refuses() -> None:
    with pytest.raises(ValueError, match="torchtitan is timed on qwen3, qwen3_moe; got a llama"):
        titan.check(Workload(shape_config("smollm2-135m", {}), (24,)))
    windowed = shape_config("small-moe", {}) | {"use_sliding_window": True, "sliding_window": 8}
    for peer in (titan, jax_peer):
        with pytest.raises(ValueError, match="this config has sliding_window=8"):
            peer.check(Workload(windowed, (24,)))


def test_losses_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender that computes something else is not compared."""
    from xtf.bench import rounds

    with pytest.raises(ValueError, match=r"do not compute the same: first losses a 1\.000000, b 1\.001000, more than 0\.0001 apart"):
        rounds._check_losses(tiny(), [Entry("a", "xtf", "eager"), Entry("b", "xtf", "eager")], [1.0, 1.001])


def test_a_contender_that_fails_says_who_and_why() -> None:
    broken = Workload(dict(tiny().config), (24,), weights="nowhere")
    with pytest.raises(ValueError, match=r"(?s)xtf eager failed: CheckpointError: no checkpoint folder at nowhere"):
        run_rounds(broken, [Entry("xtf eager", "xtf", "eager")], rounds=1, warmup=0)


def test_figures() -> None:
    """Ratios are of rounds side by side, MFU is of the model's FLOPs, and the floor is what no one passes."""
    fast = Result(Entry("fast", "xtf", "eager"), 9.0, 1.0, (1.0, 2.0, 3.0), (0.5, 1.0, 1.5), 1 << 30, 1 << 29)
    slow = Result(Entry("slow", "transformers", "eager"), 5.0, 1.0, (3.0, 4.0, 5.0), (0.1, 0.1, 0.1), 1 << 30, 1 << 29)
    found = Results(tiny(24), Machine(100.0, 10.0, "a machine"), 50, 5, (fast, slow))
    assert found.times_as_fast(fast, slow) == 2.0  # the median of 3, 2, 5/3
    assert found.tokens_per_second(fast) == 12 and found.floor == 1.0
    assert found.mfu(fast) == 0.25 and found.mfu(fast, update=False) == 0.5
    assert reference(found) is slow and as_json(found)["results"][0]["times_as_fast"] == 2.0
    text = StringIO()
    Console(file=text, width=200).print(table(found))
    lines = text.getvalue().splitlines()
    assert lines[1].split()[:4] == ["fast", "12", "±"] or lines[1].split()[:2] == ["fast", "12"]


def test_a_picture(tmp_path: Path) -> None:
    one = Result(Entry("one", "xtf", "eager"), 9.0, 1.0, (1.0,), (0.5,), 1, 1)
    assert draw(Results(tiny(), Machine(100.0, 10.0, "m"), 50, 5, (one,)), tmp_path / "a.png").stat().st_size > 1000
    assert one.spread == 0.0


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [("one", 10, (10,)), ("4", 10, (4, 4, 2)), ("16", 10, (10,)), ("5", 10, (5, 5))],
)
def test_documents(text: str, tokens: int, expected: tuple[int, ...]) -> None:
    assert document_lengths(text, tokens, 0) == expected


@pytest.mark.parametrize("tokens", [2, 17, 4096, 65536])
def test_mixed_documents(tokens: int) -> None:
    lengths = document_lengths("mixed", tokens, 3)
    assert sum(lengths) == tokens and min(lengths) >= 1 and lengths == document_lengths("mixed", tokens, 3)
    assert tokens < 4096 or max(lengths) > 4 * min(lengths)


@pytest.mark.parametrize(("text", "tokens", "said"), [("1", 10, "--documents is '1'"), ("many", 10, "'many'"), ("one", 1, "--tokens is 1")])
def test_documents_that_are_none(text: str, tokens: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        document_lengths(text, tokens, 0)


def test_shapes() -> None:
    assert shape_config("medium-moe", {"experts": 64, "hidden": None})["num_experts"] == 64
    assert shape_config("mixtral-8x7b", {"layers": 2, "experts": 4})["num_local_experts"] == 4
    for name in SHAPES:
        assert xtf.models.from_hf(shape_config(name, {})).family == "qwen3_moe"
    with pytest.raises(ValueError, match="--layers is 0, expected at least 1"):
        shape_config("small-moe", {"layers": 0})
    with pytest.raises(ValueError, match="--expert-width: a llama has none of moe_intermediate_size"):
        shape_config("smollm2-135m", {"expert_width": 8})
    with pytest.raises(ValueError, match="--model nothing is no shape"):
        shape_config("nothing", {})


def test_the_same_tokens_for_every_contender() -> None:
    workload = tiny(24, "5")
    again = Workload.of(json.loads(json.dumps(workload.json())))
    assert again == workload
    batch = again.batch()
    assert all(torch.equal(value, workload.batch()[name]) for name, value in batch.items())
    assert batch["document_ids"][0].tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5 + [4] * 4


def test_entries() -> None:
    assert [entry.name for entry in entries_of(BenchOptions(backend=("inductor", "inductor:step")))] == [
        "xtf inductor",
        "xtf inductor:step",
    ]
    options = BenchOptions(backend=("eager",), transforms=("", "chunk_loss"), against=("transformers",))
    assert [entry.name for entry in entries_of(options)] == [
        "xtf eager ",
        "xtf eager chunk_loss",
        "transformers eager",
        "transformers inductor",
    ]
    with pytest.raises(ValueError, match="expected one of transformers"):
        entries_of(BenchOptions(against=("megatron",)))
    with pytest.raises(ValueError, match="transformers has no backend 'xla'"):
        entries_of(BenchOptions(against=("transformers:xla",)))
    with pytest.raises(ValueError, match="given twice: xtf eager"):
        check_entries([Entry("xtf eager", "xtf", "eager")] * 2)
    with pytest.raises(ValueError, match="nothing to time"):
        check_entries([])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--out", "a.jpg"], "expected a file name that ends in .png"),
        (["--dtype", "float33"], "--dtype float33"),
        (["--threads", "0"], "--threads is 0"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--transforms", "nothing"], "--transforms has no 'nothing'"),
    ],
)
def test_bad_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *TINY, "--backend", "eager", *flags]) == 2
    assert said in capsys.readouterr().err
