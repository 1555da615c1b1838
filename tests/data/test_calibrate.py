"""The measured cost: what made the times is found, and every rank has the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xtf import testing
from xtf.data import Cost, measure_cost
from xtf.mesh import Mesh, simulate
from xtf.step import train_step
from xtf.transforms import shard


class Machine:
    """A step that takes the time a cost says, by its own clock; its first call for a batch takes a second more."""

    device, token_axis, model = torch.device("cpu"), None, SimpleNamespace(vocab=61)

    def __init__(self, cost: Cost) -> None:
        self.cost, self.now, self.seen = cost, 0.0, set[int]()

    def value_and_grad(self, params: object, batch: dict[str, torch.Tensor]) -> None:
        counts = torch.unique_consecutive(batch["document_ids"], return_counts=True)[1]
        self.now += float(self.cost(counts.tolist()).sum()) + (len(counts) not in self.seen)
        self.seen.add(len(counts))

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("max_tokens", [8, 100, 4096])
def test_finds_what_made_the_times(max_tokens: int) -> None:
    machine: Any = Machine(Cost(linear=2e-4, quadratic=3e-7))
    cost = measure_cost(machine, None, max_tokens=max_tokens, clock=machine.clock)
    assert cost.linear == pytest.approx(2e-4, rel=1e-6) and cost.quadratic == pytest.approx(3e-7, rel=1e-5)


def test_of_a_real_step_is_one_cost_on_all_ranks() -> None:
    def rank(mesh: Mesh) -> Cost:
        step = shard(mesh["data"])(train_step(testing.small_models()["qwen3_moe"], testing.default_optimizer()))
        return measure_cost(step, step.init(0).params, max_tokens=64, repeats=1)

    first, second = simulate(rank, data=2)
    assert first == second and float(first([64])[0]) > 0


def test_refuses() -> None:
    machine: Any = Machine(Cost.attention())
    with pytest.raises(ValueError, match="max_tokens is 4, expected at least 8"):
        measure_cost(machine, None, max_tokens=4)
    with pytest.raises(ValueError, match="repeats is 0"):
        measure_cost(machine, None, max_tokens=64, repeats=0)
