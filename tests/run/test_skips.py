"""Steps that are skipped: their documents are named, and too many of them end the run with everything saved before still there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run.small import chat, checkpoint, text
from run.test_train import losses, spawn

from xtf import cli
from xtf.data import Documents
from xtf.run import read_metrics
from xtf.run.skips import all_finite

RECIPE = '''
import dataclasses
from pathlib import Path
import torch
import xtf
from xtf.models.common import embed_fn
from xtf.run import Evaluation, FileData, Files, Recipe, Schedule
from xtf.stage import recompute
from xtf.transforms import shard

class Marked:
    """Batches of which some hold the token 2049."""
    def __init__(self, inner, bad):
        self.inner, self.bad = inner, bad
    def __getattr__(self, name):
        return getattr(self.inner, name)
    def __call__(self, step, rank=0, ranks=1):
        batch = {name: value.clone() for name, value in self.inner(step, rank, ranks).items()}
        if step + 1 in self.bad and rank == 0:
            batch["input_ids"][0, 0] = 2049
        return batch

def embed(params, *, input_ids):
    """An embedding that fails for one token."""
    (x,) = embed_fn(params, input_ids=input_ids)
    return (torch.where((input_ids == 2049)[:, None], torch.nan, x),)

def failing(step, program):
    return tuple(dataclasses.replace(s, fn=embed, rule=recompute) if s.name == "embed" else s for s in program)

@dataclasses.dataclass(frozen=True)
class Data(FileData):
    bad: tuple = ()
    def open(self, mesh, console):
        opened = super().open(mesh, console)
        return opened._replace(batches=Marked(opened.batches, self.bad))

def recipe(*, inputs: str = "", bad: tuple[int, ...] = (), steps: int = 8, limit: int = 10, spoil: int = -1) -> Recipe:
    """A recipe.

    Args:
        bad: steps that are not finite.
        spoil: after as many updates, one makes parameters infinite.
    """
    mesh, folder = xtf.mesh(data=-1), Path(inputs)
    adamw = xtf.optim.adamw(1e-2)
    def update(grads, state, params, placement):
        updates, new = adamw.update(grads, state, params, placement)
        if int(state.steps) == spoil:
            updates = xtf.tree.map(lambda u: None if u is None else u / 0, updates)
        return updates, new
    step = xtf.train_step(xtf.models.from_hf(folder / "model"), adamw._replace(update=update)).replace("failing", rewrites=(failing,))
    if mesh.size > 1:
        step = shard(mesh["data"])(step)
    data = Data((folder / "chat.jsonl", folder / "text.jsonl"), folder / "model", 4, 128, held_out=4, cache=folder / "cache", bad=bad)
    return Recipe(mesh, step, data, Schedule(steps, 2), Evaluation(0), Files(folder / "model"), stop_after_skips=limit)
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    checkpoint(folder / "model", vocab_size=2050)
    chat(folder / "chat.jsonl")
    text(folder / "text.jsonl")
    (folder / "mine.py").write_text(RECIPE)
    return folder


def arguments(inputs: Path, out: Path, **settings: Any) -> list[str]:
    pairs = [f"{name}={value}" for name, value in {"inputs": inputs, **settings}.items()]
    return ["train", str(inputs / "mine.py"), "--out", str(out), *(word for pair in pairs for word in ("--set", pair))]


def saved(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def named(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]


def test_a_skipped_step_names_its_documents(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that its batch holds, found again in their files; and it is not saved, but the next is."""
    out = tmp_path / "out"
    assert cli.main(arguments(inputs, out, bad="4,6")) == 0
    said = capsys.readouterr().err
    assert "step 4 skipped: loss nan" in said and "skipped.jsonl" in said
    rows = named(out)
    assert [(row["step"], row["in_a_row"], row["loss"]) for row in rows] == [(4, 1, None), (6, 1, None)]
    assert [row["skipped"] for row in read_metrics(out) if "skipped" in row] == [0, 0, 0, 1, 0, 1, 0, 0]
    assert saved(out) == ["step-00000005", "step-00000007"]
    (own,) = rows[0]["ranks"]
    assert own["rank"] == 0 and {Path(file).name for file in own["documents"]} <= {"chat.jsonl", "text.jsonl"}
    file, numbers = next(iter(own["documents"].items()))
    assert cli.main(["data", "preview", file, "--model", str(inputs / "model"), "--document", str(numbers[0])]) == 0
    shown = capsys.readouterr().out
    line = json.loads(Path(file).read_text().splitlines()[numbers[0]])
    words = line["text"] if "text" in line else line["messages"][1]["content"]
    assert " ".join(words.split()[:3]) in " ".join(shown.replace("⟦", "").split()) and f"document {numbers[0]} of" in shown
    assert cli.main(["data", "preview", file, "--model", str(inputs / "model"), "--document", "1000000"]) == 2
    assert "--document is 1000000" in capsys.readouterr().err


