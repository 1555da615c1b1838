"""`shard`: the laws on every layout, and arguments that are refused. What it is for is measured in tests/test_effects.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from examples.new_layout import tensor_parallel
from tests import laws
from xtf import testing, tree
from xtf.mesh import simulate
from xtf.spec import Init, ParamSpec
from xtf.step import Sharding, compose, train_step
from xtf.transforms import accumulate, chunk_loss, shard

LAYOUTS = [{"data": 2}, {"data": 3}, {"data": 2, "expert": 2}, {"data": 2, "replicate": 2}, {"replicate": 3}]
MORE_LAYOUTS = [{"data": n} for n in range(1, 9)] + [
    {"data": 2, "expert": 3},
    {"expert": 4, "data": 2},
    {"data": 3, "replicate": 2},
    {"replicate": 2, "data": 2, "expert": 2},
    {"replicate": 4},
]


@pytest.mark.parametrize(
    "case",
    [
        laws.case(**row)
        for row in laws.pairwise(
            layout=LAYOUTS,
            model=("llama", "qwen3", "qwen3_moe", "moe_step"),
            order=range(6),
            micros=(None, 2),
            chunk=(7, None),
            regather=(True, False),
            optimizer=("adamw", "muon"),
            batch=("documents", "weights"),
        )
    ],
    ids=str,
)
def test_laws(case: laws.Case) -> None:
    case.check()


@pytest.mark.parametrize(
    "case",
    [
        laws.case(**row, chunk=7)
        for row in laws.pairwise(
            layout=[{"data": 2}, {"replicate": 2}],
            batch=("plain", "one_rank", "ignored", "row", "token"),
            model=("tiny", "qwen3_moe"),
            micros=(None, 3),
        )
    ],
    ids=str,
)
def test_laws_on_uncommon_batches(case: laws.Case) -> None:
    case.check()


@pytest.mark.parametrize("ranks", range(1, 9))
def test_laws_on_more_ranks_than_rows(ranks: int) -> None:
    laws.case(layout={"data": ranks}, model="tiny").check()


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3"])
def test_laws_on_eight_ranks(model: str) -> None:
    laws.case(layout={"data": 4, "expert": 2}, model=model, chunk=5).check()


@pytest.mark.full
@pytest.mark.parametrize("model", laws.MODELS)
@pytest.mark.parametrize("layout", MORE_LAYOUTS, ids=lambda sizes: "x".join(f"{k}{n}" for k, n in sizes.items()))
def test_laws_matrix(layout: dict[str, int], model: str) -> None:
    drawn: dict[str, Any] = {"order": range(6), "regather": (True, False)}
    for row in laws.crossed({"batch": laws.BATCHES, "optimizer": ("adamw", "muon")}, chunk=(None, 7), micros=(None, 2, 3), **drawn):
        laws.case(layout=layout, model=model, **row).check()
    for row in laws.crossed({"order": range(6)}, chunk=(7,), micros=(3,), regather=(True, False)):
        laws.case(layout=layout, model=model, **row).check()


def test_a_joined_axis_is_the_axes_it_joins() -> None:
    testing.check(lambda mesh: shard(mesh.join("data", "expert")), model=laws.model("llama"), data=2, expert=2)


@pytest.mark.parametrize("joined", [False, True])
def test_leaves_owned_over_one_axis_are_sharded_over_the_others(joined: bool) -> None:
    """Each tensor-parallel rank computes on its part of some leaves; of those, data ranks keep parts of the part."""

    def both(mesh: Any) -> testing.Transform:
        axes = (mesh.join("data", "more"),) if joined else (mesh["data"], mesh["more"])
        return compose(tensor_parallel(mesh["tensor"]), accumulate(2), shard(*axes), chunk_loss(tokens=9))

    testing.check(both, model=laws.model("qwen3"), data=2, more=1, tensor=2)

    def shapes(mesh: Any) -> dict[str, tuple[int, ...]]:
        step = both(mesh)(train_step(laws.model("qwen3"), testing.default_optimizer()))
        return {path: placement.shape() for path, placement in step.placements.items()}

    for seen in simulate(shapes, data=2, more=1, tensor=2):
        assert seen["layers.0.mlp.gate"] == (28 // 2 // 2, 20)
        assert seen["norm.weight"] == (10,)


@pytest.mark.parametrize("regather", [True, False])
def test_leaves_that_are_not_trained_have_no_gradient_and_stay_whole(regather: bool) -> None:
    model = laws.model("llama")
    frozen = {"layers.0.attention.norm", "layers.1.mlp.gate"}
    specs = tree.map_with_path(lambda path, spec: dataclasses.replace(spec, trainable=path not in frozen), model.specs)
    model = dataclasses.replace(model, specs=specs)
    testing.check(lambda mesh: shard(mesh["data"], regather=regather), model=model, data=3)

    def seen(mesh: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        step = shard(mesh["data"])(train_step(model, testing.default_optimizer()))
        state = step.init(0)
        _, grads = step.value_and_grad(state.params, testing.random_batch(model.vocab))
        return tree.items(grads), tree.items(state.params)

    for grads, params in simulate(seen, data=3):
        assert {path for path, grad in grads.items() if grad is None} == frozen
        assert all(params[path].shape == tree.items(model.specs)[path].shape for path in frozen)


def test_each_leaf_is_split_along_the_first_dim_that_gives_every_rank_something() -> None:
    specs = {
        "rows": ParamSpec((9, 4), torch.float32, (None, None), Init.constant(1.0)),
        "columns": ParamSpec((3, 8), torch.float32, (None, None), Init.constant(1.0)),
        "small": ParamSpec((2, 3), torch.float32, (None, None), Init.constant(1.0)),
        "scalar": ParamSpec((), torch.float32, (), Init.constant(1.0)),
    }
    model = dataclasses.replace(laws.model("tiny"), specs=specs)

    def shapes(mesh: Any) -> dict[str, tuple[int, ...]]:
        step = shard(mesh["data"])(train_step(model, testing.default_optimizer()))
        return {path: placement.shape() for path, placement in step.placements.items()}

    seen = simulate(shapes, data=4)
    assert [s["rows"] for s in seen] == [(2, 4), (2, 4), (2, 4), (3, 4)]
    assert [s["columns"] for s in seen] == [(3, 2)] * 4
    assert [s["small"] for s in seen] == [(2, 0), (2, 1), (2, 1), (2, 1)]
    assert [s["scalar"] for s in seen] == [()] * 4


def raised(build: Any, **sizes: int) -> str:
    """The message that ``build(mesh)`` raises with."""
    with pytest.raises(ValueError) as error:
        simulate(build, **sizes)
    return str(error.value)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r'shard\(\) needs at least one mesh axis: shard\(mesh\["data"\]\)'):
        shard()
    with pytest.raises(ValueError, match=r"shard: 'data' is not a mesh axis; give mesh\[\"name\"\]"):
        shard("data")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="shard: 2 is not a mesh axis"):
        shard(replicate=2)  # pyright: ignore[reportArgumentType]
    assert "an axis is named twice in ['data', 'data']" in raised(lambda mesh: shard(mesh["data"], mesh["data"]), data=2)
    assert "named twice" in raised(lambda mesh: shard(mesh["data"], replicate=mesh["data"]), data=2)
    assert "named twice" in raised(lambda mesh: shard(mesh["data"], mesh.join("expert", "data")), data=1, expert=2)


def test_axes_of_another_mesh_are_refused() -> None:
    (other,) = simulate(lambda mesh: mesh, data=1, expert=1)
    assert "axes of one mesh" in raised(lambda mesh: shard(mesh["data"], other["expert"]), data=1, expert=1)
    assert "axes of one mesh" in raised(lambda mesh: shard(mesh["data"], other["data"]), data=1, expert=1)
    step = train_step(laws.model("tiny"), testing.default_optimizer())

    def mixed(mesh: Any) -> Any:
        return shard(mesh["data"])(step.replace("tokens", token_axes=(other["data"],)))

    assert "a step has one mesh" in raised(mixed, data=1, expert=1)


def test_twice_is_refused() -> None:
    step = train_step(laws.model("tiny"), testing.default_optimizer())
    message = raised(lambda mesh: compose(shard(mesh["data"]), shard(mesh["expert"]))(step), data=2, expert=2)
    assert "shard is applied twice" in message and "['expert']" in message and "name all axes in one" in message


def test_an_axis_that_overlaps_that_of_another_transform_is_refused() -> None:
    step = train_step(laws.model("tiny"), testing.default_optimizer())

    def mixed(mesh: Any) -> Any:
        return shard(mesh["data"])(step.replace("tokens", token_axes=(mesh.join("data", "expert"),)))

    message = raised(mixed, data=2, expert=2)
    assert "'data,expert' and 'data' overlap" in message


def test_sharding_over_ranks_that_hold_the_same_tokens_is_refused() -> None:
    step = train_step(laws.model("tiny"), testing.default_optimizer())
    message = raised(lambda mesh: step.replace("wrong", sharding=Sharding((mesh["data"],))).program, data=2)
    assert "embed.weight is sharded over data, whose ranks do not hold different gradients" in message


def test_the_step_says_its_axes() -> None:
    step = train_step(laws.model("tiny"), testing.default_optimizer())

    def stacks(mesh: Any) -> list[tuple[str, list[str]]]:
        data, expert = mesh["data"], mesh["expert"]
        made = (shard(data, expert), shard(data, replicate=expert), shard(replicate=data), shard(data, regather=False))
        return [(one(step).stack[0], [axis.name for axis in one(step).token_axes]) for one in made]

    # Every axis carries tokens of its own, that of replicas too: ranks that all took the same would break no law.
    assert simulate(stacks, data=2, expert=1)[0] == [
        ("shard(data=2, expert=1)", ["data", "expert"]),
        ("shard(data=2, replicate=expert=1)", ["data", "expert"]),
        ("shard(replicate=data=2)", ["data"]),
        ("shard(data=2, regather=False)", ["data"]),
    ]
