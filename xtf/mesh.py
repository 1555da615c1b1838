"""The mesh: ranks laid out along named axes. A plain argument, never a global.

`mesh` lays out the real ranks, `simulate` runs a function on simulated ones, `plan_mesh` is for ranks that are not there. Axes are
ordered as given and the last varies fastest over ranks: on ``mesh(data=2, expert=2)`` rank 1 stands at data 0, expert 1. Joining
axes gives an axis over all their ranks.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from xtf.batch import IGNORE
from xtf.collectives import Axis
from xtf.collectives.local import LocalAxis
from xtf.collectives.planned import Routing, even, planned
from xtf.collectives.process_group import builder, connect
from xtf.collectives.simulated import SimulatedAxis, run_ranks

T = TypeVar("T")

Build = Callable[["Mesh", tuple[str, ...]], Axis]
"""Makes the axis of these names, of more than one rank, for the rank that a mesh stands for."""

PADDING = {"input_ids": 0, "labels": IGNORE, "document_ids": -1, "loss_weights": 0, "positions": 0}
"""What stands in a batch where no token does."""

MOST_PLANNED = 1 << 14
"""Ranks of a planned mesh: a step's transfers hold the parts of every one, so its count takes time in proportion."""


class Mesh:
    """Ranks along named axes, as seen from one of them.

    Args:
        sizes: the size of each axis, in order.
        rank: this rank, 0 to the product of sizes - 1.
        build: the interpreter of collectives, see `xtf.collectives`.
        routing: how tokens choose experts where tensors have no values.

    Attributes:
        sizes: the size of each axis, in order.
        size: the number of ranks.
        rank: this rank.
        coordinate: this rank's place on each axis.

    Example:
        >>> simulate(lambda mesh: (mesh.coordinate, mesh["data"].index, mesh.join("expert", "data").index), data=2, expert=2)[1]
        ({'data': 0, 'expert': 1}, 0, 2)
    """

    def __init__(self, sizes: Mapping[str, int], rank: int, build: Build, routing: Routing = even) -> None:
        self.sizes = dict(sizes)
        self.size = math.prod(sizes.values())
        self.rank = rank
        self.coordinate = {name: rank // stride % self.sizes[name] for name, stride in self._strides().items()}
        self.routing = routing
        self._build = build
        self._axes: dict[tuple[str, ...], Axis] = {}

    def _strides(self) -> dict[str, int]:
        """How far apart in rank neighbours on each axis are."""
        names = list(self.sizes)
        return {name: math.prod(self.sizes[n] for n in names[i + 1 :]) for i, name in enumerate(names)}

    def members(self, *names: str) -> tuple[int, ...]:
        """The ranks of the axis over ``names`` that this rank is on, in axis order (the first name varies slowest)."""
        strides = self._strides()
        ranks = [self.rank - sum(self.coordinate[name] * strides[name] for name in names)]
        for name in names:
            ranks = [rank + i * strides[name] for rank in ranks for i in range(self.sizes[name])]
        return tuple(ranks)

    def join(self, *names: str) -> Axis:
        """The axis over all ranks of several mesh axes, the first varying slowest. Made once; on real ranks, every rank joins the
        same axes in the same order.

        Raises:
            ValueError: for an unknown or repeated name, or none.
        """
        if not names or len(set(names)) < len(names):
            raise ValueError(f"join takes one or more different axes of the mesh, got {list(names)}")
        for name in names:
            if name not in self.sizes:
                raise ValueError(f"the mesh has no axis {name!r}; it has {list(self.sizes)}")
        if names not in self._axes:
            local = all(self.sizes[name] == 1 for name in names)
            self._axes[names] = LocalAxis(self, names) if local else self._build(self, names)
        return self._axes[names]

    def __getitem__(self, name: str) -> Axis:
        return self.join(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.sizes.items())}; rank {self.rank})"


