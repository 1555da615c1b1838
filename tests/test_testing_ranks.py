"""The checker on several steps and on real ranks: what it is given, what it finds, and how it ends when a rank does not."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from functools import partial
from typing import Any

import pytest

from tests import laws
from tests.silent.record import not_finite_at, poisoned
from xtf import optim, testing
from xtf.data import Documents
from xtf.mesh import Mesh
from xtf.stage import Stage
from xtf.step import TrainStep, compose
from xtf.testing import LawError
from xtf.transforms import accumulate, balance_batch, expert_parallel, shard

TINY = partial(laws.model, "tiny")


# Several steps -------------------------------------------------------------------------------------------------------------------


def test_steps_are_compared_one_by_one() -> None:
    layout = lambda mesh: compose(accumulate(2), expert_parallel(mesh["expert"]), shard(mesh["data"]))  # noqa: E731
    (report,) = testing.check(layout, model=laws.model("deepseek_v3"), steps=3, data=2, expert=2)
    assert report.worst <= 1e-12
    for step in (1, 2, 3):
        assert f"step {step}, layers.1.moe.correction after the step on rank 3" in report.errors
        assert f"step {step}, metric load_violation on rank 0" in report.errors
    assert len({key.split(", ", 1)[1] for key in report.errors}) * 3 == len(report.errors)


def test_a_batch_for_each_step_a_model_and_an_optimizer_of_ones_own() -> None:
    batches = [testing.random_batch(61, seed=seed, rows=rows) for seed, rows in ((1, 2), (2, 5), (3, 3))]
    made = lambda: optim.sgd(lr=0.1, momentum=0.9)  # noqa: E731
    (report,) = testing.check(lambda mesh: shard(mesh["data"]), model=TINY, batch=batches, optimizer=made, data=2)
    assert "step 3, loss on rank 1" in report.errors
    (report,) = testing.check(lambda mesh: shard(mesh["data"]), model=TINY, batch=batches[0], steps=2, data=2)
    assert "step 2, loss on rank 1" in report.errors
    documents = Documents.of([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14]])
    testing.check(lambda mesh: balance_batch(mesh["data"], max_tokens=8), model=TINY, batch=[documents, documents], data=2)


def stale_momentum(step: TrainStep) -> TrainStep:
    """The optimizer's state is forgotten: the first step is right, the second is not."""
    inner = step.optimizer

    def update(grads: Any, state: Any, params: Any, placement: Any = optim.UNPLACED) -> Any:
        return inner.update(grads, inner.init(params, placement), params, placement)

    return step.replace("stale_momentum", optimizer=inner._replace(update=update))


def test_what_only_the_second_step_shows() -> None:
    testing.check(stale_momentum, model=TINY)
    with pytest.raises(LawError) as error:
        testing.check(stale_momentum, model=TINY, steps=2)
    assert "step 2, embed.weight after the step: max" in str(error.value)
    assert "step 1, " not in str(error.value) and "step 2, gradient" not in str(error.value)


def test_a_step_that_is_not_finite_is_skipped() -> None:
    model = not_finite_at(60, laws.model("deepseek_v3"))
    (report,) = testing.check(lambda mesh: shard(mesh["data"]), model=model, batch=poisoned(60), data=2)
    assert "step 2, metric skipped on rank 1" in report.errors and "step 2, loss on rank 1" not in report.errors
    assert "step 3, gradient of embed.weight on rank 0" in report.errors
    with pytest.raises(ValueError, match="not finite in any step, so nothing was compared: give another batch"):
        testing.check(lambda step: step, model=model, batch=poisoned(60)[1])
    # an engine that is finite where the reference is not
    with pytest.raises(LawError, match="step 2, loss: loss and gradients are finite, those of the reference are not"):
        testing.check(lambda step: dataclasses.replace(step, model=laws.model("deepseek_v3")), model=model, batch=poisoned(60))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, r"check\(steps=0\): expected a whole number of steps, at least 1"),
        ({"steps": True}, "expected a whole number of steps"),
        ({"steps": 1, "batch": [{}, {}]}, "at least as many as the 2 batches"),
        ({"batch": []}, "a list of at least one of them, got none"),
        ({"batch": [3]}, "a list of at least one of them, got int"),
        ({"model": []}, "expected at least one model"),
        ({"model": [3]}, r"check\(model=3\): expected an xtf Model, or a function that makes one"),
        ({"model": dict}, "the function returned a dict, expected an xtf Model"),
        ({"optimizer": dict}, "the function returned a dict, expected an xtf Optimizer"),
        ({"ranks": 2}, r"expected 'simulated' or 'gloo'; the number of ranks is that of the mesh, as data=2"),
        ({"ranks": "gloo"}, "needs a mesh: name its axes and their sizes"),
        ({"ranks": "gloo", "data": 2, "timeout": 0}, r"timeout=0\): expected a number of seconds above 0"),
        ({"ranks": "gloo", "data": 0}, "the size of axis 'data' must be 1 or more, got 0"),
        ({"ranks": "gloo", "data": 65}, "are 65 ranks, each a process of this machine: give a mesh of 1 to 64"),
    ],
)
def test_what_cannot_be_checked_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        testing.check(layout, **given)


