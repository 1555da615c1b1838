"""The same run twice has the same bits; on another layout it is the same to rounding."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import xtf
from tests import gloo, laws
from xtf import optim, testing, tree
from xtf.deterministic import check_device, deterministic
from xtf.mesh import Mesh, simulate, split_batch
from xtf.step import compose, train_step
from xtf.transforms import chunk_loss, expert_parallel, shard


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def trained(
    mesh: Mesh | None, backend: Any, dtype: torch.dtype = torch.float32, *, rows: int = 8, steps: int = 5, asked: bool = True
) -> tuple[list[Tensor], list[float]]:
    """Steps of a mixture of experts: whole parameters, and losses."""
    transforms: list[Any] = [chunk_loss(7)]
    if mesh is not None:
        transforms = [
            *([expert_parallel(mesh["expert"])] if "expert" in mesh.sizes else []),
            shard(*(mesh[a] for a in mesh)),
            chunk_loss(7),
        ]
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(lr=1e-2, eps=1e-3))
    step = compose(*transforms)(train_step(testing.small_models(dtype)["qwen3_moe"], optimizer))
    step = xtf.compile(step, backend=backend, donate=True, deterministic=asked)
    state, losses = step.init(0), list[float]()
    for i in range(steps):
        batch = testing.random_batch(61, rows=rows, seq=33, seed=i)
        state, metrics = step(state, batch if mesh is None else split_batch(batch, mesh))
        losses.append(float(metrics["loss"]))
    return [leaf.clone() for leaf in tree.leaves(step.full(state.params))], losses


def same(a: tuple[list[Tensor], list[float]], b: tuple[list[Tensor], list[float]]) -> bool:
    return a[1] == b[1] and all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.usefixtures("two_threads")
def test_the_same_run_has_the_same_bits(backend: str) -> None:
    rows = 64  # torch shares out sums of more than 32,768 elements
    first = trained(None, backend, rows=rows, steps=1)
    assert same(first, trained(None, backend, rows=rows, steps=1))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("real", [False, True])
def test_ranks_have_the_same_bits_again(real: bool) -> None:
    """Simulated ranks sum in rank order; gloo sums in an order that depends on the sizes alone."""
    sizes: dict[str, Any] = {"data": 2}
    run = (
        (lambda: gloo.run(trained, "eager", ranks=2, **sizes)) if real else (lambda: simulate(lambda mesh: trained(mesh, "eager"), **sizes))
    )
    first, second = run(), run()
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert same(first[0], first[1])  # and so have all ranks


def test_layouts_agree_in_float64() -> None:
    """Within 1e-12 of the largest value of each leaf, after five steps."""
    alone = trained(None, "eager", torch.float64)
    layouts: list[dict[str, Any]] = [{"data": 2}, {"data": 2, "expert": 2}]
    for sizes in layouts:
        for params, losses in simulate(lambda mesh: trained(mesh, "eager", torch.float64), **sizes):
            assert losses == pytest.approx(alone[1], rel=1e-12, abs=0)
            for ours, theirs in zip(params, alone[0], strict=True):
                assert float((ours - theirs).abs().max()) <= 1e-12 * float(theirs.abs().max())


def test_the_switch_is_set_back_whatever_happens() -> None:
    with pytest.raises(ZeroDivisionError), deterministic():
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_switch_stays_on_while_any_thread_needs_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with deterministic():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with deterministic():
        thread.start()
        entered.wait()
    assert torch.are_deterministic_algorithms_enabled()
    leave.set()
    thread.join()
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_form_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"deterministic=True: put_ has no deterministic form on this device"), deterministic():
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    with pytest.raises(RuntimeError, match=r"^another$"), deterministic():
        raise RuntimeError("another")


def test_cuda_needs_its_workspace_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG is None"):
        check_device(torch.device("cuda"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    check_device(torch.device("cuda"))


def test_a_deterministic_step_counts_as_compiled() -> None:
    step = xtf.compile(train_step(laws.model("tiny"), optim.sgd(lr=0.1)), backend="eager", deterministic=True)
    assert "deterministic" in repr(step)
    with pytest.raises(ValueError, match="already compiled"):
        xtf.compile(step)
    with pytest.raises(ValueError, match="compiled already"):
        chunk_loss()(step)