def join(*axes: Axis) -> Axis:
    """The axis over all ranks of several axes of one mesh; a single axis is returned as it is.

    Raises:
        ValueError: for no axis, axes of different meshes, or axes that share a mesh axis.
    """
    if not axes or any(axis.mesh is not axes[0].mesh for axis in axes):
        raise ValueError(f"join takes axes of one mesh, got {[(axis.name, axis.mesh) for axis in axes]}")
    return axes[0] if len(axes) == 1 else axes[0].mesh.join(*(name for axis in axes for name in axis.names))


def mesh(**sizes: int) -> Mesh:
    """The mesh of the real ranks.

    The world is torch.distributed's. Where that is not initialised, it is started if torchrun's environment (``RANK``,
    ``WORLD_SIZE``, ``MASTER_ADDR``) is set, with the backend of this machine's devices; otherwise the world is this process.

    Args:
        sizes: the size of each axis, in order, the last varying fastest over ranks. One may be -1: what the others leave.
            Without any, the mesh is one axis ``"data"``.

    Raises:
        ValueError: if the sizes do not multiply to the size of the world.
    """
    if not dist.is_initialized() and all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        _check(sizes or {"data": -1}, int(os.environ["WORLD_SIZE"]))
        connect()
        atexit.register(_disconnect)
    if not dist.is_initialized():
        return Mesh(_check(sizes or {"data": -1}, 1), 0, _alone)
    made = Mesh(_check(sizes or {"data": -1}, dist.get_world_size()), dist.get_rank(), builder())
    for name in made:  # groups are made here, where every rank is, and not where some rank first asks for one
        made.join(name)
    return made


def _alone(mesh: Mesh, names: tuple[str, ...]) -> Axis:
    raise AssertionError(f"a mesh of one rank has no axis {names} of more")


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def simulate(fn: Callable[[Mesh], T], **sizes: int) -> list[T]:
    """Run ``fn(mesh)`` on each rank of a simulated mesh, on threads of this process. Returns the results in rank order.

    Collectives are exact and repeatable: sums go in rank order, and all ranks get the same bits. Each rank computes on one
    thread. Ranks that meet in different collectives raise RuntimeError naming both, and so do ranks that can never go on,
    naming what each waits for. An exception on one rank ends the others at their next collective (or half a second later), and
    is raised here. No thread outlives the call.

    Args:
        fn: what each rank runs; it has its own ``mesh``.
        sizes: the size of each axis, in order. Without any, one rank on the axis ``"data"``.

    Raises:
        ValueError: for a size that is no whole number of at least 1, or if called on a simulated rank.

    Example:
        >>> simulate(lambda mesh: mesh["data"].all_reduce(torch.tensor(mesh.rank)).item(), data=4)
        [6, 6, 6, 6]
    """
    sizes = sizes or {"data": 1}
    for name, size in sizes.items():
        _check_size(name, size)
    return run_ranks(
        math.prod(sizes.values()), lambda rank, world: fn(Mesh(sizes, rank, lambda mesh, names: SimulatedAxis(mesh, names, world)))
    )


def plan_mesh(*, rank: int = 0, routing: Routing = even, **sizes: int) -> Mesh:
    """A mesh of ranks that are not there, to ask what a step on them would take (`xtf.memory`, `xtf.fit_tokens`).

    A step that is built on it has the placements, the program and the transfers of one rank. It runs on tensors of the device
    ``"meta"`` only.

    Args:
        rank: the rank that stands for all.
        routing: how tokens choose experts: `xtf.collectives.planned.even`, or ``uneven(weights)``.
        sizes: the size of each axis, in order. Without any, one rank on the axis ``"data"``.

    Raises:
        ValueError: for a size that is no whole number of at least 1, more than 16,384 ranks, a rank that the mesh does not have, or a
            routing that is no function.

    Example:
        >>> plan_mesh(data=8, expert=8), plan_mesh(data=8, expert=8).join("data", "expert").size
        (Mesh(data=8, expert=8; rank 0), 64)
    """
    sizes = sizes or {"data": 1}
    for name, size in sizes.items():
        _check_size(name, size)
    ranks = math.prod(sizes.values())
    if ranks > MOST_PLANNED:
        raise ValueError(
            f"plan_mesh: {sizes} are {ranks:,} ranks, expected {MOST_PLANNED:,} at most: a count goes through the parts of all"
        )
    if not _is_whole(rank) or not 0 <= rank < ranks:
        raise ValueError(f"plan_mesh: the rank must be 0 to {ranks - 1}, got {rank!r}")
    if not callable(routing):
        raise ValueError(f"plan_mesh: routing is {routing!r}, expected xtf.collectives.planned.even, or uneven(weights) of it")
    return Mesh(sizes, rank, planned, routing)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_size(name: str, size: int) -> None:
    if not _is_whole(size) or size < 1:
        raise ValueError(f"the size of axis {name!r} must be 1 or more, got {size!r}: give a whole number, as {name}=2")


