"""Collectives: named primitives on a mesh axis, one interface whatever carries them out.

Code above this package sees an `Axis` and nothing else. What carries a collective out is an *interpreter*:

* `xtf.collectives.local`: an axis of one rank, where nothing moves;
* `xtf.collectives.process_group`: real ranks, through torch.distributed;
* `xtf.collectives.simulated`: threads of one process that meet at each collective;
* `xtf.collectives.planned`: ranks that are not there, of which one stands for all.

An interpreter is a subclass of `Axis` with one method, `Axis.launch`, and a function ``(mesh, names) -> Axis`` given to
`xtf.mesh.Mesh`. Arguments are checked, bytes counted and gradients defined here, once for all of them; every collective of
every interpreter passes through ``Axis._issue``. There, tensors without values (on the device ``"meta"``) never reach an
interpreter: `Call.output` has the shape of the result, and nothing moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from xtf.collectives import differentiable
from xtf.collectives.differentiable import per_rank

if TYPE_CHECKING:
    from xtf.mesh import Mesh

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange_counts", "broadcast", "permute", "barrier"]

Reduction = Literal["sum", "max"]


@dataclass(frozen=True, eq=False)
class Call:
    """One collective as one rank issues it. Which fields matter depends on ``op``; the others keep their defaults.

    Args:
        op: which primitive.
        x: this rank's input. Never modified.
        label: the name of the stage, for errors and traces.
        sizes: elements of each rank's piece (``all_gather``, ``reduce_scatter``).
        send: rows to each rank (``all_to_all``).
        receive: rows from each rank (``all_to_all``).
        reduction: ``"sum"`` or ``"max"`` (``all_reduce``).
        root: whose ``x`` all receive (``broadcast``).
        shift: how far ``x`` goes around the ring, 0 to size - 1 (``permute``).
    """

    op: Op
    x: Tensor
    label: str = ""
    sizes: tuple[int, ...] = ()
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    reduction: Reduction = "sum"
    root: int = 0
    shift: int = 0

    def output(self, index: int) -> Tensor:
        """An uninitialised, contiguous tensor of the result's shape on the rank at ``index`` of the axis."""
        if self.op == "all_gather":
            return self.x.new_empty(sum(self.sizes))
        if self.op == "reduce_scatter":
            return self.x.new_empty(self.sizes[index])
        if self.op == "all_to_all":
            return self.x.new_empty(sum(self.receive), *self.x.shape[1:])
        return self.x.new_empty(self.x.shape)

    def __str__(self) -> str:
        parts = [self.op] + ([repr(self.label)] if self.label else [])
        if self.op != "barrier":
            parts.append(f"of {str(self.x.dtype).removeprefix('torch.')}{list(self.x.shape)}")
        parts += [f"{name}={value}" for name in ("sizes", "send", "receive") if (value := getattr(self, name))]
        parts += {
            "all_reduce": [f"reduction={self.reduction}"],
            "broadcast": [f"root={self.root}"],
            "permute": [f"shift={self.shift}"],
        }.get(self.op, [])
        return " ".join(parts)


class Work:
    """A collective under way.

    Attributes:
        op: which primitive.
        axis: the axis it runs on.
        label: the name given when it was started.
        bytes: what this rank sends or receives on a ring, in bytes (see `Axis`).
    """

    __slots__ = ("_finish", "_result", "axis", "bytes", "label", "op")

    def __init__(self, call: Call, axis: Axis, bytes: int, finish: Callable[[], Tensor]) -> None:
        self.op = call.op
        self.label = call.label
        self.axis = axis
        self.bytes = bytes
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, when it is there. Waiting again returns the same tensor."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None  # lets go of the input
        assert self._result is not None
        return self._result

    def __repr__(self) -> str:
        label = f" {self.label!r}" if self.label else ""
        return f"Work({self.op}{label} on {self.axis.name!r}, {self.bytes} bytes)"


