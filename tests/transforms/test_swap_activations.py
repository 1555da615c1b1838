"""`swap_activations`: the same bits, each tensor out once and back once, and a device that holds two stages however deep the model is."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import xtf
from tests import laws
from tests.memory import Live, peak_bytes
from xtf import testing, tree
from xtf.host import HostMemory
from xtf.mesh import Mesh, simulate
from xtf.models import from_hf
from xtf.record import Record
from xtf.stage import Stage
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import accumulate, chunk_loss, expert_parallel, remat, shard, swap_activations
from xtf.transforms.remat import Policy
from xtf.transforms.swap_activations import large


def everything(stage: Stage, bytes: int) -> bool:
    return True


class Seen(HostMemory):
    """Host memory that counts, and whose buffers no mode sees: what is left is the device's."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self.went: list[tuple[str, int]] = []
        self.sources: list[weakref.ref[torch.UntypedStorage]] = []

    def allocate(self, bytes: int, device: torch.device) -> Tensor:
        with _disable_current_modes():
            return super().allocate(bytes, device)

    def send(self, tensor: Tensor) -> Any:
        self.sources.append(weakref.ref(tensor.untyped_storage()))
        away = super().send(tensor)
        assert away is None or away.view().untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        return away


def bits(step: TrainStep, batch: Any) -> list[Any]:
    state = step.init(0)
    return tree.leaves((step.value_and_grad(state.params, batch), step(state, batch)))


@pytest.mark.parametrize("name", laws.MODELS)
def test_the_same_bits(name: str) -> None:
    plain = train_step(laws.model(name), testing.default_optimizer())
    host = Seen()
    swapped, batch = swap_activations(everything, host=host)(plain), testing.random_batch(61)
    for a, b in zip(bits(swapped, batch), bits(plain, batch), strict=True):
        assert a is b is None or torch.equal(a, b)
    assert host.out == host.back > 0


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("dispatcher", ["deduplicated", "all_to_all"])
def test_laws_with_everything_else(overlap: int, dispatcher: str) -> None:
    def transform(mesh: Mesh) -> testing.Transform:
        parts = (shard(mesh["data"], mesh["expert"]), expert_parallel(mesh["expert"], overlap=overlap, dispatcher=dispatcher))
        return compose(swap_activations(everything), chunk_loss(7), *parts, accumulate(2))

    testing.check(transform, model=[laws.model("qwen3_moe"), laws.model("deepseek_v3")], data=2, expert=2)


def test_each_tensor_goes_once_and_its_memory_is_free_before_the_second_stage_after() -> None:
    model, host, record = laws.model("llama"), Seen(), Record()
    step, alive = swap_activations(everything, host=host)(train_step(model, testing.default_optimizer())), list[list[int]]()

    def watch(stage: Stage) -> Stage:
        """Before a stage runs forward: which of what was sent is still alive."""

        def fn(params: Any, *reads: Any, **consts: Any) -> Any:
            alive.append([i for i, ref in enumerate(host.sources) if ref() is not None])
            return stage.fn(params, *reads, **consts)

        return dataclasses.replace(stage, fn=fn) if stage.kind in ("attention", "mlp", "norm") else stage

    step.__dict__["program"] = tuple(watch(s) if isinstance(s, Stage) else s for s in step.program)
    step.value_and_grad(step.init(0).params, testing.random_batch(61), record=record)
    forward = alive[:5]  # two layers of two stages and the norm: each keeps one tensor
    assert [len(sent) <= 1 for sent in forward] == [True] * 5
    assert all(not sent or sent == [at - 1] for at, sent in enumerate(forward))
    starts = {what: [event.stage for event in record.select("start", what)] for what in ("store", "fetch")}
    kept = [stage for stage in starts["store"] if stage != "embed"]
    assert kept == ["layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp", "norm"]
    assert [stage for stage in starts["fetch"] if stage != "embed"] == kept[::-1]
    assert host.out == host.back == 5
    sizes = [sum(event.bytes for event in record.select("start", what)) for what in ("store", "fetch")]
    assert sizes[0] == sizes[1] == 5 * 65 * 20 * 8


def deep(depth: int, swap: bool, policy: Policy = "everything") -> tuple[TrainStep, Any, dict[str, Tensor]]:
    """A step whose activations are all that grows with depth, parameters and a batch."""
    config = laws.TINY | {"num_hidden_layers": depth, "hidden_size": 8, "tie_word_embeddings": False}
    model = from_hf(config, dtype=torch.float64)
    frozen = tree.map(lambda spec: dataclasses.replace(spec, trainable=False), model.specs)
    frozen["head"]["weight"] = dataclasses.replace(frozen["head"]["weight"], trainable=True)  # gradients of layers would count
    step = train_step(dataclasses.replace(model, specs=frozen), testing.default_optimizer())
    step = compose(remat(policy), chunk_loss(tokens=16))(step)
    step = swap_activations(everything, host=Seen())(step) if swap else step
    return step, step.init(0).params, testing.random_batch(61, rows=16, seq=64)


def live_activations(depth: int, swap: bool, policy: Policy = "everything") -> int:
    """The most bytes that stages' values and residuals hold at once on the device in a forward and backward."""
    step, params, batch = deep(depth, swap, policy)
    gc.collect()
    with Live() as live:
        step.value_and_grad(params, batch)
    return live.most


