"""`balance_batch`: documents packed, and spread over ranks so that every rank has the same work at every step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtf.collectives import Axis
from xtf.data.batches import fill
from xtf.data.cost import CostFunction, document_cost
from xtf.data.documents import Documents
from xtf.data.plan import Pieces, Plan
from xtf.data.plan_input import TooLong, check_layout, check_too_long, generator
from xtf.data.plan_step import plan_step
from xtf.mesh import join
from xtf.stage import Program
from xtf.step import TrainStep

Micro = dict[str, Tensor]
"""A micro-batch: one row, of its own length."""


def balance_batch(
    *axes: Axis,
    max_tokens: int,
    cost: CostFunction | None = None,
    too_long: TooLong = "error",
    seed: int = 0,
    pad: bool = False,
) -> Callable[[TrainStep], TrainStep]:
    """Let a step take the documents of the global batch, ``step(state, Documents(lengths, fetch))``, identical on all ranks.

    Each rank plans the step (`xtf.data.plan_step`: packs of at most ``max_tokens``, as few as there can be, of nearly the same cost),
    and fetches only the documents of its own packs. Each pack is a micro-batch of one row. Every document is in the step once, so loss
    and gradients are those of the documents, however they are packed and spread. (An auxiliary loss of routers is taken over a
    micro-batch of all ranks, and so depends on which documents those hold, unless the model is made with ``aux="step"``.) The number of
    micro-batches follows from the documents and is the same on all ranks. What a step is given as a batch of tensors goes through
    unchanged, as without this transform.

    Other transforms that split (`xtf.transforms.accumulate`) split what this gives.

    Args:
        axes: the mesh axes over which documents are spread: all whose ranks hold distinct documents (the step's ``row_axes``: those of
            `xtf.transforms.context_parallel` share them). None for one rank.
        max_tokens: that a micro-batch may have.
        cost: of a document; by default the FLOPs of the step's model (`xtf.data.document_cost`); `xtf.data.measure_cost` measures seconds.
            It must be the same on all ranks.
        too_long: what happens to a document longer than ``max_tokens``: ``"error"``, ``"drop"``, or ``"split"`` into pieces that do not see
            each other.
        seed: of which rank has which packs, any integer.
        pad: fill up every row to ``max_tokens``, for backends that want one shape: a compiled step without it compiles again when packs
            have other numbers of tokens. What fills up is no target and in no document, but it is computed.

    Raises:
        ValueError: when it is made, for an argument that is not possible, or twice in one step; when the step runs, for no document,
            one without tokens or longer than ``max_tokens`` where that is an error, ranks that were given different documents, or (on
            all ranks) documents that could not be fetched on one.

    Example:
        >>> import xtf
        >>> from xtf.data import Documents
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> docs = Documents.of([[1] * 40, [2] * 20, [3] * 30, [4] * 30])
        >>> def sizes(mesh):
        ...     return [micro["input_ids"].shape[1] for micro in balance_batch(mesh["data"], max_tokens=80)(step).split(docs)]
        >>> xtf.simulate(sizes, data=2)
        [[60], [60]]

    References:
        Balancing packed documents by attention cost: Wang et al. 2025, "WLB-LLM".
    """
    for axis in axes:
        if not isinstance(axis, Axis):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f'balance_batch: {axis!r} is not a mesh axis; give mesh["name"]')
    spread = tuple(axis.mesh[name] for axis in axes for name in axis.names)
    axis = join(*spread) if spread else None
    check_layout(max_tokens, 1, 1)
    check_too_long(too_long)
    generator(seed, "check")
    if cost is not None and not callable(cost):
        raise ValueError(f"balance_batch(cost={cost!r}): expected a function (lengths) -> costs, as document_cost(model), or None")

    def transform(step: TrainStep) -> TrainStep:
        if any(name.startswith("balance_batch") for name in step.stack):
            raise ValueError("balance_batch is applied twice: name all axes in one balance_batch(...)")
        inner, device = step.split, step.device
        chosen: CostFunction = document_cost(step.model) if cost is None else cost

        def plan(documents: Documents) -> Plan:
            ranks = 1 if axis is None else axis.size
            return plan_step(documents.lengths, max_tokens=max_tokens, data_ranks=ranks, seed=seed, cost=chosen, too_long=too_long)

        def own(documents: Documents) -> tuple[list[Micro], int]:
            planned = plan(documents)
            pieces = planned[0].pieces(0 if axis is None else axis.index)
            return rows(documents, pieces, max_tokens if pad else min(max_tokens, _SHORTEST)), _digest(documents, planned)

        def split(given: Any) -> list[Micro]:
            if not isinstance(given, Documents):
                return [dict(micro) for micro in inner(given)]
            packs = _agreed(axis, device, lambda: own(given))
            moved = [{name: value.to(device) for name, value in pack.items()} for pack in packs]
            return [dict(micro) for pack in moved for micro in inner(pack)]

        def check(finished: TrainStep, program: Program) -> Program:
            over = {name for held in finished.row_axes for name in held.names if held.mesh.sizes[name] > 1}
            named = [name for held in spread for name in held.names]
            if alone := sorted(over - set(named)):
                raise ValueError(
                    f"ranks that differ on {', '.join(alone)} would be given the same documents, which would count several times: name all "
                    f"axes that hold distinct tokens, balance_batch({', '.join(f'mesh[{name!r}]' for name in [*named, *alone])}, ...)"
                )
            return program

        said = [f"{held.name}={held.size}" for held in spread] + [f"max_tokens={max_tokens}"] + (["pad"] if pad else [])
        return step.replace(
            f"balance_batch({', '.join(said)})",
            split=split,
            token_axes=step.with_token_axes(spread),
            rewrites=(*step.rewrites, check),
        )

    return transform


_SHORTEST = 16
"""Tokens of a row at least, also of a rank without documents: enough to run in the parts of an overlap (`xtf.overlap`)."""


def rows(documents: Documents, packs: tuple[Pieces, ...], least: int = _SHORTEST) -> list[Micro]:
    """Each pack as a batch of one row. Every document is fetched once.

    Args:
        documents: whose pieces they are.
        packs: the pieces of each.
        least: tokens of a row that has fewer: it is filled up with padding, as is that of an empty pack.
    """
    every = Pieces.join(packs)
    needed = np.unique(every.documents)
    fetched = dict(zip(needed.tolist(), documents.read(needed), strict=True))
    parts = [fetched[d].part(a, b) for d, a, b in zip(*(column.tolist() for column in every), strict=True)]
    pieces = Documents(every.lengths, lambda indices: [parts[i] for i in indices.tolist()])
    ends = np.cumsum([0, *(len(pack.documents) for pack in packs)]).tolist()
    sizes = [max(least, int(pack.lengths.sum())) for pack in packs]
    return [fill(pieces, [np.arange(a, b)], rows=1, seq=size) for (a, b), size in zip(pairwise(ends), sizes, strict=True)]


def _digest(documents: Documents, plan: Plan) -> int:
    """63 bits of the documents' lengths and the plan: different where a rank has others."""
    whole = hashlib.sha256()
    for part in (documents.lengths, *plan.flat, plan.offsets):
        whole.update(part.tobytes())
    return int.from_bytes(whole.digest()[:8], "big") >> 1


def _agreed(axis: Axis | None, device: torch.device, work: Callable[[], tuple[list[Micro], int]]) -> list[Micro]:
    """What ``work`` gives, if it succeeds on all ranks with the same digest; else all raise, and none waits for the others."""
    error: Exception | None = None
    packs, digest = list[Micro](), 0
    try:
        packs, digest = work()
    except Exception as problem:
        if axis is None:
            raise
        error = problem
    if axis is not None:
        told = torch.tensor([int(error is not None), digest, -digest], dtype=torch.int64, device=device)
        failed, most, least = _integers(axis.start_all_reduce(told, "max", label="balance_batch").wait())
        if error is not None:
            raise error
        if failed:
            raise ValueError("balance_batch: another rank could not make its micro-batches; the message of that rank says why")
        if most != -least:
            raise ValueError(
                "balance_batch: ranks plan different steps: give every rank the same documents (all of the global batch, not its own "
                "part), the same cost and the same settings"
            )
    return packs


def _integers(told: Tensor) -> list[int]:
    return [int(value) for value in told]
