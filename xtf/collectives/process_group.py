"""The interpreter of real ranks: torch.distributed's process groups, always in their asynchronous form.

Nothing is padded. Where gloo has no primitive for uneven pieces, its ragged all-to-all is used: an all-gather sends this rank's
piece to each of the others, a reduce-scatter sends each its piece and sums here, in rank order (gloo's own would send everything
to everyone). Both then move exactly what a ring would.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as _  # noqa: F401  # its default arguments keep the group that is there when it is imported
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]

from xtf.backends import backend_of
from xtf.collectives import Axis, Call
from xtf.collectives.world import fresh

if TYPE_CHECKING:
    from xtf.mesh import Mesh


def _since_2_14(new: str, old: str) -> Callable[..., Any]:
    """A function of torch.distributed by its new name where there is one: the old warns there."""
    return getattr(dist, new if hasattr(dist, new) else old)


_set_timeout: Any = getattr(dist, "set_timeout", None) or getattr(dist.distributed_c10d, "_set_pg_timeout")  # noqa: B009
_all_gather_single = _since_2_14("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _since_2_14("reduce_scatter_single", "reduce_scatter_tensor")


def backend() -> tuple[str, torch.device]:
    """The backend of torch.distributed for this machine's devices (`xtf.backends.Backend`), and this process' device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    on_cpu = accelerator is None
    device = torch.device("cpu") if on_cpu else torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
    return backend_of(device).collectives or dist.get_default_backend_for_device(device), device


def connect() -> None:
    """Start torch.distributed from the environment that torchrun sets. Ranks that torchrun starts again find one another again."""
    name, device = backend()
    shared, rank, size = next(rendezvous("env://"))
    own = fresh(shared, rank, size, default_pg_timeout.total_seconds())
    if device.type == "cpu":
        dist.init_process_group(name, store=own, rank=rank, world_size=size)
    else:
        torch.accelerator.set_device_index(device)
        dist.init_process_group(name, store=own, rank=rank, world_size=size, device_id=device)


class CollectiveError(RuntimeError):
    """A collective that torch.distributed could not carry out.

    Args:
        error: what it raised.
        doing: what this rank was doing with it.
        where: the collective and its axis, in words.
    """

    def __init__(self, error: RuntimeError | str, doing: str = "", where: str = "") -> None:
        super().__init__(str(error))
        self.where = where
        if doing:
            self.add_note(f"{doing} {where}")


def store() -> Any:
    """The store that the ranks of torch.distributed share, on a connection of its own: a thread that uses it holds up no other."""
    return dist.distributed_c10d._get_default_store().clone()  # pyright: ignore[reportPrivateUsage]


def set_timeout(axes: Sequence[Axis], seconds: float | None) -> None:
    """How long collectives wait for ranks that do not come.

    Args:
        axes: those of process groups among them.
        seconds: above 0; ``None`` for torch's own time-out.
    """
    known = [axis for axis in axes if isinstance(axis, ProcessGroupAxis)]
    for axis in known:
        axis.set_timeout(seconds)


