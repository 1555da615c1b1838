"""What tests of saved states share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from xtf import tree
from xtf.mesh import simulate


def run(layout: Mapping[str, int], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """On simulated ranks, or without a mesh."""
    return simulate(lambda mesh: fn(mesh, *args), **layout) if layout else [fn(None, *args)]


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def bits_of(value: Any) -> list[tuple[torch.dtype, tuple[int, ...], bytes]]:
    """What every tensor of a tree holds, comparable bit for bit."""
    return [(x.dtype, tuple(x.shape), x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for x in tensors(value)]