def _check(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """The sizes with -1 resolved."""
    for name, size in sizes.items():
        if not _is_whole(size) or (size < 1 and size != -1):
            raise ValueError(f"the size of axis {name!r} must be 1 or more, or -1 for what the others leave, got {size!r}")
    free, known = [name for name, size in sizes.items() if size == -1], math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1:
        raise ValueError(f"only one axis may have the size -1, got {free}")
    if world % known if free else known != world:
        verb = "divide" if free else "multiply to"
        raise ValueError(f"the axes {dict(sizes)} hold {known} ranks, but there are {world}: give sizes that {verb} {world}")
    return {name: world // known if size == -1 else size for name, size in sizes.items()}


def split_batch(batch: Mapping[str, Tensor], mesh: Mesh, *, axes: Sequence[str] | None = None) -> dict[str, Tensor]:
    """This rank's rows of a global batch: ranks in order take consecutive rows, as many on each.

    Where the rows do not divide, ignored rows are added behind the last: ``input_ids`` 0, ``labels`` -100, ``document_ids`` -1,
    ``loss_weights`` 0. All ranks then have ``document_ids``, 0 on real rows where the batch had none.

    Args:
        batch: tensors of (batch, seq), the same on all ranks (see `xtf.batch`).
        mesh: the ranks.
        axes: the mesh axes whose ranks have different rows, the first varying slowest; ranks that differ on others only have
            the same. By default all.

    Returns:
        The keys of the batch; tensors of (rows, seq), rows = ⌈batch ÷ ranks⌉.

    Raises:
        ValueError: for an unknown key, tensors of different shapes, or an unknown or repeated axis.

    Example:
        >>> batch = {"input_ids": torch.tensor([[1], [2], [3]])}
        >>> [part["input_ids"].tolist() for part in simulate(lambda mesh: split_batch(batch, mesh), data=2)]
        [[[1], [2]], [[3], [0]]]
    """
    names = list(mesh.sizes) if axes is None else list(axes)
    if len(set(names)) < len(names) or not set(names) <= set(mesh.sizes):
        raise ValueError(f"split_batch: axes must be different axes of the mesh, {list(mesh.sizes)}, got {names}")
    if unknown := sorted(set(batch) - PADDING.keys()):
        raise ValueError(f"batch has unknown keys {unknown}; known are {sorted(PADDING)}")
    if "input_ids" not in batch:
        raise ValueError(f"batch has no 'input_ids'; it has {sorted(batch)}")
    shape = batch["input_ids"].shape
    for name, value in batch.items():
        if value.dim() != 2 or value.shape != shape:
            raise ValueError(f"batch[{name!r}] has shape {tuple(value.shape)}, expected (batch, seq) like input_ids, {tuple(shape)}")
    place, parts = 0, 1
    for name in names:
        place, parts = place * mesh.sizes[name] + mesh.coordinate[name], parts * mesh.sizes[name]
    rows = -(-shape[0] // parts)
    batch = dict(batch)
    if rows * parts > shape[0]:
        batch.setdefault("document_ids", torch.zeros_like(batch["input_ids"]))
    return {name: _rows(value, place * rows, rows, PADDING[name]) for name, value in batch.items()}


def _rows(value: Tensor, start: int, count: int, padding: int) -> Tensor:
    own = value[start : start + count]
    return torch.cat([own, own.new_full((count - own.shape[0], own.shape[1]), padding)]) if own.shape[0] < count else own
