"""`skip_spikes`: a step far above the others changes nothing, and all others are what they are without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import xtf
from tests import gloo, laws
from xtf import optim, testing, tree
from xtf.mesh import Mesh, simulate, split_batch
from xtf.optim import Optimizer
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import shard, swap_optimizer


def optimizer(*before: Optimizer) -> Optimizer:
    return optim.chain(*before, optim.clip_by_global_norm(1.0), optim.adamw(lr=1e-2))


def one_target(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch of which one token is learned: its gradient is not averaged with others', and so far longer."""
    labels = batch["labels"].clone()
    row, at = divmod(int((labels[:, 1:] >= 0).flatten().nonzero()[-1]), labels.shape[1] - 1)
    kept = labels[row, at + 1].clone()
    labels.fill_(-100)
    labels[row, at + 1] = kept
    return batch | {"labels": labels}


def batches(count: int, spike: int | None = None) -> list[dict[str, Tensor]]:
    plain = [testing.random_batch(61, seed=i) for i in range(count)]
    return [one_target(batch) if i == spike else batch for i, batch in enumerate(plain)]


def made(model: str, chosen: Optimizer, *transforms: Any, compiled: bool = False) -> TrainStep:
    step = compose(*transforms)(train_step(laws.model(model), chosen))
    return xtf.compile(step, backend="eager", donate=True) if compiled else step


def trained(step: TrainStep, given: list[dict[str, Tensor]], state: Any = None) -> tuple[Any, list[int]]:
    state, skipped = step.init(0) if state is None else state, list[int]()
    for batch in given:
        state, metrics = step(state, batch)
        skipped.append(int(metrics["skipped"]))
    return state, skipped


def same(a: Any, b: Any) -> bool:
    pairs = list(zip(tree.leaves(a), tree.leaves(b), strict=True))
    return tree.paths(a) == tree.paths(b) and all(x is y if x is None else torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_huge_factor_changes_no_bit(compiled: bool) -> None:
    plain, _ = trained(made("moe_step", optimizer(), compiled=compiled), batches(5))
    watched, skipped = trained(made("moe_step", optimizer(optim.skip_spikes(1e9, window=2)), compiled=compiled), batches(5))
    assert skipped == [0] * 5
    assert same(plain.params, watched.params) and same(plain.opt, watched.opt[1:])


@pytest.mark.parametrize("model", ["moe_step", "deepseek_v3"])
def test_a_spike_changes_nothing(model: str) -> None:
    """Router corrections (of deepseek_v3) and the history among what stays, so that the steps after it are those without it."""
    step = made(model, optimizer(optim.skip_spikes(1.8, window=2)), compiled=True)
    with_spike, skipped = trained(step, batches(6, spike=4))
    without, never = trained(step, [batch for i, batch in enumerate(batches(6)) if i != 4])
    assert skipped == [0, 0, 0, 0, 1, 0] and never == [0] * 5
    assert same(with_spike.params, without.params) and same(with_spike.opt, without.opt)
    assert (int(with_spike.step), int(with_spike.skipped), int(without.step)) == (6, 1, 5)
    unwatched, _ = trained(made(model, optimizer()), batches(6, spike=4))
    assert not same(unwatched.params, with_spike.params)


def test_no_rule_for_the_first_steps_and_a_lasting_rise_skips_on() -> None:
    step = made("tiny", optimizer(optim.skip_spikes(1.5, window=3)))
    assert trained(step, batches(3, spike=1))[1] == [0, 0, 0]
    high = [one_target(batch) for batch in batches(4)]
    assert trained(step, batches(3) + high)[1] == [0, 0, 0, 1, 1, 1, 1]


def test_what_is_not_finite_stays_out_of_the_history() -> None:
    rule = optim.skip_spikes(2.0, window=1)
    state = rule.init({"w": torch.zeros(1)})
    assert rule.judge is not None
    _, state = rule.judge(state, {"grad_norm": torch.tensor(1.0)})
    accepted, _ = rule.judge(state, {"grad_norm": torch.tensor(float("nan"))})
    assert not bool(accepted)
    assert float(rule.metrics(state)["spike_limit"]) == 2.0


def _on_ranks(mesh: Mesh) -> tuple[Any, list[int]]:
    step = made("moe_step", optimizer(optim.skip_spikes(1.8, window=2)), shard(mesh["data"]))
    state, skipped = trained(step, [split_batch(batch, mesh) for batch in batches(6, spike=4)])
    return step.full(state.params), skipped


@pytest.mark.parametrize("real", [False, True])
def test_all_ranks_skip_alike(real: bool) -> None:
    alone, _ = trained(made("moe_step", optimizer(optim.skip_spikes(1.8, window=2))), batches(6, spike=4))
    for params, skipped in gloo.run(_on_ranks, ranks=2, data=2) if real else simulate(_on_ranks, data=2):
        assert skipped == [0, 0, 0, 0, 1, 0]
        for ours, theirs in zip(tree.leaves(params), tree.leaves(alone.params), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_a_resumed_run_decides_alike(tmp_path: Path) -> None:
    for at, transforms in enumerate([(), (swap_optimizer(),)]):
        step = made("moe_step", optimizer(optim.skip_spikes(1.8, window=2)), *transforms)
        whole, _ = trained(step, batches(6, spike=4))
        part, _ = trained(step, batches(6, spike=4)[:3])
        xtf.save_state(step, part, tmp_path / str(at))
        loaded, _ = xtf.load_state(step, tmp_path / str(at))
        resumed, skipped = trained(step, batches(6, spike=4)[3:], loaded)
        assert skipped == [0, 1, 0]
        assert same(resumed, whole)


@pytest.mark.parametrize("bad", [{"factor": 1.0}, {"factor": float("nan")}, {"factor": 2.0, "window": 0}, {"factor": 2.0, "window": 1.5}])
def test_bad_arguments_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="skip_spikes"):
        optim.skip_spikes(**bad)


def test_it_stands_before_a_partition_not_within() -> None:
    with pytest.raises(ValueError, match="chain it before the partition"):
        optim.partition(lambda path, p: True, {True: optimizer(optim.skip_spikes(2.0))})
    assert optim.chain(optim.sgd(lr=1.0)).judge is None
