"""The laws: a transformed step gives what the untransformed model gives, checked in float64 on simulated ranks.

The reference is ``torch.func.grad`` of ``model.loss`` on one rank: no engine, no custom VJP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtf import optim, tree
from xtf.batch import Batch, normalizer, pack
from xtf.collectives import Axis
from xtf.data.batches import fill
from xtf.data.documents import Documents
from xtf.mesh import PADDING, Mesh, simulate, split_batch
from xtf.model import Model, run
from xtf.ops.reference import REFERENCE
from xtf.step import TrainStep, apply, train_step
from xtf.tree import Path

Transform = Callable[[TrainStep], TrainStep]


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


@dataclass(frozen=True)
class Observation:
    """What one rank saw of a transformed step: all that a law compares."""

    coordinate: Mapping[str, int]
    row_axes: tuple[str, ...]
    sizes: Mapping[str, int]
    micros: tuple[Mapping[str, Tensor], ...]
    loss: Tensor
    evaluated: Tensor
    grads: Mapping[Path, Tensor | None]
    metrics: Mapping[str, Tensor]
    params: Mapping[Path, Tensor]


def check(
    transform: Callable[..., Any],
    *,
    model: Model | Sequence[Model] | None = None,
    batch: Batch | Documents | None = None,
    optimizer: optim.Optimizer | None = None,
    seed: int = 0,
    tolerance: float = 1e-12,
    **sizes: int,
) -> list[Report]:
    """Check that a transform changes how a step runs and not what it computes.

    Runs the transformed step on simulated ranks, and compares the loss, the gradient of every leaf, the gradient's norm, the
    parameters after an update and the metrics with those of ``model.loss`` under ``torch.func.grad`` on one rank. Values differ when
    max|Δ| > tolerance × max|reference|. For a gradient that is less than a ten thousandth of the largest one, such as that of queries
    that see one key, which is nothing but rounding, that bound is the largest one's, divided by ten thousand.

    Args:
        transform: without ``sizes`` a transform; with ``sizes`` a function of the mesh that gives one, as in
            ``lambda mesh: shard(mesh["data"])``.
        model: a model, or several. Float64 models make the law exact; by default those of `small_models`: with tied
            embeddings, with auxiliary losses, with leaves that no gradient reaches.
        batch: the global batch; by default one with packed documents, unequal weights and a row without targets. Documents, for
            `xtf.transforms.balance_batch`, are given to every rank whole; the reference has each in a row of its own.
        optimizer: by default AdamW behind clipping.
        seed: of the initial parameters and the default batch.
        tolerance: relative, per leaf.
        sizes: the mesh, as in ``data=4, expert=2``.

    Returns:
        A report for each model.

    Raises:
        LawError: naming each leaf that differs and the factor by which it does: 2 for a gradient summed twice, 1/n for one that
            misses a reduction over n ranks.

    Example:
        >>> from xtf.transforms import shard
        >>> print(check(lambda mesh: shard(mesh["data"]), model=small_models()["llama"], data=2)[0])  # doctest: +ELLIPSIS
        llama on data=2: holds; ... quantities, largest relative error ...
    """
    chosen = list(small_models().values()) if model is None else [model] if isinstance(model, Model) else list(model)
    optimizer = default_optimizer() if optimizer is None else optimizer
    reports: list[Report] = []
    for one in chosen:
        whole = random_batch(one.vocab, seed=seed) if batch is None else batch
        if sizes:
            seen = simulate(lambda mesh: observe(mesh, transform(mesh), one, whole, optimizer, seed), **sizes)  # noqa: B023
        else:
            seen = [observe(None, transform, one, whole, optimizer, seed)]
        plain = documents_batch(whole) if isinstance(whole, Documents) else whole
        name = f"{one.family} on " + (", ".join(f"{k}={v}" for k, v in sizes.items()) or "one rank")
        reports.append(compare(name, seen, one, plain, optimizer, seed=seed, tolerance=tolerance))
    return reports


def observe(
    mesh: Mesh | None, transform: Transform, model: Model, batch: Batch | Documents, optimizer: optim.Optimizer, seed: int
) -> Observation:
    """Run a transformed step on this rank (of real or simulated ranks) and return what it did; `compare` judges it."""
    step = apply(transform, train_step(model, optimizer))
    axes = [name for axis in step.row_axes for name in axis.names]
    part: Any = batch
    if not isinstance(batch, Documents):
        part = split_batch(batch, mesh, axes=axes) if mesh is not None and axes else dict(batch)
    state = step.init(seed)
    loss, grads = step.value_and_grad(state.params, part)
    evaluated = step.loss(state.params, part)
    full = tree.items(step.full(grads))
    new, metrics = step(state, part)
    return Observation(
        coordinate=dict(mesh.coordinate) if mesh is not None else {},
        row_axes=tuple(axes),
        sizes=dict(mesh.sizes) if mesh is not None else {},
        micros=tuple(step.split(part)),
        loss=loss,
        evaluated=evaluated,
        grads=full,
        metrics=metrics,
        params=tree.items(step.full(new.params)),
    )


def compare(
    name: str, seen: Sequence[Observation], model: Model, batch: Batch, optimizer: optim.Optimizer, *, seed: int, tolerance: float
) -> Report:
    """Judge what ranks saw against the reference.

    Raises:
        LawError: see `check`.
    """
    report = Report(name)
    params = model.init(seed)
    micros = _global_micros(seen)
    weights = [pack(m)["weights"].double().sum() for m in micros]
    total = pack(batch)["weights"].double().sum()
    differ: dict[str, list[tuple[int, str]]] = {}  # what differs -> on which ranks, and how

    def judge(what: str, got: Tensor, want: Tensor, rank: int, floor: float = 0.0) -> None:
        error, text = _compare(got, want, tolerance, seen[rank].sizes, floor)
        report.errors[f"{what} on rank {rank}" if len(seen) > 1 else what] = error
        if text:
            differ.setdefault(what, []).append((rank, text))

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
    grads = tree.from_items(model.specs, expected)
    updates, opt = optimizer.update(grads, optimizer.init(params), params)
    after = tree.items(optim.apply_updates(params, updates))
    if model.update is not None:
        untrained = {path: leaf for path, leaf in after.items() if not specs[path].trainable}
        after |= dict(model.update(untrained, _counts(model, params, batch)))
    norm = torch.stack([g.square().sum() for g in expected.values() if g is not None]).sum().sqrt()
    known = {"cross_entropy": _cross_entropy(model, params, batch), "tokens": (pack(batch)["weights"] != 0).sum()}
    known |= _aux_metrics(model, params, [batch] if model.aux_scope == "step" else micros, total)
    rounding = _FLOOR * max((_largest(g) for g in expected.values() if g is not None), default=0.0)
    for rank, one in enumerate(seen):
        judge("loss", one.loss, value, rank)
        judge("evaluated loss", one.evaluated, value, rank)
        judge("metric loss", one.metrics["loss"], value, rank)
        judge("metric grad_norm", one.metrics["grad_norm"], norm, rank)
        for key, want in known.items():
            judge(f"metric {key}", one.metrics[key], want, rank)
        for path, want in expected.items():
            got = one.grads[path]
            if want is not None and got is not None:
                judge(f"gradient of {path}", got, want, rank, rounding)
            elif want is not got:
                differ.setdefault(f"gradient of {path}", []).append((rank, f"expected {'none' if want is None else 'one'}"))
        for path, want in after.items():
            judge(f"{path} after the step", one.params[path], want, rank)
        for key, want in optimizer.metrics(opt).items():
            if key != "grad_norm":  # judged above; an optimizer may keep it in float32
                judge(f"metric {key}", one.metrics[key], want, rank)
    report.failures = [f"{what}{_where([rank for rank, _ in rows], len(seen))}: {rows[0][1]}" for what, rows in differ.items()]
    if report.failures:
        rest = list(differ)[_SHOWN:]
        raise LawError("\n  ".join([str(report), *report.failures[:_SHOWN], *([f"and {', '.join(rest)}"] if rest else [])]))
    return report


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


def documents_batch(documents: Documents) -> dict[str, Tensor]:
    """Each document in a row of its own, filled up with padding: (documents, tokens of the longest)."""
    return fill(documents, [np.array([i]) for i in range(len(documents))], rows=len(documents), seq=int(documents.lengths.max()))


def default_optimizer() -> optim.Optimizer:
    """AdamW behind clipping. Its eps is large: where a gradient is rounding noise around zero, AdamW would otherwise make the
    noise as large as the learning rate, and no law could hold."""
    return optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(lr=1e-2, eps=1e-3, weight_decay=0.1))


def random_batch(vocab: int, *, rows: int = 5, seq: int = 13, seed: int = 0) -> dict[str, Tensor]:
    """A batch that is unlike what is easy: documents of unequal length, some padding, weights, and a row without targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (rows, seq), generator=generator)
    labels = torch.where(torch.rand(rows, seq, generator=generator) < 0.3, -100, ids)
    labels[min(1, rows - 1)] = -100  # not the last row: a transform that drops that one must be caught
    documents = (torch.rand(rows, seq, generator=generator) < 0.25).long().cumsum(1)
    documents[0, seq - 2 :] = -1
    weights = torch.rand(rows, seq, generator=generator, dtype=torch.float64) + 0.5
    return {"input_ids": ids, "labels": labels, "document_ids": documents, "loss_weights": weights}