class Axis(ABC):
    """One axis of a mesh, or several joined: the ranks that differ from this one in those coordinates only.

    The ``start_`` methods begin a collective and return a `Work`. They are functional and carry no gradient: the input is never
    modified, and the caller does not modify it before ``wait`` returns. On an axis of one rank the result may be the input
    itself. Every rank of the axis calls the same collectives in the same order. The others are synchronous and differentiable,
    in eager mode and under ``torch.func``; each has its transpose as its VJP. The loss whose gradient that is, is the *sum
    over ranks of each rank's value*.

    ``Work.bytes``, where n is the axis' size: ``all_gather`` and ``reduce_scatter`` the whole less this rank's piece;
    ``all_reduce`` 2 (n - 1) / n of the input, rounded; ``all_to_all`` what goes to others; ``broadcast`` and ``permute`` the
    input. 0 on an axis of one rank.

    Every method takes ``label``, the name of the stage, for error messages and traces. Every method raises ValueError for
    arguments that do not fit the input or the axis.

    Attributes:
        mesh: the mesh it is part of.
        names: the mesh axes it joins, the first varying slowest.
        name: the names joined with commas, as in ``"data"`` or ``"data,expert"``.
        size: number of ranks on it.
        index: this rank's place, 0 to size - 1.
    """

    def __init__(self, mesh: Mesh, names: tuple[str, ...], size: int, index: int) -> None:
        self.mesh = mesh
        self.names = names
        self.name = ",".join(names)
        self.size = size
        self.index = index

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.index} of {self.size})"

    @abstractmethod
    def launch(self, call: Call) -> Callable[[], Tensor]:
        """Begin ``call``, already checked, and return at once. What is returned ends it and gives the result (called once).

        This is what an interpreter provides. ``call.x`` is a plain tensor, on any device, perhaps not contiguous.
        """

    def _issue(self, call: Call, bytes: int) -> Work:
        launch = self._plan if call.x.is_meta and self.size > 1 else self.launch
        return Work(call, self, bytes if self.size > 1 else 0, launch(call))

    def _plan(self, call: Call) -> Callable[[], Tensor]:
        """What stands for `launch` where tensors have no values: memory is taken and kept as ranks do it."""
        output = call.output(self.index)

        def finish() -> Tensor:
            assert call.x.is_meta  # the input is held until now
            return output

        return finish

    def start_all_gather(self, x: Tensor, sizes: Sequence[int], *, label: str = "") -> Work:
        """Begin to lay the pieces of all ranks end to end, in axis order.

        Args:
            x: (sizes[index],) this rank's piece.
            sizes: elements of each rank's piece; they may differ, and be 0.

        Returns:
            Work of (sum(sizes),).
        """
        x, sizes = _plain(x, "start_all_gather"), per_rank(self, sizes, "start_all_gather: sizes")
        if x.dim() != 1 or x.numel() != sizes[self.index]:
            raise ValueError(
                f"start_all_gather takes this rank's piece, one dim of sizes[{self.index}] elements of sizes={sizes}, got {list(x.shape)}"
            )
        return self._issue(Call("all_gather", x, label, sizes=sizes), (sum(sizes) - x.numel()) * x.element_size())

    def start_reduce_scatter(self, x: Tensor, sizes: Sequence[int], *, label: str = "") -> Work:
        """Begin to sum over ranks; each keeps its own piece of the sum.

        Args:
            x: (sum(sizes),) the pieces end to end, in axis order.
            sizes: elements of each rank's piece; they may differ, and be 0.

        Returns:
            Work of (sizes[index],), of x's dtype.
        """
        x, sizes = _plain(x, "start_reduce_scatter"), per_rank(self, sizes, "start_reduce_scatter: sizes")
        if x.dim() != 1 or x.numel() != sum(sizes):
            raise ValueError(f"start_reduce_scatter takes one dim of sum(sizes) = {sum(sizes)} elements, got {list(x.shape)}")
        return self._issue(Call("reduce_scatter", x, label, sizes=sizes), (x.numel() - sizes[self.index]) * x.element_size())

    def start_all_reduce(self, x: Tensor, op: Reduction = "sum", *, label: str = "") -> Work:
        """Begin to sum over ranks, or to take the maximum. ``x`` has the same shape, any, on all of them; so has the result."""
        if op not in ("sum", "max"):
            raise ValueError(f"start_all_reduce: op must be 'sum' or 'max', got {op!r}")
        x = _plain(x, "start_all_reduce")
        bytes = round(2 * (self.size - 1) / self.size * x.numel() * x.element_size())
        return self._issue(Call("all_reduce", x, label, reduction=op), bytes)

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str = "") -> Work:
        """Begin to send each rank some rows.

        Args:
            x: (sum(send), ...) the rows for rank 0 first, then those for rank 1, and so on.
            send: rows to each rank.
            receive: rows from each rank: what it has in its ``send`` for this one (see `exchange_counts`).

        Returns:
            Work of (sum(receive), ...), the rows from rank 0 first.
        """
        x, send = _plain(x, "start_all_to_all"), per_rank(self, send, "start_all_to_all: send")
        receive = per_rank(self, receive, "start_all_to_all: receive")
        if x.dim() == 0 or x.shape[0] != sum(send):
            raise ValueError(f"start_all_to_all takes sum(send) = {sum(send)} rows, got the shape {list(x.shape)}")
        if send[self.index] != receive[self.index]:
            raise ValueError(
                f"start_all_to_all: send[{self.index}] and receive[{self.index}] are what this rank sends itself and must be equal, "
                f"got {send[self.index]} and {receive[self.index]}"
            )
        row_bytes = x[:1].numel() * x.element_size()
        return self._issue(Call("all_to_all", x, label, send=send, receive=receive), (sum(send) - send[self.index]) * row_bytes)

    def start_broadcast(self, x: Tensor, root: int, *, label: str = "") -> Work:
        """Begin to give all ranks the ``x`` of the rank at ``root``. ``x`` has the same shape and dtype on all of them."""
        if not 0 <= root < self.size:
            raise ValueError(f"start_broadcast: root must be 0 to {self.size - 1} on the axis {self.name!r}, got {root}")
        x = _plain(x, "start_broadcast")
        return self._issue(Call("broadcast", x, label, root=root), x.numel() * x.element_size())

    def start_permute(self, x: Tensor, shift: int, *, label: str = "") -> Work:
        """Begin to send ``x`` to the rank at (index + shift) mod size and to receive that of (index - shift) mod size. ``x`` has
        the same shape and dtype on all ranks."""
        x, shift = _plain(x, "start_permute"), shift % self.size
        return self._issue(Call("permute", x, label, shift=shift), x.numel() * x.element_size() if shift else 0)

    def exchange_counts(self, counts: Tensor, *, label: str = "") -> Tensor:
        """What each rank has for this one.

        Args:
            counts: (size, ...) int64, the row of each rank is what this one has for it.

        Returns:
            (size, ...) int64 on the device of ``counts``, the row of each rank is what it has for this one.
        """
        counts = _plain(counts, "exchange_counts")
        if counts.shape[:1] != (self.size,) or counts.dtype != torch.int64:
            raise ValueError(
                f"exchange_counts takes ({self.size}, ...) int64 on the axis {self.name!r}, got {tuple(counts.shape)} {counts.dtype}"
            )
        return self._issue(Call("exchange_counts", counts, label), counts.nbytes // self.size * (self.size - 1)).wait()

    def barrier(self, *, label: str = "") -> None:
        """Return when every rank of the axis has called it."""
        self._issue(Call("barrier", torch.empty(0), label), 0).wait()

    def all_gather(self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, *, label: str = "") -> Tensor:
        """The blocks of all ranks, laid end to end along ``dim``. Its VJP is `reduce_scatter`.

        Args:
            x: this rank's block; all dims but ``dim`` are equal on all ranks.
            sizes: the size of ``dim`` on each rank; exchanged first (one more collective) where it is not given.

        Example:
            >>> from xtf.mesh import simulate
            >>> simulate(lambda mesh: mesh["data"].all_gather(torch.full((mesh.rank + 1,), mesh.rank)).tolist(), data=2)
            [[0, 1, 1], [0, 1, 1]]
        """
        return differentiable.all_gather(self, x, dim, sizes, label)

    def reduce_scatter(self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, *, label: str = "") -> Tensor:
        """The sum over ranks, of which each keeps its block along ``dim``. Its VJP is `all_gather`.

        Args:
            x: the same shape on all ranks.
            sizes: the size of each rank's block along ``dim``; equal blocks where it is not given.
        """
        return differentiable.reduce_scatter(self, x, dim, sizes, label)

    def all_reduce(self, x: Tensor, *, label: str = "") -> Tensor:
        """The sum over ranks, on each of them. Its VJP is `all_reduce`: every rank's value depends on every rank's input.
        Where what follows is the same computation on all ranks and its loss is to count once, use `sum`."""
        return differentiable.all_reduce(self, x, label)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str = "") -> Tensor:
        """Rows sent to and received from each rank, see `start_all_to_all`. Its VJP is itself with the counts exchanged."""
        return differentiable.all_to_all(self, x, send, receive, label)

    def broadcast(self, x: Tensor, root: int, *, label: str = "") -> Tensor:
        """The ``x`` of the rank at ``root``. Its VJP is the sum over ranks at ``root``, and 0 elsewhere."""
        return differentiable.broadcast(self, x, root, label)

    def permute(self, x: Tensor, shift: int, *, label: str = "") -> Tensor:
        """The ``x`` of the rank at (index - shift) mod size. Its VJP is the permutation by -shift."""
        return differentiable.permute(self, x, shift, label)

    def copy(self, x: Tensor, *, label: str = "") -> Tensor:
        """``x`` itself, where a value that is the same on all ranks enters a computation that is not. Its VJP is `all_reduce`.

        With `sum` the tensor-parallel pair, f and g of Shoeybi et al. 2019, "Megatron-LM": between the two, each rank
        computes its part; outside, values and gradients are the same on all ranks, and the loss counts once.
        """
        return differentiable.copy(self, x, label)

    def sum(self, x: Tensor, *, label: str = "") -> Tensor:
        """The sum over ranks of their parts, the same on all ranks from here on. Its VJP is the identity. See `copy`."""
        return differentiable.sum_(self, x, label)


def _plain(x: Tensor, method: str) -> Tensor:
    """``x`` without its history. A tensor that ``torch.func`` has wrapped has no meaning on another rank."""
    if is_functorch_wrapped_tensor(x):
        raise ValueError(
            f"{method} carries no gradient and cannot take a tensor that a torch.func transform traces: use the differentiable form"
        )
    return x.detach()