# Real ranks ----------------------------------------------------------------------------------------------------------------------


def layout(mesh: Mesh) -> testing.Transform:
    return compose(expert_parallel(mesh["expert"]), shard(mesh["expert"]))


def broken(mesh: Mesh) -> testing.Transform:
    """No gradient is summed."""

    def transform(step: TrainStep) -> TrainStep:
        changed = shard(replicate=mesh["data"])(step)
        program = tuple(dataclasses.replace(s, reduce=None) for s in changed.program if isinstance(s, Stage))
        changed.__dict__["program"] = program
        return changed

    return transform


def kills_itself(mesh: Mesh) -> testing.Transform:
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return shard(mesh["data"])


def hangs(mesh: Mesh) -> testing.Transform:
    if mesh.rank == 1:
        time.sleep(600)
    return shard(mesh["data"])


def raises(mesh: Mesh) -> testing.Transform:
    if mesh.rank == 1:
        raise KeyError("of this rank")
    return shard(mesh["data"])


def test_laws_hold_on_real_ranks_and_faults_are_found_there_too() -> None:
    moe = partial(testing.small_model, "qwen3_moe")
    (report,) = testing.check(layout, model=moe, optimizer=testing.default_optimizer, steps=2, ranks="gloo", expert=2)
    (same,) = testing.check(layout, model=moe, steps=2, expert=2)
    assert report.name == "qwen3_moe on expert=2 (gloo)" and report.errors.keys() == same.errors.keys()
    with pytest.raises(LawError) as error:
        rows = {name: value[:1].expand(2, -1) for name, value in laws.batch("plain").items()}
        testing.check(broken, model=TINY, batch=rows, ranks="gloo", data=2)
    assert "gradient of embed.weight on every rank" in str(error.value)
    assert "it is 0.5 × the reference (a missing reduction over data=2, or divided by its size)" in str(error.value)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(ValueError, match=r"the transform cannot be sent .*: other processes import .* give functions of a module"):
        testing.check(lambda mesh: shard(mesh["data"]), model=TINY, ranks="gloo", data=2)
    with pytest.raises(ValueError, match=r"the model cannot be sent .* functools.partial\(xtf.testing.small_model, \"llama\"\)"):
        testing.check(layout, model=laws.model("tiny"), ranks="gloo", expert=2)
    with pytest.raises(ValueError, match="the optimizer cannot be sent"):
        testing.check(layout, model=TINY, optimizer=optim.sgd(lr=0.1), ranks="gloo", expert=2)


def test_real_ranks_that_hang_die_or_raise_are_named() -> None:
    with pytest.raises(TimeoutError) as error:
        testing.check(hangs, model=TINY, ranks="gloo", timeout=3.0, data=2)
    message = str(error.value)
    assert "did not answer within 3 s" in message and "rank 1 stands at" in message and "in hangs" in message
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 died with exit code -9"):
        testing.check(kills_itself, model=TINY, ranks="gloo", data=2)
    with pytest.raises(KeyError, match="of this rank") as raised:
        testing.check(raises, model=TINY, ranks="gloo", data=2)
    assert any("on rank 1:" in note for note in raised.value.__notes__)
