"""What ranks of a run agree on: that all go on, or that all stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from rich.console import Console

from xtf.checkpoint.together import together as all_or_none
from xtf.collectives import Axis
from xtf.collectives.process_group import backend
from xtf.mesh import Mesh

T = TypeVar("T")


def everyone(mesh: Mesh) -> Axis | None:
    """The axis over all ranks; ``None`` for one."""
    return mesh.join(*mesh) if mesh.size > 1 else None


def agree(mesh: Mesh, value: int) -> int:
    """The largest of the ranks' values, on every rank."""
    axis = everyone(mesh)
    return value if axis is None else int(axis.start_all_reduce(torch.tensor(value, device=backend()[1]), "max", label="agree").wait())


def together(mesh: Mesh, work: Callable[[], T], *, ranks: Callable[[int], bool] = lambda rank: True) -> T | None:
    """Do ``work`` on some ranks, and go on only if it succeeded on all of them.

    Args:
        mesh: the ranks; every one calls this.
        work: what is done; it must not meet other ranks.
        ranks: which ranks do it.

    Returns:
        What ``work`` returned; ``None`` on ranks that did not do it.

    Raises:
        Exception: the one that ``work`` raised, on that rank.
        CheckpointError: on the others; it says which rank failed and why.
    """
    device = backend()[1] if mesh.size > 1 else torch.device("cpu")
    return all_or_none(everyone(mesh), device, "the run stops", lambda: (work() if ranks(mesh.rank) else None, None))[0]


def say(console: Console, text: str) -> None:
    """A line for the user, as it is: nothing in it is markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