def small_models(dtype: torch.dtype = torch.float64) -> dict[str, Model]:
    """One small model of each family, of sizes that little divides."""
    from xtf.models import from_hf

    common = {
        "vocab_size": 61,
        "hidden_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
    }
    dense = common | {"intermediate_size": 28, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "initializer_range": 0.3}
    tied = dense | {"model_type": "llama", "tie_word_embeddings": True}
    moe = dense | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.1,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    }
    latent = common | {
        "model_type": "deepseek_v3",
        "head_dim": None,
        "num_key_value_heads": 4,
        "intermediate_size": 18,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "first_k_dense_replace": 1,
        "q_lora_rank": 9,
        "kv_lora_rank": 7,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 3,
        "moe_intermediate_size": 5,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    }
    return {
        "llama": from_hf(tied, dtype=dtype),
        "qwen3": from_hf(dense | {"model_type": "qwen3"}, dtype=dtype, z_loss=0.01),
        "qwen3_moe": from_hf(moe, dtype=dtype, router_z_loss=0.01),
        "deepseek_v3": from_hf(latent, dtype=dtype, balance_loss=0.05, sequence_loss=0.1, bias_update_speed=0.02),
    }


__all__ = [
    "Axis",
    "LawError",
    "Observation",
    "Report",
    "check",
    "compare",
    "default_optimizer",
    "documents_batch",
    "observe",
    "random_batch",
    "small_models",
]
