"""`precision`: what stages see, what travels, what gradients are summed in, and what is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import laws
from xtf import optim, testing, tree
from xtf.mesh import Mesh, simulate, split_batch
from xtf.model import Model
from xtf.models import from_hf
from xtf.record import Record
from xtf.stage import Stage
from xtf.step import Compilation, TrainStep, compose, train_step
from xtf.transforms import accumulate, chunk_loss, precision, shard

MIXED = precision(params=torch.float32, compute=torch.bfloat16, reduce=torch.float32)


def spied(seen: list[tuple[Any, str, Tensor]]) -> testing.Transform:
    """Notes every parameter and every value that a stage's function is called with: ``(key, name, tensor)``."""

    def lower(fn: Callable[..., Any], key: Any) -> Callable[..., Any]:
        def run(*args: Any, **consts: Any) -> Any:
            seen.extend((key, path, leaf) for path, leaf in tree.items(args).items() if isinstance(leaf, Tensor))
            return fn(*args, **consts)

        return run

    return lambda step: dataclasses.replace(step, compilation=Compilation("spied", lower))


def on(layout: dict[str, int], fn: Callable[[Mesh | None], Any]) -> list[Any]:
    """``fn`` on one rank without a mesh, or on simulated ranks."""
    return simulate(fn, **layout) if layout else [fn(None)]


def sharded(mesh: Mesh | None) -> testing.Transform:
    return shard(mesh["data"]) if mesh is not None else compose()


def local(batch: dict[str, Tensor], mesh: Mesh | None) -> dict[str, Tensor]:
    return split_batch(batch, mesh) if mesh is not None else batch


