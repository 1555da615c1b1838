"""`float8`: which products it changes, that it composes with the other transforms, and that a model trains with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import xtf
from tests import laws
from xtf import testing, tree
from xtf.mesh import Mesh, simulate
from xtf.model import Model
from xtf.ops import Ops
from xtf.ops.float8 import E5M2, Recipe, float8_ops
from xtf.stage import Stage
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import accumulate, chunk_loss, context_parallel, expert_parallel, float8, precision, remat, shard, swap_activations
from xtf.transforms.float8 import KINDS

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss")
Transform = Callable[[TrainStep], TrainStep]


def in_float8(model: Model, recipe: Recipe) -> Model:
    """A model that computes in float8 without any engine: what the laws take as the reference."""

    def build(ops: Ops) -> tuple[Stage, ...]:
        rounding = {stage.name: stage for stage in model.build(float8_ops(ops, recipe))}
        return tuple(rounding[stage.name] if stage.kind in KINDS else stage for stage in model.build(ops))

    return dataclasses.replace(model, build=build)


def check(transform: Callable[[Mesh], Transform], model: Model, recipe: Recipe, tolerance: float, **sizes: int) -> testing.Report:
    """`xtf.testing.check` with the reference computing in float8."""
    batch, optimizer = testing.random_batch(model.vocab, seed=3), testing.default_optimizer()
    seen = simulate(lambda mesh: testing.observe(mesh, transform(mesh), model, batch, optimizer, 0), **sizes)
    return testing.compare("float8", seen, in_float8(model, recipe), batch, optimizer, seed=0, tolerance=tolerance)


EXACT = {"weight_gradient": False}

STACKS: dict[str, tuple[dict[str, int], Callable[[Mesh], Transform]]] = {
    "alone": ({"data": 1}, lambda mesh: float8(**EXACT)),
    "data ranks": ({"data": 2}, lambda mesh: compose(float8(**EXACT), shard(mesh["data"]))),
    "shard": ({"data": 2}, lambda mesh: compose(shard(mesh["data"]), float8(**EXACT))),
    "chunk_loss": ({"data": 1}, lambda mesh: compose(chunk_loss(tokens=7), float8(**EXACT))),
    "remat": ({"data": 1}, lambda mesh: compose(float8(**EXACT), remat("nothing"))),
    "remat by name": ({"data": 1}, lambda mesh: compose(remat(["attention"]), float8(**EXACT))),
    "swap_activations": ({"data": 1}, lambda mesh: compose(swap_activations(), float8(**EXACT))),
    "accumulate": ({"data": 1}, lambda mesh: compose(accumulate(2), float8(**EXACT))),
    "context_parallel": ({"context": 2}, lambda mesh: compose(float8(**EXACT), context_parallel(mesh["context"]))),
    "expert_parallel": (
        {"data": 1, "expert": 2},
        lambda mesh: compose(shard(mesh["data"], mesh["expert"]), expert_parallel(mesh["expert"], overlap=2), float8(**EXACT)),
    ),
    "float8 first": (
        {"data": 1, "expert": 2},
        lambda mesh: compose(float8(**EXACT), shard(mesh["expert"]), expert_parallel(mesh["expert"]), chunk_loss(), remat("nothing")),
    ),
}



@pytest.mark.parametrize("stack", STACKS)
def test_composes(stack: str) -> None:
    """With gradients of weights that are not rounded, what a step computes depends on no layout: a token's tiles are its own."""
    sizes, transform = STACKS[stack]
    check(transform, testing.small_model("qwen3_moe"), Recipe(weight_gradient=False), 1e-12, **sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    check(lambda mesh: float8(), testing.small_model(family), Recipe(), 1e-12, data=1)


@pytest.mark.parametrize(
    "options",
    [{"gradients": E5M2}, {"power_of_two": True}, {"gradients": E5M2, "power_of_two": True, "weight_gradient": False}],
    ids=str,
)
def test_recipes(options: dict[str, Any]) -> None:
    check(lambda mesh: float8(**options), testing.small_model("qwen3_moe"), Recipe(**options), 1e-12, data=1)


@pytest.mark.parametrize("transform", [chunk_loss(tokens=7), remat("nothing"), remat(["attention"]), swap_activations()], ids=str)
def test_where_tokens_stay_together_gradients_of_weights_are_equal_too(transform: Transform) -> None:
    for both in (compose(transform, float8()), compose(float8(), transform)):
        check(lambda mesh, both=both: both, testing.small_model("qwen3_moe"), Recipe(), 1e-12, data=1)


SPLITS: dict[str, tuple[dict[str, int], Callable[[Mesh], Transform]]] = {
    "data": ({"data": 2}, lambda mesh: compose(shard(mesh["data"]), float8())),
    "accumulate": ({"data": 1}, lambda mesh: compose(accumulate(2), float8())),
    "expert": ({"expert": 2}, lambda mesh: compose(shard(mesh["expert"]), expert_parallel(mesh["expert"], overlap=2), float8())),
}


@pytest.mark.parametrize("split", SPLITS)
def test_where_tokens_are_split_only_gradients_of_rounded_weights_differ(split: str) -> None:
    """By their rounding: each factor of their products is off by 1/16 at most. Loss and all other gradients are equal."""
    sizes, transform = SPLITS[split]
    model, batch, optimizer = laws.model("tiny_moe"), testing.random_batch(61, seed=1), testing.default_optimizer()
    seen = simulate(lambda mesh: testing.observe(mesh, transform(mesh), model, batch, optimizer, 0), **sizes)[0]
    whole = testing.observe(None, compose(float8(weight_gradient=False)), _by_micro(model), batch, optimizer, 0)
    if split != "accumulate":  # its auxiliary loss is of each micro-batch
        assert math.isclose(float(seen.loss), float(whole.loss), rel_tol=1e-12)
    rounded = [path for path in seen.grads if path.split(".")[-1] in ("q", "k", "v", "o", "gate_up", "down")]
    assert len(rounded) == 2 * 6
    for path in rounded:
        got, want = seen.grads[path], whole.grads[path]
        assert got is not None and want is not None
        error = float((got - want).norm() / want.norm())
        assert 0 < error < 0.13, (path, error)
    for path, want in whole.grads.items():
        got = seen.grads[path]
        if path not in rounded and want is not None and split != "accumulate":
            assert got is not None and float((got - want).abs().max()) <= 1e-12 * float(want.abs().max()), path