def builder() -> Callable[[Mesh, tuple[str, ...]], Axis]:
    """What makes the axes of a mesh over the world of torch.distributed.

    A group is made once for each set of ranks; every rank of the set makes it at the same point of the program. It is held weakly, for
    torch.distributed holds it: a group that outlives ``destroy_process_group`` keeps its threads, and one that still lets go of a
    tensor when the interpreter ends aborts the process ("terminate called without an active exception").
    """
    groups: dict[tuple[int, ...], weakref.ref[dist.ProcessGroup]] = {}

    def build(mesh: Mesh, names: tuple[str, ...]) -> Axis:
        members = mesh.members(*names)
        ranks = tuple(sorted(members))
        if ranks not in groups:
            whole = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if whole else dist.new_group(list(ranks), use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            groups[ranks] = weakref.ref(group)
        return ProcessGroupAxis(mesh, names, members, groups[ranks])

    return build


class ProcessGroupAxis(Axis):
    """An axis of real ranks.

    Args:
        members: their ranks in the world, in axis order.
        group: the process group over them, see `builder`. Its own order is that of the world ranks, which differs from the axis'
            order where mesh axes are joined in another order than the mesh has.
    """

    def __init__(self, mesh: Mesh, names: tuple[str, ...], members: tuple[int, ...], group: weakref.ref[dist.ProcessGroup]) -> None:
        super().__init__(mesh, names, len(members), members.index(mesh.rank))
        self._members = members
        self._group_ref = group
        self._gloo = dist.get_backend(self._group) == "gloo"
        by_rank = sorted(members)
        self._slots = [by_rank.index(rank) for rank in members]  # place in the group of each place on the axis
        self._places = [members.index(rank) for rank in by_rank]  # and back
        self._ordered = by_rank == list(members)

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise RuntimeError(f"the axis {self.name!r} is of a torch.distributed that was taken down: make a new mesh")
        return group

    def set_timeout(self, seconds: float | None) -> None:
        """See `set_timeout`."""
        default = dist.distributed_c10d._get_default_timeout(dist.get_backend(self._group))  # pyright: ignore[reportPrivateUsage]
        _set_timeout(default if seconds is None else timedelta(seconds=seconds), self._group)

    def launch(self, call: Call) -> Callable[[], Tensor]:
        try:
            finish = self._start(call)
        except RuntimeError as error:
            raise CollectiveError(error, "when starting", f"{call} on the axis {self.name!r}") from error

        def wait() -> Tensor:
            try:
                return finish()
            except RuntimeError as error:
                raise CollectiveError(error, "while waiting for", f"{call} on the axis {self.name!r}") from error

        return wait

    def _start(self, call: Call) -> Callable[[], Tensor]:
        x, ones = call.x.contiguous(), [1] * self.size
        match call.op:
            case "all_gather":
                return self._all_gather(x, call)
            case "reduce_scatter":
                return self._reduce_scatter(x, call)
            case "all_reduce":
                out = x.clone()
                op = dist.ReduceOp.SUM if call.reduction == "sum" else dist.ReduceOp.MAX
                return _then(dist.all_reduce(out, op, self._group, async_op=True), out)
            case "all_to_all":
                return self._all_to_all(x, call.send, call.receive)
            case "exchange_counts":
                return self._all_to_all(x, ones, ones)
            case "broadcast":
                out = x.clone() if call.root == self.index else call.output(self.index)
                return _then(dist.broadcast(out, self._members[call.root], self._group, async_op=True), out)
            case "permute":
                return self._permute(x, call.shift)
            case "barrier":
                return _then(dist.barrier(self._group, async_op=True), x)

    def _all_gather(self, x: Tensor, call: Call) -> Callable[[], Tensor]:
        sizes = call.sizes
        if self._ordered and len(set(sizes)) == 1:
            out = call.output(self.index)
            return _then(_all_gather_single(out, x, group=self._group, async_op=True), out, x)
        if self._gloo:
            return self._all_to_all(x.repeat(self.size), [x.numel()] * self.size, sizes)
        out = call.output(self.index)
        pieces = out.split_with_sizes(list(sizes))
        return _then(dist.all_gather([pieces[p] for p in self._places], x, self._group, async_op=True), out, x)

    def _reduce_scatter(self, x: Tensor, call: Call) -> Callable[[], Tensor]:
        sizes, own = call.sizes, call.sizes[self.index]
        if self._gloo:
            finish = self._all_to_all(x, sizes, [own] * self.size)

            def total() -> Tensor:
                pieces = finish().view(self.size, own)
                out = pieces[0].clone()
                for piece in pieces[1:]:
                    out += piece
                return out

            return total
        out = call.output(self.index)
        if self._ordered and len(set(sizes)) == 1:
            return _then(_reduce_scatter_single(out, x, group=self._group, async_op=True), out, x)
        pieces = x.split_with_sizes(list(sizes))
        return _then(dist.reduce_scatter(out, [pieces[p] for p in self._places], group=self._group, async_op=True), out, x)

    def _permute(self, x: Tensor, shift: int) -> Callable[[], Tensor]:
        """An all-to-all in which each rank has something for one other only: every backend has it, in one group."""
        to, source = (self.index + shift) % self.size, (self.index - shift) % self.size
        send, receive = ([x.numel() * (place == peer) for place in range(self.size)] for peer in (to, source))
        finish = self._all_to_all(x.view(-1), send, receive)
        return lambda: finish().view(x.shape)

    def _all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        """Rows to and from each place of the axis."""
        out = x.new_empty(sum(receive), *x.shape[1:])
        if self._ordered:
            return _then(dist.all_to_all_single(out, x, list(receive), list(send), self._group, async_op=True), out, x)
        blocks = x.split_with_sizes(list(send))
        x = torch.cat([blocks[p] for p in self._places])
        receive_slots, send_slots = [receive[p] for p in self._places], [send[p] for p in self._places]
        finish = _then(dist.all_to_all_single(out, x, receive_slots, send_slots, self._group, async_op=True), out, x)

        def in_axis_order() -> Tensor:
            blocks = finish().split_with_sizes(receive_slots)
            return torch.cat([blocks[s] for s in self._slots])

        return in_axis_order


def _then(work: Any, out: Tensor, *inputs: Tensor) -> Callable[[], Tensor]:
    """Waits for torch's work, then gives ``out``; holds the inputs until then."""

    def finish(inputs: tuple[Tensor, ...] = inputs) -> Tensor:
        work.wait()
        return out

    return finish
