"""A step as one graph gives what the walk gives stage by stage, and serves every packing; what is compiled again is reported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import xtf
from xtf import compile as compile_step
from xtf import testing, tree
from xtf.compile import lowering
from xtf.stage import Rows
from xtf.transforms import accumulate, chunk_loss, expert_parallel, remat, shard, swap_activations

SMALL = ["llama", "qwen3", "qwen3_moe", "deepseek_v3"]


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def plain_step(family: str, keep: bool) -> xtf.TrainStep:
    step = chunk_loss()(xtf.train_step(testing.small_models()[family], xtf.optim.adamw(lr=1e-2)))
    return remat("nothing")(step) if keep else step


def agree(got: Any, expected: Any) -> None:
    for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def check_steps(plain: xtf.TrainStep, compiled: xtf.TrainStep, steps: int) -> None:
    """The same states and metrics step by step, with another packing at each, and no code made after the first step."""
    vocab, state, own = plain.model.vocab, plain.init(0), compiled.init(0)
    batches = [testing.random_batch(vocab, seed=i) for i in range(steps)]
    assert len({plain.model.pack(b)["cu_seqlens"].shape for b in batches}) > 1
    made: list[int] = []
    for batch in batches:
        state, expected = plain(state, batch)
        own, metrics = compiled(own, batch)
        assert metrics.keys() == expected.keys()
        agree([metrics[name] for name in expected], list(expected.values()))
        agree(own.params, state.params)
        made.append(graphs())
    assert len(set(made)) == 1
    agree(list(compiled.evaluate(own.params, batches[0]).values()), list(plain.evaluate(own.params, batches[0]).values()))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_one_graph_gives_the_steps_of_the_walk(family: str, keep: bool) -> None:
    plain = plain_step(family, keep)
    check_steps(plain, compile_step(plain, backend="eager", unit="step"), 3)


@pytest.mark.full
@pytest.mark.parametrize("unit", ["stage", "step"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", SMALL)
def test_nothing_is_compiled_after_the_first_step(family: str, keep: bool, unit: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    counters.clear()
    plain = plain_step(family, keep)
    with caplog.at_level(logging.WARNING, logger="xtf.compile"):
        check_steps(plain, compile_step(plain, backend="aot_eager", unit=unit), 4)
    assert not [record for record in caplog.records if record.name == "xtf.compile"]


def test_one_graph_is_traced_once_for_all_packings_and_lowered_without_breaks() -> None:
    torch.compiler.reset()
    counters.clear()
    plain = plain_step("llama", False)
    check_steps(plain, compile_step(plain, backend="aot_eager", unit="step"), 4)
    assert graphs() == 2  # steps, and the evaluation


def test_several_micro_batches_are_one_graph_too() -> None:
    plain = accumulate(2)(plain_step("llama", False))
    batch = testing.random_batch(plain.model.vocab, rows=4)
    params = plain.init(0).params
    loss, grads = compile_step(plain, backend="eager", unit="step").value_and_grad(params, batch)
    expected, expected_grads = plain.value_and_grad(params, batch)
    agree((loss, grads), (expected, expected_grads))


def swapped(step: xtf.TrainStep) -> xtf.TrainStep:
    return swap_activations()(step)


def test_what_no_graph_can_hold_is_refused() -> None:
    step = plain_step("qwen3_moe", False)

    def refuse(transform: Callable[[Any], Callable[[xtf.TrainStep], xtf.TrainStep]], reason: str) -> Callable[[Any], None]:
        def on(mesh: Any) -> None:
            with pytest.raises(ValueError, match=rf"unit='step'.*{reason}.*unit='stage'"):
                compile_step(transform(mesh)(step), backend="eager", unit="step")

        return on

    xtf.simulate(refuse(lambda mesh: shard(mesh["data"]), "collectives over the axes data"), data=2)
    xtf.simulate(refuse(lambda mesh: expert_parallel(mesh["expert"]), "collectives over the axes expert; it has exchanges"), expert=2)
    refuse(lambda mesh: swapped, "what stages keep is moved")(None)


def test_a_function_that_is_compiled_again_says_so(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    fn = lowering("aot_eager")(lambda params, x: x * 3, ("a family", 16, "scale"))
    with caplog.at_level(logging.WARNING, logger="xtf.compile"):
        fn({}, torch.ones(4, 2))
        fn({}, torch.ones(4, 2))
        assert not caplog.records
        fn({}, torch.ones(5, 2))
    (record,) = caplog.records
    assert record.getMessage().startswith("a family scale was compiled again: ")
    assert "size mismatch" in record.getMessage()


def test_no_row_and_one_row_have_code_of_their_own_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    fn = lowering("aot_eager")(lambda params, x: x * 5, Rows("rows"))
    with caplog.at_level(logging.WARNING, logger="xtf.compile"):
        sums = [float(fn({}, torch.ones(rows, 2)).sum()) for rows in (7, 3, 1, 0, 9)]
    assert sums == [70, 30, 10, 0, 90]
    assert not caplog.records
