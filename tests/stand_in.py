"""A device that is none: torch's PrivateUse1, in Python, whose tensors hold tensors of the CPU. Started as a program, it trains on it.

Its tensors say that they are on ``npu:0`` or whatever it is called, torch dispatches on that, and mixing them with tensors of the CPU
fails as on hardware. It has no streams, no pinned memory and no allocator that counts. One process can have one such device.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_CPU = torch.device("cpu")


def make(kind: str) -> torch.device:
    """Give this process a device of a kind."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(kind)
    fallback, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    StandIn.libraries = [fallback, aten]  # registered as long as they are held
    StandIn.where = torch.device(kind, 0)
    return StandIn.where


class StandIn(Tensor):
    where: torch.device
    libraries: list[Any]
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> StandIn:
        given: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return Tensor._make_wrapper_subclass(cls, held.shape, device=cls.where, **given)  # pyright: ignore

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self, **_: Any) -> str:
        return f"StandIn({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation, on what the tensors hold."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = kwargs.get("device") or StandIn.where
    if op is not _aten._to_copy.default and op is not _aten.copy_.default:
        stray = [t for t in given if not isinstance(t, StandIn) and t.dim()]
        assert not stray, f"{op} got tensors of two devices"
    kwargs = {name: _CPU if name == "device" and value is not None else value for name, value in kwargs.items() if name != "pin_memory"}
    out = op(*_held(args), **_held(kwargs))
    if torch.device(here).type != StandIn.where.type or (op is _aten.copy_.default and not isinstance(args[0], StandIn)):
        return args[0] if op is _aten.copy_.default else out
    out = tree_map_only(Tensor, StandIn, out)
    return return_and_correct_aliasing(op, args, kwargs, out) if op._schema.is_mutable else out


def _held(value: Any) -> Any:
    return tree_map_only(StandIn, lambda t: t.held, value)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _held(target).copy_(_held(source))
    return target


def main(kind: str) -> None:
    """Train on the device and on the CPU: the same numbers; and everything that a backend is asked is answered."""
    device = make(kind)
    import xtf
    from tests import fake_torch_npu
    from xtf.backends import Backend, backend_of, register
    from xtf.collectives.process_group import backend
    from xtf.host import HostMemory
    from xtf.run.fit import free_bytes
    from xtf.run.memory import used_memory
    from xtf.testing import random_batch
    from xtf.transforms import accumulate, chunk_loss, swap_activations, swap_optimizer

    sys.modules["torch_npu"] = fake_torch_npu.module()
    as_registered = backend_of(kind) if kind == "npu" else Backend(kind, collectives="gloo")
    register(dataclasses.replace(as_registered, pinned=False, streams=False, memory=None, synchronize=lambda device: None))
    assert backend() == (as_registered.collectives, device), backend()

    host = HostMemory()

    def step_on(where: torch.device, host: HostMemory | None = None) -> xtf.TrainStep:
        step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3, eps=0.1), device=where)  # no signs of noise
        return xtf.compose(accumulate(2), chunk_loss(8), swap_activations(host=host), swap_optimizer(host=host))(step)

    step, plain = step_on(device, host), step_on(_CPU)
    state, wanted = step.init(0), plain.init(0)
    assert all(leaf.device == device for leaf in xtf.tree.leaves(state.params))
    for seed in range(2):
        batch = random_batch(2048, rows=2, seq=10, seed=seed)
        state, metrics = step(state, {name: t.to(device) for name, t in batch.items()})
        wanted, expected = plain(wanted, batch)
        assert metrics["loss"].device == device
        assert torch.allclose(metrics["loss"].cpu(), expected["loss"], rtol=1e-5), (metrics["loss"], expected["loss"])
    for found, want in zip(xtf.tree.leaves(state.params), xtf.tree.leaves(wanted.params), strict=True):
        assert torch.allclose(found.cpu(), want, rtol=0, atol=1e-6)  # an update is lr at most
    assert host.out > 50 and host.back > 50, (host.out, host.back)
    assert used_memory(device) > 1e6 and free_bytes(device) > 1e6
    print("trained", sorted(set(fake_torch_npu.calls)))


if __name__ == "__main__":
    main(sys.argv[1])
