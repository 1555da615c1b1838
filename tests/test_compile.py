"""Compile: each distinct stage once, no breaks, no second compilation, and the results of eager."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import xtf
from xtf import compile as compile_step
from xtf import testing, tree
from xtf.compile import _CACHE, lowering  # pyright: ignore[reportPrivateUsage]
from xtf.data import Documents
from xtf.mesh import Mesh
from xtf.transforms import balance_batch, chunk_loss, shard

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before, nothing counted before."""
    torch.compiler.reset()
    _CACHE.clear()
    counters.clear()
    yield
    torch.compiler.reset()
    _CACHE.clear()


def model(layers: int, **fields: Any) -> xtf.Model:
    return xtf.models.from_hf(CONFIG | {"num_hidden_layers": layers} | fields, dtype=torch.float64)


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def run(step: xtf.TrainStep, steps: int, **batch: int) -> list[float]:
    state, losses = step.init(0), []
    for i in range(steps):
        state, metrics = step(state, testing.random_batch(step.model.vocab, seed=i, **batch))
        losses.append(float(metrics["loss"]))
    return losses


def compiled(layers: int, backend: Any = "aot_eager") -> xtf.TrainStep:
    step = chunk_loss()(xtf.train_step(model(layers), xtf.optim.adamw(lr=1e-2)))
    return compile_step(step, backend=backend)


def test_each_kind_of_stage_is_compiled_once_however_many_layers() -> None:
    counts: list[int] = []
    for layers in (1, 3):
        fresh_run(lambda: counts.append(graphs_of(layers)))  # noqa: B023
    assert counts[0] == counts[1] == 9  # attention, router, experts, norm: forward and backward; of embed the forward


def fresh_run(fn: Callable[[], None]) -> None:
    torch.compiler.reset()
    _CACHE.clear()
    counters.clear()
    fn()


def graphs_of(layers: int) -> int:
    run(compiled(layers), 1)
    return graphs()


def test_nothing_is_compiled_on_the_second_step_although_the_documents_differ() -> None:
    step = compiled(2)
    batches = [testing.random_batch(61, seed=i) for i in range(4)]
    assert len({step.model.pack(b)["cu_seqlens"].shape for b in batches}) > 1
    state, _ = step(step.init(0), batches[0])
    after_one = graphs()
    for batch in batches[1:]:
        state, _ = step(state, batch)
    assert graphs() == after_one


