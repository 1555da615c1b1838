"""The interpreter of planned ranks: one rank that stands for all of them, and tensors without values.

What a step of many ranks takes and sends follows from sizes alone. On the device ``"meta"`` a collective's result has its size at
once, whatever carries the axis (see ``Axis._issue``); a `PlannedAxis` is for ranks that are not there at all. Sizes that data
decide, as how many rows each expert gets, are read in one place, `read`: without data it takes them from a stated `Routing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int64
from torch import Tensor

from xtf.collectives import Axis, Call

if TYPE_CHECKING:
    from xtf.mesh import Mesh

Routing = Callable[[int, int, int], Int64[Tensor, "tokens k"]]
"""``(tokens, k, experts) -> (tokens, k)`` int64 on the CPU: the experts of each token, different ones. The same at every call."""

_DRAWN = 1 << 22  # numbers that are drawn at a time


class PlannedAxis(Axis):
    """An axis of ranks that are not there. It takes tensors without values only, for which no interpreter is asked."""

    def launch(self, call: Call) -> Callable[[], Tensor]:
        raise ValueError(
            f"the ranks of the axis {self.name!r} are planned, they hold no values: {call} cannot run. Ask a planned step what it "
            "takes (xtf.memory, xtf.fit_tokens), or run it on xtf.mesh or xtf.simulate"
        )


def read(values: Tensor, planned: Callable[[], Tensor]) -> Any:
    """The numbers of a small tensor, for the host. Where the tensor has no values, those of ``planned()``.

    Example:
        >>> read(torch.tensor([1, 2]), lambda: torch.tensor([5, 5])), read(torch.empty(2, device="meta"), lambda: torch.tensor([5, 5]))
        ([1, 2], [5, 5])
    """
    known: Any = planned() if values.is_meta else values
    return known.tolist()


def even(tokens: int, k: int, experts: int) -> Int64[Tensor, "tokens k"]:
    """The `Routing` of a balanced router: every set of k experts is as likely, drawn from a fixed seed."""
    return _drawn(tokens, k, torch.zeros(experts))


def uneven(weights: Sequence[float]) -> Routing:
    """The `Routing` of a router that prefers some experts.

    Args:
        weights: of each expert, positive. A token's first expert is drawn in proportion to them, its next among the others, and so on.

    Raises:
        ValueError: for a weight that is no positive finite number; (of the routing) for a layer that has another number of experts.

    Example:
        >>> uneven([8, 1, 1, 1])(1000, 1, 4).eq(0).double().mean().item() > 0.6
        True
    """
    try:
        given = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        given = []
    if not given or not all(0 < weight < math.inf for weight in given):
        raise ValueError(f"uneven({weights!r:.80}): expected a positive weight for each expert, as uneven([8, 1, 1, 1])")
    logits = torch.tensor(given, dtype=torch.float64).log().float()  # in float32 a weight may be 0 or infinite

    def routing(tokens: int, k: int, experts: int) -> Int64[Tensor, "tokens k"]:
        if experts != len(given):
            raise ValueError(f"uneven has {len(given)} weights, the layer {experts} experts: give a weight for each")
        return _drawn(tokens, k, logits)

    return routing


def _drawn(tokens: int, k: int, logits: Tensor) -> Int64[Tensor, "tokens k"]:
    """k different experts of each token, by the largest of logits with Gumbel noise (Kool et al. 2019)."""
    generator, each = torch.Generator().manual_seed(0), max(1, _DRAWN // max(len(logits), 1))
    parts: list[Tensor] = []
    for begin in range(0, tokens, each):
        noise = torch.empty(min(each, tokens - begin), len(logits)).exponential_(generator=generator).log_()
        parts.append((logits - noise).topk(k, -1).indices)
    return torch.cat(parts) if parts else torch.empty(0, k, dtype=torch.int64)


def planned(mesh: Mesh, names: tuple[str, ...]) -> Axis:
    """Makes the axis of these names, as `xtf.mesh.Mesh` asks for it."""
    members = mesh.members(*names)
    return PlannedAxis(mesh, names, len(members), members.index(mesh.rank))