def test_too_many_in_a_row_end_the_run(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(arguments(inputs, out, bad="3,5,6,7", limit=3)) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert "xtf: 3 steps in a row were skipped, 5 to 7" in said and "The newest saved state is that of step 4" in said
    assert saved(out) == ["step-00000004"] or saved(out) == ["step-00000002", "step-00000004"]
    assert cli.main(["train", "--out", str(out), "--resume"]) == 3  # the same steps again
    assert [row["step"] for row in named(out)] == [3, 5, 6, 7]


def test_parameters_that_are_not_finite_are_never_saved(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step that spoils them is accepted: nothing but its parameters is wrong."""
    out = tmp_path / "out"
    assert cli.main(arguments(inputs, out, spoil=5)) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert "parameters are not finite after step 6" in said and "that of step 4" in said
    assert saved(out) == ["step-00000002", "step-00000004"]
    assert cli.main(arguments(inputs, tmp_path / "later", spoil=4, limit=2)) == 3  # accepted between two savings: what follows is skipped
    assert "2 steps in a row were skipped, 6 to 7" in capsys.readouterr().err
    assert saved(tmp_path / "later") == ["step-00000002", "step-00000004"]


def test_ranks_stop_together_and_one_says_so(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = spawn(arguments(inputs, out, bad="3,4", limit=2), 2)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    assert said.count("steps in a row were skipped") == 1 and "run/train.py" not in said and "exitcode  : 3" in said
    ours = [part["documents"] for part in named(out)[0]["ranks"]]
    alone = tmp_path / "alone"
    assert cli.main(arguments(inputs, alone, bad="3,4", limit=2)) == 3
    (together,) = [part["documents"] for part in named(alone)[0]["ranks"]]
    for file, numbers in together.items():
        assert [number for part in ours for number in part.get(file, [])] == numbers
    pairs = zip(losses(out)[1:3], losses(alone)[1:3], strict=True)
    assert all(mine["cross_entropy"] == pytest.approx(other["cross_entropy"], rel=1e-6) for mine, other in pairs)


def test_origins_are_handed_on() -> None:
    whole = Documents.of([[1, 2], [3], [4, 5, 6], [7, 8]])
    kept = Documents.join([whole.select([3, 2]).limited(2, long="split"), whole.select([0]).weighted(2.0)])
    assert kept.origin(np.arange(4)).tolist() == [3, 2, 2, 0] and kept.select([2, 0]).origin([0, 1]).tolist() == [2, 3]
    assert whole.origin([1, 2]).tolist() == [1, 2]
    with pytest.raises(ValueError, match="origins has the shape"):
        Documents([1, 2], lambda indices: [], np.zeros(3, np.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_finite(dtype: torch.dtype) -> None:
    sound = {"w": torch.tensor([1e38, -1.0]).to(dtype), "empty": torch.empty(0), "count": torch.ones(2, dtype=torch.int64), "none": None}
    assert all_finite(sound)
    for bad in ("nan", "inf", "-inf"):
        assert not all_finite(sound | {"b": torch.tensor([0.0, float(bad), 1.0]).to(dtype)})
    assert all_finite({})