def test_threads_give_the_same_bits_each_time() -> None:
    """Ids and experts that many tokens share: what several threads add up must not depend on which comes first."""
    model = testing.small_models(torch.float32)["qwen3_moe"]
    step = xtf.compile(xtf.train_step(model, xtf.optim.adamw(1e-3)), backend="inductor")
    ids = torch.randint(0, 4, (8, 512), generator=torch.Generator().manual_seed(0))
    params, before = model.init(0), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, *others = [tree.leaves(step.value_and_grad(params, {"input_ids": ids, "labels": ids})[1]) for _ in range(8)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_ranks_that_race_compile_once() -> None:
    alone = graphs_of(1)
    torch.compiler.reset()
    _CACHE.clear()
    counters.clear()

    def rank(mesh: Mesh) -> float:
        step = xtf.compose(shard(mesh["data"]), chunk_loss())(xtf.train_step(model(1), xtf.optim.adamw(lr=1e-2)))
        step = compile_step(step, backend="aot_eager")
        loss, _ = step.value_and_grad(step.init(0).params, xtf.split_batch(testing.random_batch(61, rows=4), mesh))
        return float(loss)

    losses = xtf.simulate(rank, data=4)
    assert len(set(losses)) == 1
    assert graphs() == alone


def test_one_thread_compiles_while_others_wait() -> None:
    lower = lowering("aot_eager")
    results: list[torch.Tensor] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        fn = lower(lambda x: (x * 2).sin(), "a key")
        barrier.wait()
        results.append(fn(torch.ones(3)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and graphs() == 1


def test_compiled_laws_hold() -> None:
    testing.check(lambda step: compile_step(step, backend="aot_eager"), model=model(2, mlp_only_layers=[1]))


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_generated_code_holds_the_laws(family: str) -> None:
    both = lambda mesh: lambda step: compile_step(xtf.compose(shard(mesh["data"]), chunk_loss(tokens=7))(step))  # noqa: E731
    testing.check(both, model=testing.small_models()[family], data=2)


def test_generated_code_gives_the_losses_of_eager() -> None:
    losses = run(compiled(1, "inductor"), 3)
    assert losses == pytest.approx(run(compiled(1, "eager"), 3), rel=1e-12)


def test_donated_state_is_reused_and_reading_it_raises() -> None:
    plain = xtf.train_step(model(1), xtf.optim.adamw(lr=1e-2))
    step = compile_step(plain, backend="eager", donate=True)
    state, batch = step.init(0), testing.random_batch(61)
    places = [leaf.data_ptr() for leaf in xtf.tree.leaves(state.params)]
    new, _ = step(state, batch)
    assert [leaf.data_ptr() for leaf in xtf.tree.leaves(new.params)] == places
    with pytest.raises(RuntimeError, match="donated"):
        _ = state.params
    expected, _ = plain(plain.init(0), batch)
    for got, want in zip(xtf.tree.leaves(new.params), xtf.tree.leaves(expected.params), strict=True):
        assert torch.equal(got, want)


def test_bad_arguments() -> None:
    step = xtf.train_step(model(1), xtf.optim.adamw(lr=1e-2))
    with pytest.raises(ValueError, match=r"'cuda_graphs'.*'inductor', 'aot_eager', 'eager'"):
        compile_step(step, backend="cuda_graphs")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"unit='layer'.*'stage' or 'step'"):
        compile_step(step, unit="layer")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="already compiled for 'aot_eager'"):
        compile_step(compile_step(step, backend="aot_eager"))


def scaled(factor: float, *, key: bool) -> Callable[[xtf.TrainStep], xtf.TrainStep]:
    """Multiplies what each MLP adds by a factor, and forgets to say so in the stage's key, or says too little."""

    def scale(stage: xtf.Stage) -> xtf.Stage:
        def fn(params: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x + factor * (stage.fn(params, x)[0] - x),)

        return dataclasses.replace(stage, fn=fn, key=(stage.key, "scaled") if key else stage.key)

    def rewrite(step: xtf.TrainStep, program: Any) -> Any:
        return tuple(scale(node) if getattr(node, "kind", "") == "mlp" else node for node in program)

    return lambda step: step.replace("scaled()", rewrites=(*step.rewrites, rewrite))


@pytest.mark.parametrize("key", [False, True])
def test_a_key_that_says_too_little_does_not_bring_another_functions_code(key: bool) -> None:
    small = testing.small_models()["llama"]
    compiled_with = lambda factor: lambda step: compile_step(scaled(factor, key=key)(step), backend="aot_eager")  # noqa: E731
    testing.check(compiled_with(1.0), model=small)
    with pytest.raises(testing.LawError):
        testing.check(compiled_with(3.0), model=small)
    testing.check(lambda step: compile_step(step, backend="aot_eager"), model=small)  # what came before has left nothing behind


def test_a_state_made_of_parameters_does_not_share_them_when_it_is_donated() -> None:
    step = compile_step(xtf.train_step(model(1), xtf.optim.adamw(lr=1e-2)), backend="eager", donate=True)
    params = step.model.init(0)
    before = [leaf.clone() for leaf in xtf.tree.leaves(params)]
    step(step.state(params), testing.random_batch(61))
    assert all(torch.equal(a, b) for a, b in zip(xtf.tree.leaves(params), before, strict=True))


def test_a_transform_after_compile_is_refused() -> None:
    step = compile_step(xtf.train_step(model(1), xtf.optim.adamw(lr=1e-2)), backend="aot_eager")
    with pytest.raises(ValueError, match=r"chunk_loss\(automatic\) is applied to a step that is compiled already"):
        chunk_loss()(step)


def test_steps_of_filled_up_documents_are_compiled_once() -> None:
    """And those of packs as they are have the same losses."""
    random, losses, seen = np.random.default_rng(0), dict[bool, list[float]](), list[int]()
    given = [Documents.of([random.integers(61, size=n).tolist() for n in random.integers(2, 30, size=20)]) for _ in range(3)]
    for pad in (True, False):
        step = compile_step(balance_batch(max_tokens=64, pad=pad)(xtf.train_step(model(2), xtf.optim.sgd(lr=0.1))), backend="aot_eager")
        state, losses[pad] = step.init(0), []
        for documents in given:
            state, metrics = step(state, documents)
            losses[pad].append(float(metrics["loss"]))
            seen.append(graphs())
    assert seen[0] == seen[2] > 0
    assert losses[True] == pytest.approx(losses[False], rel=1e-12)
