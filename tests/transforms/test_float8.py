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
from xtf.data.text import load_corpus
from xtf.mesh import Mesh, simulate
from xtf.model import Model
from xtf.ops import Ops
from xtf.ops.float8 import E5M2, Recipe, float8_ops
from xtf.stage import Stage
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import accumulate, chunk_loss, context_parallel, expert_parallel, float8, precision, remat, shard, swap_activations
from xtf.transforms.float8 import KINDS

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3")
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


EXACT: dict[str, Any] = {"weight_gradient": False}

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
        lambda mesh: compose(float8(**EXACT), shard(mesh["expert"]), expert_parallel(mesh["expert"]), chunk_loss()),
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


TOGETHER = {"chunk_loss": chunk_loss(tokens=7), "remat": remat("nothing"), "swap_activations": swap_activations()}


@pytest.mark.parametrize("transform", TOGETHER.values(), ids=TOGETHER)
def test_where_tokens_stay_together_gradients_of_weights_are_equal_too(transform: Transform) -> None:
    for both in (compose(transform, float8()), compose(float8(), transform)):
        check(lambda mesh, both=both: both, testing.small_model("qwen3_moe"), Recipe(), 1e-12, data=1)


SPLITS: dict[str, tuple[dict[str, int], Callable[..., Transform]]] = {
    "data": ({"data": 2}, lambda mesh, **how: compose(shard(mesh["data"]), float8(**how))),
    "accumulate": ({"data": 1}, lambda mesh, **how: compose(accumulate(2), float8(**how))),
    "expert": ({"expert": 2}, lambda mesh, **how: compose(expert_parallel(mesh["expert"], overlap=2), float8(**how))),
}


@pytest.mark.parametrize("split", SPLITS)
def test_where_tokens_are_split_only_gradients_of_rounded_weights_differ(split: str) -> None:
    """By their rounding: each factor of their products is off by 1/16 at most. The loss and all other gradients are what they are without
    this rounding, which `test_composes` compares with the model on one rank."""
    sizes, transform = SPLITS[split]
    model, batch, optimizer = laws.model("tiny_moe"), testing.random_batch(61, seed=1), testing.default_optimizer()
    seen, want = (
        simulate(lambda mesh, how=how: testing.observe(mesh, transform(mesh, **how), model, batch, optimizer, 0), **sizes)[0]
        for how in ({}, EXACT)
    )
    assert math.isclose(float(seen.loss), float(want.loss), rel_tol=1e-12)
    found = set[str]()
    for path, expected in want.grads.items():
        got = seen.grads[path]
        assert got is not None and expected is not None
        if path.split(".")[-1] in ("q", "k", "v", "o", "gate_up", "down"):
            error = float((got - expected).norm() / expected.norm())
            assert 0 < error < 0.13, (path, error)
            found.add(path)
        else:
            assert float((got - expected).abs().max()) <= 1e-12 * float(expected.abs().max()), path
    assert len(found) == 2 * 6


# What it is -----------------------------------------------------------------------------------------------------------------------


def products(step: TrainStep) -> set[str]:
    """The kinds of stages that are built of ops in float8."""
    return {node.kind for node in step.program if isinstance(node, Stage) and "float8" in str(node.key)}


def test_only_some_kinds() -> None:
    step = train_step(testing.small_model("deepseek_v3"), testing.default_optimizer())
    assert products(step) == set()
    assert products(float8()(step)) == set(KINDS)
    assert products(float8(only=["experts"])(step)) == {"experts"}
    assert float8(only=("experts", "mlp"), gradients=E5M2, power_of_two=True, weight_gradient=False)(step).stack == (
        "float8(only=mlp+experts, gradients=e5m2, power_of_two, weight_gradient=False)",
    )


def test_stages_of_other_kinds_share_their_code_with_those_of_a_step_without() -> None:
    step = train_step(testing.small_model("qwen3_moe"), testing.default_optimizer())
    for plain, rounding in zip(step.program, float8()(step).program, strict=True):
        assert isinstance(plain, Stage) and isinstance(rounding, Stage)
        assert (plain.key == rounding.key) == (plain.kind not in KINDS), plain.name


def test_what_is_not_finite_skips_the_step() -> None:
    step = float8()(train_step(testing.small_model("qwen3_moe", torch.float32), testing.default_optimizer()))
    state = step.init(0)
    tree.items(state.params)["layers.2.moe.down"][:, 0, 0] = math.inf
    after, metrics = step(state, testing.random_batch(61))
    assert int(metrics["skipped"]) == 1 and int(after.skipped) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"only": ["router"]}, r"float8\(only=\['router'\]\): expected one or several of attention, mlp, shared, experts"),
        ({"only": []}, r"float8\(only=\[\]\): expected one or several"),
        ({"only": ["mlp", "mlp"]}, "each once"),
        ({"gradients": torch.bfloat16}, r"float8\(gradients=torch.bfloat16\): expected torch.float8_e4m3fn or torch.float8_e5m2"),
        ({"power_of_two": 1}, r"float8\(power_of_two=1\): expected True or False"),
        ({"weight_gradient": None}, r"float8\(weight_gradient=None\): expected True or False"),
    ],
)
def test_bad_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        float8(**given)


def test_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float8 is applied twice: the step has float8\(\)"):
        compose(float8(), float8())(train_step(testing.small_model("llama"), testing.default_optimizer()))


# Training -------------------------------------------------------------------------------------------------------------------------


def losses(*transforms: Transform, steps: int = 20) -> Tensor:
    """The cross-entropies of a small mixture on the bytes of the demo's text."""
    config = laws.TINY_MOE | {
        "num_hidden_layers": 1,
        "hidden_size": 144,
        "moe_intermediate_size": 132,
        "head_dim": 32,
        "vocab_size": 256,
        "initializer_range": 0.02,
    }
    step = train_step(xtf.models.from_hf(config, dtype=torch.float32), xtf.optim.adamw(lr=5e-3))
    step = compose(*transforms)(step)
    state, found = step.init(0), list[Tensor]()
    text = torch.tensor(list(load_corpus()[:20_000].encode()[: steps * 256])).view(steps, 2, 128)
    for ids in text:
        state, metrics = step(state, {"input_ids": ids, "labels": ids})
        found.append(metrics["cross_entropy"])
    return torch.stack(found)


def test_trains_as_without() -> None:
    plain, rounding = losses(), losses(float8())
    assert plain[-5:].mean() < 0.75 * plain[0]
    assert math.isclose(float(rounding[-5:].mean()), float(plain[-5:].mean()), rel_tol=0.02)
    assert not torch.equal(rounding, plain)


def test_with_mixed_precision() -> None:
    """Compiled and eager, operands are rounded from bfloat16 numbers: the losses are near those without."""
    model, batch = testing.small_model("qwen3_moe", torch.float32), testing.random_batch(61)
    mixed = precision(compute=torch.bfloat16, reduce=torch.float32)
    plain, rounding = (compose(mixed, *more)(train_step(model, testing.default_optimizer())) for more in ((), (float8(),)))
    params = plain.init(0).params
    (a, first), (b, second) = (step.value_and_grad(params, batch) for step in (plain, rounding))
    assert math.isclose(float(a), float(b), rel_tol=0.02) and float(a) != float(b)
    assert {leaf.dtype for leaf in tree.leaves(second)} == {leaf.dtype for leaf in tree.leaves(first)} == {torch.float32}