def test_live_activations_do_not_grow_with_depth() -> None:
    swapped = [live_activations(depth, True) for depth in (4, 16, 64)]
    assert max(swapped) < 1.05 * min(swapped)
    kept = [live_activations(depth, False) for depth in (4, 16, 64)]
    assert kept[2] - kept[1] == pytest.approx(4 * (kept[1] - kept[0]), rel=0.05)  # without, linearly
    assert kept[2] - kept[0] > 60 * 2 * 1024 * 8 * 8 * 0.95  # a tensor for each of two stages of 60 layers more


@pytest.mark.parametrize("policy", ["nothing", ["attention", "gate_up"]], ids=str)
def test_nor_does_what_is_kept_besides(policy: Policy) -> None:
    live_activations(4, True, policy)  # what is traced once is alive later
    swapped = [live_activations(depth, True, policy) for depth in (4, 16)]
    assert max(swapped) < 1.05 * min(swapped)
    assert live_activations(16, False, policy) > 2 * swapped[1]


def test_compiled_stages_free_what_is_swapped() -> None:
    """Counted by the profiler, for compiled code allocates where no mode sees it. Host buffers are there before."""

    def peak(depth: int, swap: bool) -> int:
        step, params, batch = deep(depth, swap, "nothing")
        step = xtf.compile(step, backend="aot_eager")
        step.value_and_grad(params, batch)
        return peak_bytes(lambda: step.value_and_grad(params, batch)[0])

    swapped = [peak(depth, True) for depth in (4, 12)]
    assert max(swapped) < 1.05 * min(swapped)
    assert peak(12, False) > 2 * swapped[1]


def test_buffers_are_reused() -> None:
    host = Seen()
    step = swap_activations(everything, host=host)(train_step(laws.model("qwen3_moe"), testing.default_optimizer()))
    state, batch = step.init(0), testing.random_batch(61)
    state, _ = step(state, batch)
    held = host.held
    for _ in range(3):
        state, _ = step(state, batch)
    assert host.held == held and host.out == host.back


def test_a_limit_keeps_on_the_device_what_does_not_fit_and_says_so_once() -> None:
    plain, batch = train_step(laws.model("llama"), testing.default_optimizer()), testing.random_batch(61)
    one = 65 * 20 * 8
    host = Seen(limit=2 * one + 100)
    step = swap_activations(everything, host=host)(plain)
    with pytest.warns(UserWarning, match="would pass the limit of 20,900") as caught:
        got = bits(step, batch)
    assert len(caught) == 1 and host.held <= 2 * one + 100 and host.out == host.back == 4
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, bits(plain, batch), strict=True))


def test_a_policy_chooses() -> None:
    plain, batch = train_step(laws.model("qwen3"), testing.default_optimizer()), testing.random_batch(61)
    for policy, count in ((large, 0), (lambda stage, bytes: stage.kind == "mlp", 2), (lambda stage, bytes: bytes > 1e9, 0)):
        host = Seen()
        step = swap_activations(policy, host=host)(plain)
        step.value_and_grad(step.init(0).params, batch)
        assert host.out == host.back == count
    assert "swap_activations(" in repr(step)


def test_compiled_steps_swap_too() -> None:
    host = Seen()
    plain = train_step(from_hf(laws.TINY_MOE, dtype=torch.float32), testing.default_optimizer())
    batch = testing.random_batch(61)
    swapped, reference = (xtf.compile(step, backend="aot_eager") for step in (swap_activations(everything, host=host)(plain), plain))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(bits(swapped, batch), bits(reference, batch), strict=True))
    assert host.out == host.back > 0


def test_simulated_ranks_share_a_pool() -> None:
    host = Seen()

    def seen(mesh: Mesh) -> Any:
        step = compose(swap_activations(everything, host=host), shard(mesh["data"]))(
            train_step(laws.model("llama"), testing.default_optimizer())
        )
        return step.value_and_grad(step.init(0).params, testing.random_batch(61))[0]

    assert len({float(loss) for loss in simulate(seen, data=3)}) == 1 and host.out == host.back == 15


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"policy='mlp'\): expected a function"):
        swap_activations("mlp")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"swap_activations\(host=5\): expected a xtf.host.HostMemory"):
        swap_activations(host=5)  # pyright: ignore[reportArgumentType]
    for limit in (-1, "1GB", float("nan"), True):
        with pytest.raises(ValueError, match=r"limit=.*\): expected a number of bytes"):
            HostMemory(limit)  # pyright: ignore[reportArgumentType]
    plain, batch = train_step(laws.model("llama"), testing.default_optimizer()), testing.random_batch(61)
    for policy, kind, said in ((lambda stage: True, TypeError, "policy(stage, bytes)"), (lambda stage, bytes: "x", ValueError, "said 'x'")):
        wrong = swap_activations(policy)(plain)  # pyright: ignore[reportArgumentType]
        with pytest.raises(kind) as caught:
            wrong.value_and_grad(wrong.init(0).params, batch)
        assert said in "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    step = train_step(laws.model("llama"), testing.default_optimizer())
    with pytest.raises(ValueError, match="applied twice"):
        compose(swap_activations(), swap_activations())(step)
