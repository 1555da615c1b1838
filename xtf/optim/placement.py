"""Where the leaves of an optimizer's trees live, and whether their memory may be reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from xtf import tree
from xtf.ops import native
from xtf.tree import Path, Tree

_ROW = 1 << 10  # elements summed one after another
_BLOCK = 1 << 20  # elements converted to a wider dtype at once; whole rows


class StateHost(Protocol):
    """Memory for optimizer state that is not the device's: `xtf.host.HostMemory` has these."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros that stay there."""
        ...

    def bring(self, held: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Begin to copy to the device; returns the copy and what ``arrive`` takes."""
        ...

    def arrive(self, tensor: Tensor, done: Any) -> Tensor:
        """What was brought, for use."""
        ...

    def put(self, tensor: Tensor, held: Tensor | None) -> Tensor:
        """Begin to copy back, into ``held`` if given."""
        ...

    def settle(self, device: torch.device) -> None:
        """Wait until all that was put is there."""
        ...


class Placement(Protocol):
    """Where the leaves of a step's trees live: given by the engine, `UNPLACED` on a single rank. One with an attribute ``host``, a
    `StateHost`, says that optimizer state lives there between updates, and not on its parameter's device (`host_of`)."""

    @property
    def donate(self) -> bool:
        """Whether the memory of gradients, state and parameters may be overwritten. If not, nothing given is ever modified."""
        ...

    def norm(self, grads: Tree) -> Tensor:
        """L2 norm over the elements of all leaves on all ranks, each counted once. Shape (), at least float32."""
        ...

    def matrices(self, path: Path, local: Tensor) -> Tensor:
        """The leaf at ``path`` with its last two dims whole; stacked leading dims may stay split."""
        ...

    def cut(self, path: Path, whole: Tensor) -> Tensor:
        """The part of what `matrices` returned that this rank keeps."""
        ...


@dataclass(frozen=True)
class Unplaced:
    """The `Placement` of a single rank that holds every leaf whole.

    Args:
        donate: whether the memory of gradients, state and parameters may be overwritten.
    """

    donate: bool = False

    def norm(self, grads: Tree) -> Tensor:
        """L2 norm over the elements of all leaves; ``None`` leaves are skipped, no leaf at all gives 0."""
        norms = vector_norms([g for g in tree.leaves(grads) if g is not None])
        if not norms:
            return torch.zeros(())
        dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
        return vector_norm(torch.stack([n.to(norms[0].device, dtype) for n in norms]))

    def matrices(self, path: Path, local: Tensor) -> Tensor:
        """The leaf itself."""
        return local

    def cut(self, path: Path, whole: Tensor) -> Tensor:
        """The leaf itself."""
        return whole


UNPLACED = Unplaced()


def host_of(placement: Placement) -> StateHost | None:
    """Where optimizer state lives between updates; ``None`` for on its parameter's device."""
    return getattr(placement, "host", None)


def vector_norm(x: Tensor) -> Tensor:
    """L2 norm of the elements of one tensor, in at least float32. Shape ().

    For placements to build their own `Placement.norm` of. torch's sums one element after another on the CPU: in float32 it is off
    by 0.4% at 50 million elements. Here rows of 1,024 are summed, and then their norms, in float64.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.device.type != "cpu" or x.numel() <= _ROW:
        return _norm(x.to(dtype))
    flat = x.contiguous().view(-1)  # strided elements are summed less exactly
    rows = flat.numel() // _ROW * _ROW
    blocks = (flat[begin : min(begin + _BLOCK, rows)] for begin in range(0, rows, _BLOCK))
    parts = [_norm(block.to(dtype).view(-1, _ROW), dim=1) for block in blocks]
    return _norm(torch.cat([*parts, _norm(flat[rows:].to(dtype)).view(1)]).double()).to(dtype)


def vector_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`vector_norm` of each tensor: of float32 ones on the CPU all in one call, where there are kernels of our own for it."""
    here = [x.device.type == "cpu" and native.serves(x) for x in tensors]
    own = [x for x, yes in zip(tensors, here, strict=True) if yes]
    found = iter(torch.ops.xtf.norms_cpu(own).float().unbind() if own else ())
    return [next(found) if yes else vector_norm(x) for x, yes in zip(tensors, here, strict=True)]


@torch.library.custom_op("xtf::norms_cpu", mutates_args=())
def _norms_cpu(tensors: list[Tensor]) -> Tensor:
    return native.norms(tensors)


@_norms_cpu.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty(len(tensors), dtype=torch.float64)


def _norm(x: Tensor, dim: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x, dim=dim)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
