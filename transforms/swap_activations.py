"""`swap_activations`: what a stage keeps for its backward waits in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xtf import tree
from xtf.host import Away, HostMemory, check_host
from xtf.stage import Stage, Transfer
from xtf.step import TrainStep
from xtf.swap_plan import DEFAULT_BYTES, Automatic

Policy = Callable[[Stage, int], bool]
"""``(stage, bytes of one tensor that it keeps) -> whether it goes to the host``."""


def large(stage: Stage, bytes: int) -> bool:
    """The default policy: every tensor of at least `DEFAULT_BYTES`, of every stage but the loss, whose backward comes at once."""
    return bytes >= DEFAULT_BYTES and stage.kind != "loss"


def automatic(budget: int | None = None, *, bandwidth: float | None = None) -> Automatic:
    """The policy that measures: everything is swapped in two forwards, and of the second it is taken how long stages and copies take.
    From then on go those stages whose copies are hidden behind the stage after; with a budget, only as many as it needs, and others
    too if those are not enough (`xtf.swap_plan.plan_swaps`).

    Args:
        budget: bytes of device memory that what stages keep may hold; ``None`` for no limit.
        bandwidth: of a copy, in bytes per second; by default measured.

    Raises:
        ValueError: for a negative budget or a bandwidth that is not positive.

    Example:
        >>> automatic(budget=40 * 2**30).budget
        42949672960
    """
    return Automatic(budget, bandwidth=bandwidth)


def swap_activations(policy: Policy = large, *, host: HostMemory | None = None) -> Callable[[TrainStep], TrainStep]:
    """Activations in host memory while they wait for their backward (Rhu et al. 2016, "vDNN"; Ren et al. 2021, "ZeRO-Offload").

    What a stage keeps is copied to the host while the next stage computes, and its device memory is free then; it comes back one
    stage ahead of its backward. The device holds the activations of about two stages, however deep the model is. A tensor that a
    stage keeps goes out once and comes back once; the values are the same bits. On CUDA copies run on streams of their own, one for
    each direction, from and to pinned buffers that are reused (**never run on hardware**).

    Args:
        policy: which tensors go, by default `large`. `automatic` swaps as much as copies hide, or as a budget needs.
        host: the pool of buffers, with a limit if wanted: what does not fit stays on the device, and a warning says so once. By
            default one without a limit, for each rank.

    Raises:
        ValueError: for a policy that is not callable, or a step whose activations are swapped already.

    Example:
        >>> import xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> swapped = swap_activations(lambda stage, bytes: stage.kind == "attention")(step)
        >>> sum(stage.store is not None for stage in swapped.program), len(swapped.program)
        (8, 9)
    """
    if not callable(policy):
        raise ValueError(f"swap_activations(policy={policy!r}): expected a function (stage, bytes) -> bool")
    check_host("swap_activations", host)

    def transform(step: TrainStep) -> TrainStep:
        if any(name.startswith("swap_activations") for name in step.stack):
            raise ValueError("swap_activations is applied twice")
        pool = host if host is not None else HostMemory()
        own = policy.on(step.device) if isinstance(policy, Automatic) else policy

        def declare(step: TrainStep, stage: Stage) -> Stage:
            return stage if stage.kind == "loss" else dataclasses.replace(stage, store=_store(pool, own, stage), fetch=_fetch(pool))

        said = "automatic" if isinstance(policy, Automatic) else "" if policy is large else getattr(policy, "__name__", "policy")
        return step.replace(f"swap_activations({said})", declarations=(*step.declarations, declare))

    return transform


@dataclass(frozen=True)
class _Going:
    """A copy under way; the tensor is held until it is waited for."""

    tensor: Tensor
    away: Away
    bytes: int


@dataclass(frozen=True)
class _Coming:
    tensor: Tensor
    done: Any
    bytes: int


def _store(pool: HostMemory, policy: Policy, stage: Stage) -> Transfer:
    def wanted(tensor: Tensor) -> bool:
        if tensor.is_meta and isinstance(policy, Automatic):
            return policy.planned(tensor.nbytes)
        try:
            chosen = policy(stage, tensor.nbytes)
        except TypeError as error:
            error.add_note(f"when swap_activations asked its policy about {stage.name}: it is called as policy(stage, bytes)")
            raise
        if not isinstance(chosen, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"swap_activations: the policy said {chosen!r} of {stage.name}; expected True or False")
        return chosen

    def start(residual: Any) -> Any:
        seen: dict[int, Any] = {}  # a residual may hold one tensor twice

        def send(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not wanted(leaf):
                return leaf
            if id(leaf) not in seen:
                away = pool.send(leaf)
                seen[id(leaf)] = leaf if away is None else _Going(leaf, away, away.bytes)
            return seen[id(leaf)]

        return tree.map(send, residual)

    def wait(handle: Any) -> Any:
        return tree.map(lambda leaf: leaf.away if isinstance(leaf, _Going) else leaf, handle)

    return Transfer(start, wait, "copy")


def _fetch(pool: HostMemory) -> Transfer:
    def start(stored: Any) -> Any:
        seen: dict[int, _Coming] = {}

        def bring(leaf: Any) -> Any:
            if not isinstance(leaf, Away):
                return leaf
            if id(leaf) not in seen:
                seen[id(leaf)] = _Coming(*pool.fetch(leaf), leaf.bytes)
            return seen[id(leaf)]

        return tree.map(bring, stored)

    def wait(handle: Any) -> Any:
        return tree.map(lambda leaf: pool.arrive(leaf.tensor, leaf.done) if isinstance(leaf, _Coming) else leaf, handle)

    return Transfer(start, wait, "copy")
