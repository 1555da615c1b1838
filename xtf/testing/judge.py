"""The judge: what ranks saw of steps against ``torch.func.grad`` of ``model.loss`` on one rank, with no engine and no custom VJP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xtf import optim, tree
from xtf.batch import Batch, normalizer, pack
from xtf.mesh import PADDING
from xtf.model import Model, run
from xtf.ops.reference import REFERENCE
from xtf.testing.observe import Observation
from xtf.tree import Tree


class LawError(AssertionError):
    """A transform broke a law. The message names every quantity that differs, by how much, and by what factor."""


@dataclass
class Report:
    """What a check compared: the largest error of each quantity, relative to the largest value of its reference."""

    name: str
    errors: dict[str, float] = field(default_factory=dict[str, float])
    failures: list[str] = field(default_factory=list[str])

    @property
    def worst(self) -> float:
        """The largest relative error."""
        return max(self.errors.values(), default=0.0)

    def __str__(self) -> str:
        verdict = f"{len(self.failures)} differ" if self.failures else "holds"
        return f"{self.name}: {verdict}; {len(self.errors)} quantities, largest relative error {self.worst:.1e}"


def compare(
    name: str, seen: Sequence[Observation], model: Model, batch: Batch, optimizer: optim.Optimizer, *, seed: int, tolerance: float
) -> Report:
    """Judge what ranks saw of one step against the reference.

    Raises:
        LawError: see `xtf.testing.check`.
    """
    return compare_steps(name, [[one] for one in seen], model, [batch], optimizer, seed=seed, tolerance=tolerance)


def compare_steps(
    name: str,
    seen: Sequence[Sequence[Observation]],
    model: Model,
    batches: Sequence[Mapping[str, Tensor]],
    optimizer: optim.Optimizer,
    *,
    seed: int,
    tolerance: float,
) -> Report:
    """Judge what each rank saw of each step, against as many plain steps on one rank.

    Raises:
        LawError: see `xtf.testing.check`. It is about the first step in which something differs: later ones start from what is wrong.
        ValueError: if the reference is not finite in any step: all would be skipped, and nothing compared.
    """
    report, params = Report(name), model.init(seed)
    opt, compared = optimizer.init(params), False
    for at, batch in enumerate(batches):
        of_step = [steps[at] for steps in seen]
        judged = _Judge(report, of_step, tolerance, f"step {at + 1}, " if len(batches) > 1 else "")
        params, opt, finite = _judge_step(judged, of_step, model, batch, optimizer, params, opt)
        judged.settle()
        compared |= finite
    if not compared:
        raise ValueError(
            f"{name}: the reference's loss or gradients are not finite in any step, so nothing was compared: give another batch"
        )
    return report


class _Judge:
    """Compares quantities on all ranks, and keeps what differs."""

    def __init__(self, report: Report, seen: Sequence[Observation], tolerance: float, prefix: str) -> None:
        self.report, self.seen, self.tolerance, self.prefix = report, seen, tolerance, prefix
        self.differ: dict[str, list[tuple[int, str]]] = {}  # what differs -> on which ranks, and how

    def __call__(self, what: str, got: Tensor, want: Tensor, rank: int, floor: float = 0.0) -> None:
        what = self.prefix + what
        error, text = _compare(got, want, self.tolerance, self.seen[rank].sizes, floor)
        self.report.errors[f"{what} on rank {rank}" if len(self.seen) > 1 else what] = error
        if text:
            self.note(what, rank, text)

    def note(self, what: str, rank: int, text: str) -> None:
        self.differ.setdefault(what if what.startswith(self.prefix) else self.prefix + what, []).append((rank, text))

    def settle(self) -> None:
        """Raise if anything differs."""
        rows, report = self.differ.items(), self.report
        report.failures = [f"{what}{_where([rank for rank, _ in found], len(self.seen))}: {found[0][1]}" for what, found in rows]
        if report.failures:
            rest = list(self.differ)[_SHOWN:]
            raise LawError("\n  ".join([str(report), *report.failures[:_SHOWN], *([f"and {', '.join(rest)}"] if rest else [])]))


def _judge_step(
    judge: _Judge, seen: Sequence[Observation], model: Model, batch: Batch, optimizer: optim.Optimizer, params: Tree, opt: Any
) -> tuple[Tree, Any, bool]:
    """Judge one step that began with these parameters and this state of the optimizer; returns those after it, and whether the reference
    was finite."""
    micros = _global_micros(seen)
    weights = [pack(m)["weights"].double().sum() for m in micros]
    total = pack(batch)["weights"].double().sum()
    judge("weight of all targets in the micro-batches", torch.stack(weights).sum(), total, 0)

    def loss(params: Any) -> Tensor:
        if model.aux is None or model.aux_scope == "step" or len(micros) == 1:
            return model.loss(params, batch)
        # By definition each micro-batch's loss, auxiliary loss included, counts by its share of the weights.
        parts = [model.loss(params, m) * (w / total) for m, w in zip(micros, weights, strict=True) if w > 0]
        return torch.stack(parts).sum() if parts else model.loss(params, batch)

    grads, value = torch.func.grad_and_value(loss)(params)
    specs = tree.items(model.specs)
    expected = {path: g if specs[path].trainable else None for path, g in tree.items(grads).items()}
    norm = torch.stack([g.square().sum() for g in expected.values() if g is not None]).sum().sqrt()
    after = tree.items(params)
    if not bool((value + norm).isfinite()):  # such a step is skipped: it counts, and changes nothing
        for rank, one in enumerate(seen):
            if bool(one.loss.isfinite()) and bool(one.metrics["grad_norm"].isfinite()):
                judge.note("loss", rank, "loss and gradients are finite, those of the reference are not")
            judge("metric skipped", one.metrics["skipped"], torch.tensor(1), rank)
            for path, want in after.items():
                judge(f"{path} after the step", one.params[path], want, rank)
        return params, opt, False
    grads = tree.from_items(model.specs, expected)
    updates, opt = optimizer.update(grads, opt, params)
    after = tree.items(optim.apply_updates(params, updates))
    if model.update is not None:
        untrained = {path: leaf for path, leaf in after.items() if not specs[path].trainable}
        after |= dict(model.update(untrained, _counts(model, params, batch)))
    known = {"cross_entropy": _cross_entropy(model, params, batch), "tokens": (pack(batch)["weights"] != 0).sum()}
    known |= _aux_metrics(model, params, [batch] if model.aux_scope == "step" or len(micros) == 1 else micros, total)
    known |= {key: value for key, value in optimizer.metrics(opt).items() if key != "grad_norm"}  # which it may keep in float32
    rounding = _FLOOR * max((_largest(g) for g in expected.values() if g is not None), default=0.0)
    for rank, one in enumerate(seen):
        judge("loss", one.loss, value, rank)
        judge("evaluated loss", one.evaluated, value, rank)
        judge("metric loss", one.metrics["loss"], value, rank)
        judge("metric grad_norm", one.metrics["grad_norm"], norm, rank)
        judge("metric skipped", one.metrics["skipped"], torch.tensor(0), rank)
        for key, want in known.items():
            judge(f"metric {key}", one.metrics[key], want, rank)
        for path, want in expected.items():
            got = one.grads[path]
            if want is not None and got is not None:
                judge(f"gradient of {path}", got, want, rank, rounding)
            elif want is not got:
                judge.note(f"gradient of {path}", rank, f"expected {'none' if want is None else 'one'}")
        for path, want in after.items():
            judge(f"{path} after the step", one.params[path], want, rank)
    return tree.from_items(model.specs, after), opt, True


_SHOWN = 60  # what differs in numbers; the rest is named


def _where(ranks: Sequence[int], every: int) -> str:
    if every == 1:
        return ""
    return " on every rank" if len(ranks) == every else f" on rank {', '.join(map(str, ranks))}"


def _cross_entropy(model: Model, params: Any, batch: Batch) -> Tensor:
    """Of the targets, weighted, by way of the log-probabilities: the loss without its additions."""
    weights = pack(batch)["weights"][:-1].double()  # of the target that the next position holds
    logprobs = model.logprobs(params, batch).reshape(-1)[1:].double()
    return -(logprobs * weights).sum() * normalizer(weights.sum())


def _aux_metrics(model: Model, params: Any, micros: Sequence[Mapping[str, Tensor]], total: Tensor) -> dict[str, Tensor]:
    """What the auxiliary loss reports, averaged over micro-batches by their share of the weights."""
    if model.aux is None:
        return {}
    found: dict[str, Tensor] = {}
    for micro in micros:
        consts = model.pack(micro)
        weight = consts["weights"].double().sum()
        consts["normalizer"] = normalizer(weight)
        values = run(model.build(REFERENCE), params, consts)
        _, metrics = model.aux({name: values[name] for name in model.statistics}, consts["valid"].sum())
        found |= {name: found.get(name, 0) + value * (weight * normalizer(total)) for name, value in metrics.items()}
    return found


def _counts(model: Model, params: Any, batch: Batch) -> dict[str, Tensor]:
    """The integer statistics of a batch."""
    values = run(model.build(REFERENCE), params, model.pack(batch) | {"normalizer": torch.ones(())})
    return {name: values[name] for name in model.statistics if not values[name].is_floating_point()}


_FLOOR = 1e-4  # of the largest gradient: what is smaller may be the difference of numbers that size


def _compare(got: Tensor, want: Tensor, tolerance: float, sizes: Mapping[str, int], floor: float) -> tuple[float, str]:
    """The relative error, and what to say where it is too large; relative to ``floor`` where the reference is smaller."""
    if got.shape != want.shape:
        return math.inf, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.double(), want.double()
    delta, scale = _largest(got - want), max(_largest(want), floor)
    text = "" if delta <= tolerance * scale else f"max|Δ| {delta:.3e}, max|reference| {_largest(want):.3e}{_factor(got, want, sizes)}"
    return delta / scale if scale else delta, text


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _factor(got: Tensor, want: Tensor, sizes: Mapping[str, int]) -> str:
    """The factor between two tensors, if they differ by one, and what usually causes it."""
    square = float((want * want).sum())
    if not square:
        return "; the reference is zero"
    factor = float((got * want).sum()) / square
    if _largest(got - factor * want) > 1e-6 * max(_largest(want), _largest(got)):
        return "; not a multiple of the reference"
    known = {2.0: "the signature of a doubled reduction", 0.0: "nothing arrived"}
    for axis, n in ((axis, n) for axis, n in sizes.items() if n > 1):
        known.setdefault(float(n), f"summed once too often over {axis}={n}")
        known.setdefault(1 / n, f"a missing reduction over {axis}={n}, or divided by its size")
        known.setdefault(math.sqrt(n), f"a norm that counts what lies on several ranks of {axis}={n} once for each")
    every = math.prod(sizes.values())
    if every > 1:
        known.setdefault(float(every), f"summed once too often over all {every} ranks")
        known.setdefault(1 / every, f"a missing reduction over all {every} ranks")
    cause = next((text for value, text in known.items() if abs(factor - value) < 1e-6), None)
    return f"; it is {factor:.6g} × the reference" + (f" ({cause})" if cause else "")


def _global_micros(seen: Sequence[Observation]) -> list[dict[str, Tensor]]:
    """The micro-batches of all ranks that are given different rows, joined rank by rank."""
    holders = [o for o in seen if all(at == 0 for axis, at in o.coordinate.items() if axis not in o.row_axes)]
    joined: list[dict[str, Tensor]] = []
    for parts in zip(*(o.micros for o in holders), strict=True):
        keys, seq = {key for part in parts for key in part}, max(part["input_ids"].shape[1] for part in parts)
        default = {"document_ids": 0, "loss_weights": 1.0}
        filled = [{key: part.get(key, torch.full(part["input_ids"].shape, default.get(key, 0))) for key in sorted(keys)} for part in parts]
        joined.append({key: torch.cat([_longer(part[key], seq, PADDING[key]) for part in filled]) for key in sorted(keys)})
    return joined


def _longer(value: Tensor, seq: int, padding: int) -> Tensor:
    return torch.cat([value, value.new_full((len(value), seq - value.shape[1]), padding)], 1)
