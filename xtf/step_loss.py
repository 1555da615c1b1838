"""The loss of a step over all ranks and micro-batches: its normalisation, its auxiliary part, and the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xtf.batch import Batch, normalizer
from xtf.collectives.planned import read
from xtf.data.documents import Documents
from xtf.model import RESULTS, statistics
from xtf.overlap import DOCUMENTS, cut_documents, near_ends, part_constants
from xtf.record import Event, Record

if TYPE_CHECKING:
    from xtf.step import TrainStep


class StepLoss:
    """What one evaluation of the loss needs besides the walk: constants, normalisation over ranks, and auxiliary losses."""

    def __init__(self, step: TrainStep, batch: Batch | Documents, record: Record | None) -> None:
        self.step, self.record = step, record
        batches = list(step.split(batch))
        if not batches:
            raise ValueError("the batch seam gave no micro-batch; a step needs at least one")
        self.micros = [step.tokens(step.model.pack(b)) for b in batches]
        self.stats = statistics(step.program)
        self.keep = (*RESULTS, *self.stats)
        ends: list[list[int]] = [m[DOCUMENTS].tolist() for m in self.micros] if step.parts > 1 else []
        near = torch.tensor([[end is not None for end in near_ends(e, step.parts)] for e in ends], dtype=torch.float64)
        own = [(m["weights"].double().sum(), m["valid"].sum(), (m["weights"] != 0).sum()) for m in self.micros]
        sums = torch.stack([torch.stack([v.double() for v in row]) for row in own])
        totals = self.sum(torch.cat([sums, near.to(sums.device)], 1) if ends else sums)
        self.weights, self.tokens, self.supervised = totals[:, 0], totals[:, 1].long(), totals[:, 2].long()
        scale = normalizer(self.weights.sum())
        for micro in self.micros:
            micro["normalizer"] = scale
        self.plans = [step.plan()] * len(self.micros)
        if ends:
            ranks = step.token_axis.size if step.token_axis is not None else 1
            apart: list[list[bool]] = read(totals[:, 3:] == ranks, lambda: near == 1)  # planned ranks have the same documents
            cuts = [cut_documents(e, step.parts, may) for e, may in zip(ends, apart, strict=True)]
            self.micros = [part_constants(micro, cut) for micro, cut in zip(self.micros, cuts, strict=True)]
            self.plans = [step.plan(cut.layout) for cut in cuts]
        self.shares = self.weights * scale  # of each micro-batch in the loss
        self.aux: list[tuple[Tensor, dict[str, Tensor]]] = []
        self.counted: dict[str, Tensor] | None = None
        self.totals: dict[str, Tensor] = {}  # of integer statistics, over all ranks and the micro-batches so far
        self.uncounted: list[Mapping[str, Tensor]] = []  # statistics of micro-batches that are not in them

    @property
    def counts_first(self) -> bool:
        """Whether a forward must count before gradients can be made: one micro-batch is the step, and its own counts will do."""
        return self.step.model.aux is not None and self.step.model.aux_scope == "step" and len(self.micros) > 1

    def sum(self, value: Tensor) -> Tensor:
        """A small tensor summed over all ranks that hold tokens."""
        axis = self.step.token_axis
        if axis is None or axis.size == 1:
            return value
        work = axis.start_all_reduce(value, label="scalars")
        if self.record is not None:
            self.record.add(Event("start", "scalars", "step", "update", bytes=work.bytes, stream="comm"))
        return work.wait()

    def _global(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Statistics summed over ranks, in one collective."""
        parts = [values[name] for name in self.stats]
        flat = self.sum(torch.cat([p.detach().reshape(-1).double() for p in parts]))
        pieces = torch.split(flat, [p.numel() for p in parts])
        found = {n: piece.view(p.shape).to(p.dtype) for n, p, piece in zip(self.stats, parts, pieces, strict=True)}
        integers = {name: value for name, value in found.items() if not value.is_floating_point()}
        self.totals |= {name: value + self.totals.get(name, 0) for name, value in integers.items()}
        return found

    def counts(self) -> dict[str, Tensor]:
        """Integer statistics summed over all ranks and micro-batches of the step that was walked."""
        if self.uncounted:
            self._global({name: torch.stack([values[name] for values in self.uncounted]).sum(0) for name in self.stats})
            self.uncounted.clear()
        return self.totals

    def seeds(self, micro: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cotangents: one for the loss (its scale is in the constants), and those of the auxiliary loss for the statistics."""
        seeds = {"loss": torch.ones_like(values["loss"])}
        if self.step.model.aux is None or not self.stats:
            self.uncounted.append(values)
            return seeds
        if self.counted is None:
            grads = self._differentiate_aux(self._global(values), self.tokens[micro], self.shares[micro])
        else:
            grads = self.counted
        return seeds | grads

    def count(self, values: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the statistics of the whole step, which a counting forward has left, for the auxiliary loss."""
        if self.step.model.aux is None or not self.stats:
            return
        total = {name: torch.stack([v[name] for v in values]).sum(0) for name in self.stats}
        self.counted = self._differentiate_aux(self._global(total), self.tokens.sum(), self.shares.sum())

    def _differentiate_aux(self, stats: dict[str, Tensor], tokens: Tensor, share: Tensor) -> dict[str, Tensor]:
        aux = self.step.model.aux
        assert aux is not None
        floats = {name: value for name, value in stats.items() if value.is_floating_point()}

        def loss(floats: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            value, metrics = aux(stats | floats, tokens)
            return value * share.to(value.dtype), metrics

        with torch.enable_grad():
            grads, (value, metrics) = torch.func.grad_and_value(loss, has_aux=True)(floats)
        self.aux.append((value.detach(), {name: m.detach() * share.to(m.dtype) for name, m in metrics.items()}))
        return {name: grad.clone() for name, grad in grads.items()}  # they may be views, and compiled code is made for where one begins

    def metrics(self, values: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Global metrics of the run; those of the auxiliary loss are averaged over micro-batches by their share in the loss."""
        own = [torch.stack([v.get(name, v["loss"]).detach() for v in values]).sum() for name in RESULTS]
        loss, cross_entropy = self.sum(torch.stack(own))
        found = {"loss": loss, "cross_entropy": cross_entropy, "tokens": self.supervised.sum(), "weight": self.weights.sum()}
        for value, metrics in self.aux:
            found["loss"] = found["loss"] + value.to(loss.dtype)
            found |= {name: found[name] + m if name in found else m for name, m in metrics.items()}
        return found
