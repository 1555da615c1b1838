"""Where the leaves of an optimizer's trees live, and whether their memory may be reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from xtf import tree
from xtf.tree import Path, Tree


class Placement(Protocol):
    """Where the leaves of a step's trees live: given by the engine, `UNPLACED` on a single rank."""

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
        norms = [vector_norm(g) for g in tree.leaves(grads) if g is not None]
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


def vector_norm(x: Tensor) -> Tensor:
    """L2 norm of all elements, in at least float32. Shape ()."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dtype=dtype)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
