"""Recipes: settings from functions, texts and run folders; transforms and meshes by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

import xtf
from xtf.run.folder import check_free, git_state, read_run
from xtf.run.ranks import agree, together
from xtf.run.recipe import Evaluation, Recipe, Schedule, load_recipe, parse_settings, plain, resolve, settings_of
from xtf.run.standard import filled_in, parse_mesh, parse_transforms, standard


def example(
    *,
    lr: float = 1e-3,
    steps: int = 10,
    data: tuple[Path, ...] = (),
    name: str | None = None,
    kind: Literal["a", "b"] = "a",
    quick: bool = False,
) -> Any:
    """A recipe.

    Args:
        lr: the rate.
        steps: how many
            there are.
    """


def test_settings_are_the_arguments() -> None:
    found = settings_of(example)
    assert {name: setting.default for name, setting in found.items()} == resolve(example, {})
    assert (found["lr"].help, found["steps"].help, found["data"].help) == ("the rate.", "how many there are.", "")


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("lr=2e-4", 2e-4),
        ("steps=3", 3),
        ("data=a.jsonl,b.jsonl", (Path("a.jsonl"), Path("b.jsonl"))),
        ("data=", ()),
        ("name=a=b", "a=b"),
        ("name=None", None),
        ("kind=b", "b"),
        ("quick=True", True),
    ],
)
def test_values_are_read_as_annotated(pair: str, value: Any) -> None:
    assert parse_settings(example, [pair]) == {pair.split("=")[0]: value}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["step=3"], "no setting 'step'; did you mean 'steps'"),
        (["zzz=3"], "no setting 'zzz'; known are lr, steps, data"),
        (["lr"], "expected key=value"),
        (["lr=fast"], "--set lr=fast: expected a value of the type float"),
        (["kind=c"], "--set kind=c: expected"),
        (["steps=1.5"], "expected a value of the type int"),
        (["lr=1", "lr=2"], "given twice"),
    ],
)
def test_wrong_settings_are_refused(pairs: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_settings(example, pairs)
    assert capsys.readouterr() == ("", "")


def test_a_setting_needs_a_default() -> None:
    def recipe(*, lr: float) -> Any: ...

    with pytest.raises(ValueError, match="'lr' has no default"):
        settings_of(recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "no function `recipe`"),
        ("import nothing_of_this_name", "fails when it is read: ModuleNotFoundError"),
        ("def recipe(:", "fails when it is read: SyntaxError"),
    ],
)
def test_wrong_recipe_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "r.py")
    with pytest.raises(ValueError, match="there is no recipe"):
        load_recipe(tmp_path / "none.py")
    (tmp_path / "r.txt").write_text(text)
    with pytest.raises(ValueError, match="is not a Python file"):
        load_recipe(tmp_path / "r.txt")


def test_what_follows_is_filled_in() -> None:
    demo = filled_in(resolve(standard, {}))
    assert (demo["seq"], demo["tokens_per_step"], demo["lr"], demo["transforms"]) == (128, 1024, 5e-3, None)
    tuned = filled_in(resolve(standard, {"model": "./some/folder", "data": (Path("a"),)}))
    assert (tuned["seq"], tuned["tokens_per_step"], tuned["lr"]) == (1024, 8192, 2e-5)
    assert filled_in(demo) == demo


def test_plain_is_json() -> None:
    assert plain({"a": 1}["a"]) == 1
    assert plain((Path("a"), (1.5, None, True))) == ["a", [1.5, None, True]]


def test_meshes_by_name() -> None:
    assert parse_mesh("replica=1,data=-1").sizes == {"replica": 1, "data": 1}
    for text in ("data", "data=x", "data=1,data=1", "1data=2", ""):
        with pytest.raises(ValueError, match="expected different axes with sizes"):
            parse_mesh(text)
    with pytest.raises(ValueError, match="hold 2 ranks, but there are 1"):
        parse_mesh("data=2")


def test_transforms_by_name() -> None:
    def stack(mesh: xtf.Mesh, text: str) -> tuple[str, ...]:
        step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(1e-3))
        return xtf.compose(*parse_transforms(text, mesh))(step).stack[::-1]

    found = xtf.simulate(lambda mesh: stack(mesh, "shard, chunk_loss=8,accumulate=2,precision=bfloat16"), replica=2, data=2)[0]
    assert found == (
        "shard(data=2, replicate=replica=2)" if "replicate=replica=2" in found[0] else found[0],
        "chunk_loss(tokens=8)",
        "accumulate(2)",
        "precision(compute=bfloat16, reduce=float32)",
    )
    assert "replica" in found[0] and "data=2" in found[0]
    joined = xtf.simulate(lambda mesh: stack(mesh, "shard=data+expert"), data=2, expert=2)[0]
    assert "data" in joined[0] and "expert" in joined[0]
    assert xtf.simulate(lambda mesh: stack(mesh, "context_parallel"), context=2)[0] == ("context_parallel(context=2)",)
    assert xtf.simulate(lambda mesh: stack(mesh, "context_parallel=ring"), ring=2)[0] == ("context_parallel(ring=2)",)
    assert stack(xtf.mesh(), "float8") == ("float8()",)
    assert stack(xtf.mesh(), "float8=e5m2+power_of_two+activations") == ("float8(gradients=e5m2, power_of_two, weight_gradient=False)",)
    assert stack(xtf.mesh(), "") == ()
    for text, message in (
        ("shart", "did you mean shard"),
        ("zzz", "there is shard, chunk_loss"),
        ("chunk_loss=0", "expected a number"),
        ("precision=int8", "expected one of bfloat16"),
        ("float8=e3m4", "float8=e3m4: expected nothing, or some of e5m2, power_of_two and activations"),
        ("shard=rows", "the mesh has no axis rows"),
        ("context_parallel", "context_parallel=context: the mesh has no axis context; it has data: give one, as --mesh data=-1,context=2"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_transforms(text, xtf.mesh())


def test_ranks_without_a_transform_for_them_are_refused() -> None:
    def build(mesh: xtf.Mesh) -> Recipe:
        made = standard()
        return Recipe(mesh, made.step, made.data, made.schedule, made.evaluation, made.files)

    with pytest.raises(ValueError, match="2 ranks, but no transform spreads the batch over the axis data"):
        xtf.simulate(build, data=2)


def test_ranks_go_on_together_or_not_at_all() -> None:
    assert xtf.simulate(lambda mesh: agree(mesh, mesh.rank * 3), data=4) == [9] * 4
    assert xtf.simulate(lambda mesh: together(mesh, lambda: mesh.rank, ranks=lambda rank: rank == 1), data=2) == [None, 1]

    def failing(mesh: xtf.Mesh) -> str:
        def work() -> None:
            raise OSError("disk full")

        try:
            together(mesh, work, ranks=lambda rank: rank == 2)
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "went on"

    others = "CheckpointError: the run stops: rank 2 failed: OSError: disk full"
    assert xtf.simulate(failing, data=4) == [others, others, "OSError: disk full", others]


@pytest.mark.parametrize(("make", "message"), [(lambda: Schedule(0), "steps is 0"), (lambda: Evaluation(-1), "every is -1")])
def test_impossible_plans_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_free(tmp_path / "new")
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(ValueError, match="has no recipe and settings"):
        read_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state() is None
