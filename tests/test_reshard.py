"""A run of experts goes on elsewhere: saved on one split of data, expert and context axes, loaded on any other.

What is loaded is what was saved, bit for bit, and the next ten losses are those of the run that was not interrupted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import xtf
from tests import laws
from tests.test_training_checkpoint import run, same_bits, whole
from xtf import testing, tree
from xtf.checkpoint import load_state, save_state
from xtf.mesh import Mesh, split_batch
from xtf.state import State
from xtf.step import TrainStep

MODELS = ("qwen3_moe", "deepseek_v3")
"""With an auxiliary loss; with router corrections that every step moves."""

OPTIMIZERS = tuple(laws.OPTIMIZERS)
FOUR: dict[str, int] = {"data": 2, "expert": 2}
AFTER: Sequence[dict[str, int]] = (
    {}, {"data": 1}, {"data": 2}, {"expert": 2}, {"data": 3}, {"expert": 3}, {"data": 2, "expert": 2}, {"expert": 2, "data": 2},
    {"data": 8}, {"data": 2, "expert": 4}, {"expert": 8}, {"data": 2, "context": 2}, {"context": 2, "expert": 2}, {"context": 3},
    {"replicate": 2, "expert": 2},
)  # fmt: skip
"""1, 2, 3, 4 and 8 ranks; of 6 experts the ranks of ``expert`` have unequal numbers, or none."""

CONTEXT: Sequence[tuple[dict[str, int], dict[str, int]]] = (
    ({"context": 2}, {"data": 2}),
    ({"data": 2}, {"context": 2}),
    ({"data": 2, "context": 2}, {"data": 2, "expert": 2}),
    ({"context": 2, "expert": 2}, {"context": 3}),
    ({"context": 4}, {}),
)


def make(mesh: Mesh | None, model: str, optimizer: str) -> TrainStep:
    """The step of a layout: everything sharded, experts spread over the axis ``expert`` where there is one."""
    sizes = {} if mesh is None else dict(mesh.sizes)
    dispatcher = "deduplicated" if "expert" in sizes else None
    case = laws.Case(tuple(sizes.items()), model, chunk=7, optimizer=optimizer, dispatcher=dispatcher)
    return case.transform(mesh)(xtf.train_step(laws.model(model), laws.OPTIMIZERS[optimizer]()))


def own(step: TrainStep, mesh: Mesh | None, seed: int) -> Mapping[str, Tensor]:
    """What this rank has of a global batch, the same on every layout."""
    batch = testing.random_batch(61, rows=8, seed=seed)
    axes = [name for axis in step.row_axes for name in axis.names]
    return split_batch(batch, mesh, axes=axes) if mesh is not None and axes else batch


def train(step: TrainStep, mesh: Mesh | None, state: State, steps: int) -> tuple[State, list[Tensor]]:
    losses: list[Tensor] = []
    for _ in range(steps):
        state, metrics = step(state, own(step, mesh, int(state.step)))
        losses.append(metrics["loss"])
    return state, losses


class Seen(NamedTuple):
    """The whole state at the moment of the save, and the ten losses after it."""

    state: Any
    losses: list[Tensor]


def saved_by(mesh: Mesh | None, model: str, optimizer: str, path: Path) -> Seen:
    step = make(mesh, model, optimizer)
    state, _ = train(step, mesh, step.init(0), 3)
    save_state(step, state, path, extra={"data": 3})
    return Seen(whole(step, state), train(step, mesh, state, 10)[1])


def loaded_by(mesh: Mesh | None, model: str, optimizer: str, path: Path) -> Seen:
    step = make(mesh, model, optimizer)
    state, extra = load_state(step, path)
    assert extra == {"data": 3} and int(state.step) == 3
    return Seen(whole(step, state), train(step, mesh, state, 10)[1])


def check(before: Seen, after: Mapping[str, int], model: str, optimizer: str, path: Path) -> None:
    for found in run(after, loaded_by, model, optimizer, path):
        assert same_bits(found.state, before.state)
        for at, (a, b) in enumerate(zip(found.losses, before.losses, strict=True)):
            assert abs(a - b) <= 1e-12 * abs(b), f"loss {at} after loading: {a} and {b}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, int], str, str], tuple[Path, Seen]]:
    """The checkpoint of a layout, model and optimizer, and what was seen of its run; each is trained once."""
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def of(layout: tuple[tuple[str, int], ...], model: str, optimizer: str) -> tuple[Path, Seen]:
        path = folder / "-".join([*(f"{name}{size}" for name, size in layout), model, optimizer])
        return path, run(dict(layout), saved_by, model, optimizer, path)[0]

    return lambda layout, model, optimizer: of(tuple(layout.items()), model, optimizer)


Saved = Callable[[dict[str, int], str, str], tuple[Path, Seen]]
KINDS = list(itertools.product(MODELS, OPTIMIZERS))


@pytest.mark.parametrize(
    ("after", "kind"),
    [({}, KINDS[0]), ({"data": 2}, KINDS[3]), ({"expert": 2}, KINDS[2]), ({"data": 3}, KINDS[2]), ({"expert": 3}, KINDS[3]),
     ({"data": 8}, KINDS[1]), ({"data": 2, "expert": 4}, KINDS[0]), ({"data": 2, "context": 2}, KINDS[0])],
    ids=str,
)  # fmt: skip
def test_saved_on_four_ranks_and_loaded_on_others(saved: Saved, after: dict[str, int], kind: tuple[str, str]) -> None:
    path, seen = saved(FOUR, *kind)
    check(seen, after, *kind, path)


@pytest.mark.parametrize(("before", "after"), CONTEXT[:2], ids=str)
def test_ranks_that_shared_sequences_share_rows_later(saved: Saved, before: dict[str, int], after: dict[str, int]) -> None:
    path, seen = saved(before, "deepseek_v3", "adamw")
    check(seen, after, "deepseek_v3", "adamw", path)


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), CONTEXT, ids=str)
def test_context_matrix(saved: Saved, before: dict[str, int], after: dict[str, int]) -> None:
    for kind in KINDS:
        path, seen = saved(before, *kind)
        check(seen, after, *kind, path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "model", "optimizer"),
    [*((FOUR, *kind) for kind in KINDS), ({}, *KINDS[1]), ({"expert": 3}, *KINDS[0]), ({"data": 8}, *KINDS[3]),
     ({"context": 2, "expert": 2}, *KINDS[2])],
    ids=str,
)  # fmt: skip
def test_reshard_matrix(saved: Saved, before: dict[str, int], model: str, optimizer: str) -> None:
    path, seen = saved(before, model, optimizer)
    for after in AFTER:
        check(seen, after, model, optimizer, path)


# From a checkpoint without optimizer state


def first_step(mesh: Mesh | None, model: str, path: Path) -> tuple[Tensor, Any, State]:
    step = make(mesh, model, "adamw")
    state = xtf.load(step, path)
    loss, grads = step.value_and_grad(state.params, own(step, mesh, 0))
    return loss, step.full(grads), state.replace(params=step.full(state.params))


@pytest.mark.parametrize("model", MODELS)
def test_a_fresh_start_from_hugging_face_is_the_same_everywhere(tmp_path: Path, model: str) -> None:
    params = laws.model(model).init(5)
    xtf.save_params(laws.model(model), params, tmp_path / "hf")
    want, wanted, _ = first_step(None, model, tmp_path / "hf")
    for after in AFTER:
        for loss, grads, state in run(after, first_step, model, tmp_path / "hf"):
            assert same_bits(state.params, params) and int(state.step) == 0
            assert abs(loss - want) <= 1e-12 * abs(want)
            for path, value in tree.items(wanted).items():
                found = tree.items(grads)[path]
                assert (found is None) == (value is None)
                if value is not None:
                    assert (found - value).abs().max() <= 1e-12 * max(value.abs().max(), 1e-6), path


def test_expert_state_of_other_experts_would_be_seen(saved: Saved) -> None:
    """That the checks above can fail: optimizer state with experts in another order changes the losses."""
    path, seen = saved(FOUR, "qwen3_moe", "adamw")

    def swapped(mesh: Mesh | None) -> list[Tensor]:
        step = make(mesh, "qwen3_moe", "adamw")
        state, _ = load_state(step, path)
        stale = tree.map(lambda x: x.flip(0) if isinstance(x, Tensor) and x.dim() == 3 else x, state.opt)
        return train(step, mesh, state.replace(opt=stale), 3)[1]

    losses = run({"expert": 2}, swapped)[0]
    assert abs(losses[0] - seen.losses[0]) <= 1e-12 * abs(seen.losses[0])
    assert abs(losses[1] - seen.losses[1]) > 1e-6
