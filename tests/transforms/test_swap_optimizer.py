"""`swap_optimizer`: the same bits, each leaf's state out once and back once, and two leaves' state on the device at most."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import xtf
from tests import laws
from tests.memory import Live
from xtf import optim, testing, tree
from xtf.host import HostMemory
from xtf.mesh import Mesh
from xtf.optim import Optimizer
from xtf.optim.placement import Unplaced
from xtf.run.memory import estimate
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import accumulate, remat, shard, swap_activations, swap_optimizer

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(lr=1e-2, weight_decay=0.1)),
    "muon": lambda: optim.muon_adamw(1e-2),
    "sgd": lambda: optim.sgd(lr=1e-2, momentum=0.9),
}


class Aside(HostMemory):
    """Host memory that no mode sees: what is left is the device's."""

    def allocate(self, bytes: int, device: torch.device) -> Tensor:
        with _disable_current_modes():
            return super().allocate(bytes, device)


def trained(step: TrainStep, steps: int = 3) -> list[Any]:
    state = step.init(0)
    seen: list[Any] = []
    for seed in range(steps):
        state, metrics = step(state, testing.random_batch(61, seed=seed))
        seen.append(metrics)
    return tree.leaves((state.params, state.opt, seen))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])  # the second has leaves that are not trained
def test_the_same_bits(name: str, donate: bool, model: str) -> None:
    plain = train_step(laws.model(model), OPTIMIZERS[name]())
    host = HostMemory()
    swapped = swap_optimizer(host=host)(plain)
    both = [xtf.compile(step, backend="eager", donate=donate) for step in (swapped, plain)]
    for a, b in zip(*map(trained, both), strict=True):
        assert a is b is None or torch.equal(a, b)
    assert host.out == host.back > 0


@pytest.mark.parametrize("donate", [False, True])
def test_state_is_in_the_hosts_memory_and_it_does_not_grow(donate: bool) -> None:
    host = HostMemory()
    step = xtf.compile(swap_optimizer(host=host)(train_step(laws.model("llama"), optim.adamw(lr=1e-2))), backend="eager", donate=donate)
    state, batch = step.init(0), testing.random_batch(61)
    moments = 2 * 8 * step.model.param_count()[0]
    assert host.held == moments
    held: list[int] = []
    for _ in range(4):
        state, _ = step(state, batch)
        gc.collect()
        held.append(host.held)
    assert held == [moments] * 4
    leaves = len(tree.leaves(state.params))
    assert host.out == host.back == 4 * 2 * leaves


def test_the_device_holds_the_state_of_two_leaves() -> None:
    model, host = laws.model("llama"), Aside()
    optimizer = swap_optimizer(host=host)(train_step(model, optim.adamw(lr=1e-2))).optimizer
    params = model.init(0)
    grads, state = tree.map(torch.ones_like, params), optimizer.init(params)
    plain = optim.adamw(lr=1e-2)
    on_device = plain.init(params)
    donated = Unplaced(donate=True)
    sizes = [2 * leaf.nbytes for leaf in tree.leaves(params)]
    peaks: list[int] = []
    for update, given in ((optimizer.update, state), (plain.update, on_device)):
        own = tree.map(torch.clone, grads)
        gc.collect()
        with Live() as live:
            update(own, given, params, donated)
        peaks.append(live.most)
    most = max(a + b for a, b in itertools.pairwise(sizes))
    workspace = peaks[1]  # what the kernel itself takes
    assert peaks[0] <= most + max(sizes) + workspace + 4096  # the two leaves, and the new state of the first before it is put back
    assert peaks[0] < sum(sizes)


def test_laws_with_everything_else() -> None:
    def transform(mesh: Mesh) -> testing.Transform:
        everything = swap_activations(lambda stage, bytes: True)
        return compose(swap_optimizer(), remat(["attention"]), everything, shard(mesh["data"], mesh["expert"]), accumulate(2))

    testing.check(transform, model=[laws.model("qwen3_moe")], data=2, expert=2)


def test_saved_and_resumed(tmp_path: Path) -> None:
    step = swap_optimizer()(train_step(laws.model("llama"), optim.adamw(lr=1e-2)))
    plain = train_step(laws.model("llama"), optim.adamw(lr=1e-2))
    batch = testing.random_batch(61)
    state, _ = step(step.init(0), batch)
    xtf.save_state(step, state, tmp_path / "state")
    for other in (step, plain):
        loaded, _ = xtf.load_state(other, tmp_path / "state")
        for a, b in zip(tree.leaves(other(loaded, batch)), tree.leaves(step(state, batch)), strict=True):
            assert torch.equal(a, b)


def test_a_host_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"swap_optimizer\(host=5\): expected a xtf.host.HostMemory"):
        swap_optimizer(host=5)  # pyright: ignore[reportArgumentType]


def test_twice() -> None:
    with pytest.raises(ValueError, match="swap_optimizer is applied twice"):
        swap_optimizer()(swap_optimizer()(train_step(laws.model("llama"), optim.adamw(lr=1e-2))))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_it_takes_is_counted_without_running(name: str) -> None:
    plain = train_step(laws.model("llama"), OPTIMIZERS[name]())
    kept, swapped = (estimate(xtf.compile(step, backend="eager", donate=True), 256) for step in (plain, swap_optimizer()(plain)))
    assert swapped["host"] == kept["optimizer"] - swapped["optimizer"] > 0
    assert swapped["optimizer"] < 100  # counts
    assert kept["peak"] - swapped["peak"] <= swapped["host"]