@pytest.mark.parametrize("layout", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_stages_see_the_compute_dtype(name: str, layout: dict[str, int]) -> None:
    model = testing.small_models(torch.float32)[name]

    def seen_by(mesh: Mesh | None) -> list[tuple[Any, str, Tensor]]:
        seen: list[tuple[Any, str, Tensor]] = []
        step = compose(spied(seen), sharded(mesh), MIXED)(train_step(model, testing.default_optimizer()))
        step.value_and_grad(step.init(0).params, local(testing.random_batch(model.vocab), mesh))
        return seen

    for seen in on(layout, seen_by):
        params = [(key, path, leaf) for key, path, leaf in seen if path.startswith("0.")]  # the first argument is the parameters
        assert {leaf.dtype for key, _, leaf in params if key[1] == "forward"} == {torch.bfloat16}
        assert {leaf.dtype for key, _, leaf in params if key[1] == "recompute"} == {torch.bfloat16}
        names = {path.removeprefix("0.") for _, path, _ in params}
        assert names >= {"weight", "norm", "q", "k", "v", "o"}
        # x, the value that all stages read and write; the router's weights alone are wider by design
        values = {leaf.dtype for key, path, leaf in seen if key[1] == "forward" and path == "1"}
        assert values == {torch.bfloat16}


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("layout", [{}, {"data": 2}], ids=str)
def test_gradients_are_near_those_in_float32(layout: dict[str, int], chunk: int | None) -> None:
    """To a tenth of each leaf's norm: bfloat16 rounds to 0.4%, and a gradient of two layers goes through some tens of roundings."""
    model = testing.small_models(torch.float32)["qwen3"]
    batch = testing.random_batch(model.vocab)
    parts = [chunk_loss(chunk)] if chunk else []

    def grads(mesh: Mesh | None) -> tuple[Tensor, Any]:
        step = compose(sharded(mesh), *parts, MIXED)(train_step(model, testing.default_optimizer()))
        loss, grads = step.value_and_grad(step.init(0).params, local(batch, mesh))
        return loss, tree.items(step.full(grads))

    want, value = torch.func.grad_and_value(model.loss)(model.init(0), batch)
    for loss, got in on(layout, grads):
        assert loss.dtype == torch.float32
        assert abs(loss - value) < 5e-3 * value
        for path, reference in tree.items(want).items():
            assert got[path].dtype == torch.float32
            assert got[path].isfinite().all()
            a, b = got[path].flatten().double(), reference.flatten().double()
            assert (a - b).norm() < 0.1 * b.norm(), path


@pytest.mark.parametrize("chunk", [None, 7])
def test_what_is_gathered_has_half_the_bytes(chunk: int | None) -> None:
    model = testing.small_models(torch.float32)["qwen3_moe"]

    def sent(mesh: Mesh, *more: testing.Transform) -> tuple[int, int]:
        parts = [chunk_loss(chunk)] if chunk else []
        step = compose(shard(mesh["data"]), *parts, *more)(train_step(model, testing.default_optimizer()))
        record = Record()
        step.value_and_grad(step.init(0).params, split_batch(testing.random_batch(model.vocab), mesh), record=record)
        return record.bytes_sent("gather"), record.bytes_sent("reduce")

    plain = simulate(lambda mesh: sent(mesh), data=3)
    mixed = simulate(lambda mesh: sent(mesh, MIXED), data=3)
    narrow = simulate(lambda mesh: sent(mesh, precision(reduce=torch.bfloat16)), data=3)
    for (gather, reduce), (half, same), (full, halved) in zip(plain, mixed, narrow, strict=True):
        assert gather > 0 and half * 2 == gather and same == reduce
        assert full == gather and halved * 2 == reduce


def state_dtypes(step: TrainStep, batch: Any) -> tuple[set[torch.dtype], set[torch.dtype]]:
    state, _ = step(step.init(0), batch)
    floats = [leaf.dtype for leaf in tree.leaves(state.opt) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return {leaf.dtype for leaf in tree.leaves(state.params)}, set(floats)


@pytest.mark.parametrize("optimizer", [optim.adamw(lr=1e-2), optim.muon_adamw(lr=1e-2), optim.sgd(lr=1e-2, momentum=0.9)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
def test_optimizer_state_is_at_least_float32(stored: torch.dtype, optimizer: optim.Optimizer) -> None:
    model = testing.small_models(torch.float32)["llama"]

    def dtypes(mesh: Mesh) -> tuple[set[torch.dtype], set[torch.dtype]]:
        step = compose(shard(mesh["data"]), precision(params=stored, compute=torch.bfloat16))(train_step(model, optimizer))
        return state_dtypes(step, split_batch(testing.random_batch(model.vocab), mesh))

    for params, state in simulate(dtypes, data=2):
        assert params == {stored}
        assert state == {torch.promote_types(stored, torch.float32)}


def test_float64_everywhere_is_exact() -> None:
    wide = precision(params=torch.float64, compute=torch.float64, reduce=torch.float64)
    for model in (laws.model("qwen3_moe"), laws.model("llama")):
        testing.check(lambda mesh: compose(shard(mesh["data"]), wide, accumulate(2)), model=model, data=2)
        testing.check(compose(wide, chunk_loss(7)), model=model)


def test_a_float32_model_stored_and_computed_in_float64_is_that_model_in_float64() -> None:
    """Initial values are rounded once, to what is stored."""
    wide = precision(params=torch.float64)
    narrow_model, wide_model = (testing.small_models(dtype)["qwen3_moe"] for dtype in (torch.float32, torch.float64))
    batch = testing.random_batch(61)
    step = wide(train_step(narrow_model, testing.default_optimizer()))
    got = step.init(0)
    for path, leaf in tree.items(wide_model.init(0)).items():
        assert torch.equal(tree.items(got.params)[path], leaf), path
    want = wide_model.loss(wide_model.init(0), batch)
    assert abs(step.loss(got.params, batch) - want) < 1e-6 * want  # rotary tables are of the model's own dtype


REDUCED = {
    "compute only": (precision(compute=torch.bfloat16), torch.float32),
    "mixed": (MIXED, torch.float32),
    "narrow sums": (precision(compute=torch.bfloat16, reduce=torch.bfloat16), torch.float32),
    "wide sums": (precision(reduce=torch.float64), torch.float64),
    "all narrow, wide sums": (precision(params=torch.bfloat16, reduce=torch.float32), torch.float32),
}


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("layout", [{}, {"data": 2}, {"data": 2, "replicate": 2}, {"replicate": 2}], ids=str)
def test_gradients_leave_in_the_wider_of_reduce_and_params_on_every_layout(layout: dict[str, int], name: str) -> None:
    transform, dtype = REDUCED[name]
    model = testing.small_models(torch.float32)["llama"]
    batch = testing.random_batch(model.vocab, rows=4)

    def dtypes(mesh: Mesh | None) -> set[torch.dtype]:
        parallel = laws.case(layout=layout).transform(mesh)
        step = compose(parallel, accumulate(2), transform)(train_step(model, testing.default_optimizer()))
        _, grads = step.value_and_grad(step.init(0).params, local(batch, mesh))
        return {leaf.dtype for leaf in tree.leaves(grads)}

    for seen in on(layout, dtypes):
        assert seen == {dtype}


@pytest.mark.parametrize("layout", [{}, {"data": 1}, {"data": 2}, {"replicate": 2}], ids=str)
def test_micro_batches_accumulate_in_float32_on_every_layout(layout: dict[str, int]) -> None:
    """64 times the same micro-batch gives what it gives once, to the bit: the 64th part of a bfloat16 number is one, and their
    partial sums are float32 numbers. A sum in bfloat16 rounds, and misses it by percents."""
    model = from_hf(laws.TINY, dtype=torch.float32)
    row = laws.batch("plain")["input_ids"][:1]
    ranks = max([1, *layout.values()])

    def grads(mesh: Mesh | None, n: int) -> dict[str, Tensor]:
        parallel = laws.case(layout=layout).transform(mesh)
        step = compose(parallel, accumulate(n), MIXED)(train_step(model, testing.default_optimizer()))
        ids = row.expand(n * ranks, -1).contiguous()
        batch = local({"input_ids": ids, "labels": ids}, mesh)
        return tree.items(step.full(step.value_and_grad(step.init(0).params, batch)[1]))

    one, many = on(layout, lambda mesh: grads(mesh, 1))[0], on(layout, lambda mesh: grads(mesh, 64))[0]
    for path, want in one.items():
        assert want.any() and torch.equal(many[path], want), path


def test_without_arguments_nothing_changes() -> None:
    model: Model = laws.model("tiny")
    step = train_step(model, testing.default_optimizer())
    same = precision()(step)
    params = step.init(0).params
    assert torch.equal(same.loss(params, laws.batch("plain")), step.loss(params, laws.batch("plain")))


@pytest.mark.parametrize("name", ["params", "compute", "reduce"])
def test_bad_arguments(name: str) -> None:
    with pytest.raises(ValueError, match=rf"precision\({name}=torch.int32\): expected a floating dtype"):
        precision(**{name: torch.int32})
    with pytest.raises(ValueError, match=rf"precision\({name}='bf16'\): expected a floating dtype"):
        precision(**{name: "bf16"})  # pyright: ignore[reportArgumentType]


def test_twice_is_refused() -> None:
    step = train_step(laws.model("tiny"), testing.default_optimizer())
    with pytest.raises(ValueError, match="precision is applied twice: the step has Precision"):
        compose(precision(compute=torch.float32), precision(params=torch.float32))(step)


def test_the_stack_says_the_dtypes() -> None:
    step = MIXED(train_step(laws.model("tiny"), testing.default_optimizer()))
    assert step.stack == ("precision(params=float32, compute=bfloat16, reduce=float32)",)


def test_what_is_not_trained_is_not_cast() -> None:
    """A router's correction moves by a thousandth a step, less than bfloat16 tells apart."""
    model = testing.small_models(torch.float32)["deepseek_v3"]
    step = precision(compute=torch.bfloat16)(train_step(model, testing.default_optimizer()))
    router = next(stage for stage in step.program if isinstance(stage, Stage) and stage.kind == "router")
    local = tree.items(step.init(0).params)
    assert router.gather is not None
    seen = router.gather.wait(router.gather.start({name: local[path] for name, path in router.params.items()}))
    dtypes = {name: leaf.dtype for name, leaf in seen.items()}
    assert dtypes == {"norm": torch.bfloat16, "router": torch.bfloat16, "correction": torch.float32}
