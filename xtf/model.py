"""A model is a record: parameters described, constants made of a batch, and the chain of stages between them.

Dims: batch and seq of a batch as it comes; T = batch × seq tokens packed, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from xtf import tree
from xtf.batch import Batch, check_batch, normalizer, pack
from xtf.checkpoint_map import Source
from xtf.ops import Ops
from xtf.ops.reference import REFERENCE
from xtf.spec import ParamSpec
from xtf.stage import Stage
from xtf.tree import Path, Tree

RESULTS = ("loss", "cross_entropy")
"""What loss stages write."""

AuxLoss = Callable[[Mapping[str, Tensor], Int[Tensor, ""]], tuple[Float[Tensor, ""], dict[str, Tensor]]]
"""``(statistics summed over tokens, number of tokens) -> (loss, metrics)``: what the routers add to the loss."""

Update = Callable[[Mapping[Path, Tensor], Mapping[str, Tensor]], Mapping[Path, Tensor]]
"""``(leaves that are not trained, whole, by path; integer statistics summed over the step) -> new values of some of these leaves``."""


@dataclass(frozen=True)
class Model:
    """A language model as pure functions over a tree of parameters.

    Args:
        family: its name in `xtf.models`.
        config: the family's ``Config``.
        specs: a tree of `ParamSpec`, the structure of the parameters.
        constants: adds to the constants of a packed batch (`xtf.batch.pack`) what the family's stages read, as rotary tables.
        build: ``build(ops) -> stages``. The last stage has the kind ``"loss"``: it has one parameter ``weight`` (vocab, embed),
            reads the hidden states after the last norm, and writes ``"loss"``, the sum over targets of weight ×
            cross-entropy × the constant ``normalizer`` (see `cross_entropy`). The next token is scored from the first value it reads.
        sources: where each leaf is found in a Hugging Face checkpoint.
        hf_config: the fields of the ``config.json`` that transformers needs for this model.
        vocab: size of the vocabulary.
        aux: the auxiliary loss of the statistics that router stages write, or ``None``.
        aux_scope: the tokens over which statistics are summed before ``aux`` sees them: those of all ranks in a
            micro-batch, or in the whole step.
        update: the new values of leaves that are not trained, after a step, or ``None`` where they never change. A pure function of
            these leaves and of the integer statistics that stages write, summed over all ranks and micro-batches of the step.
        active_fraction: the share of a leaf with the axis ``"expert"`` that one token uses.
        z_loss: coefficient of the z-loss on the logits (Chowdhery et al. 2022, PaLM): the loss stage adds ``z_loss ×
            logsumexp²`` to each target's cross-entropy.
    """

    family: str
    config: Any
    specs: Tree = field(repr=False)
    constants: Callable[[dict[str, Any]], dict[str, Any]] = field(repr=False)
    build: Callable[[Ops], tuple[Stage, ...]] = field(repr=False)
    sources: Mapping[Path, Source] = field(repr=False)
    hf_config: Mapping[str, Any] = field(repr=False)
    vocab: int
    aux: AuxLoss | None = None
    aux_scope: Literal["microbatch", "step"] = "microbatch"
    update: Update | None = None
    active_fraction: float = 1.0
    z_loss: float = 0.0
    _reference: tuple[Stage, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_reference", self.build(REFERENCE))

    def init(self, seed: int) -> Tree:
        """Initial parameters, whole, on the CPU."""
        specs: dict[Path, ParamSpec] = tree.items(self.specs)
        return tree.from_items(self.specs, {path: spec.initial(seed, path) for path, spec in specs.items()})

    def param_count(self) -> tuple[int, int]:
        """(total, active per token) number of parameters; nothing is allocated."""
        specs: list[ParamSpec] = tree.leaves(self.specs)
        active = sum(s.numel * (self.active_fraction if "expert" in s.axes else 1.0) for s in specs)
        return sum(s.numel for s in specs), round(active)

    def pack(self, batch: Batch, *, supervised: bool = True) -> dict[str, Any]:
        """The constants of a batch, checked: `xtf.batch.pack` and what the family adds.

        A batch without values (on the device ``"meta"``) has constants without values, but for where its documents begin: each of its
        rows is one.

        Raises:
            ValueError: for a batch that is not one, or that has no labels although ``supervised``.
        """
        check_batch(batch, self.vocab)
        if supervised and "labels" not in batch:
            raise ValueError(
                f"batch has no 'labels', so there is no loss; it has {sorted(batch)}: give labels, -100 where nothing is learned"
            )
        ids = batch["input_ids"]
        if ids.is_meta:
            zeros = torch.zeros(ids.shape, dtype=torch.int64, device="cpu")
            made = self.pack({"input_ids": zeros, "labels": zeros})
            return {k: v.to("meta") if isinstance(v, Tensor) and k != "cu_seqlens" else v for k, v in made.items()}
        packed = pack(batch)
        return packed | self.constants(packed)

    def _hidden(self, params: Tree, consts: Mapping[str, Any]) -> dict[str, Tensor]:
        """Every value that stands after the stages that the scores of the next token need."""
        return run(scoring(self._reference), params, consts)

    def _head(self, params: Tree) -> Float[Tensor, "V H"]:
        return tree.items(params)[self._reference[-1].params["weight"]]

    def logits(
        self,
        params: Tree,
        input_ids: Int[Tensor, "batch seq"],
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        document_ids: Int[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq V"]:
        """Scores of the next token.

        Args:
            params: whole parameters.
            input_ids: (batch, seq) integers.
            positions: (batch, seq) integers; by default counted from 0 in each document.
            document_ids: (batch, seq) integers; attention never crosses from one to another.

        Returns:
            (batch, seq, vocab), in the parameters' dtype.
        """
        optional = {"positions": positions, "document_ids": document_ids}
        consts = self.pack({"input_ids": input_ids} | {k: v for k, v in optional.items() if v is not None}, supervised=False)
        read = self._reference[-1].reads[0]
        logits = F.linear(self._hidden(params, consts)[read], self._head(params))
        return logits.view(*input_ids.shape, self.vocab)

    def loss(self, params: Tree, batch: Batch) -> Float[Tensor, ""]:
        """The loss of a whole batch on one rank, plainly: the reference of every law. Shape (), at least float32.

        Σ weight × cross-entropy ÷ Σ weight, plus the auxiliary loss. 0 where nothing is supervised.
        """
        consts = self.pack(batch)
        consts["normalizer"] = normalizer(consts["weights"].double().sum())
        values = run(self._reference, params, consts)
        loss = values.pop("loss")
        if self.aux is None:
            return loss
        stats = {name: value for name, value in values.items() if name in self.statistics}
        aux, _ = self.aux(stats, consts["valid"].sum())
        return loss + torch.where(consts["normalizer"] > 0, aux, 0).to(loss.dtype)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the values that stages write and no stage reads, but the loss."""
        return statistics(self._reference)

    def logprobs(self, params: Tree, batch: Batch, *, chunk: int = 1024) -> Float[Tensor, "batch seq"]:
        """Log-probability of each label given what precedes it; the logits of ``chunk`` tokens exist at a time.

        Returns:
            (batch, seq), at least float32; the value of the label at t stands at t, 0 where t is no target.
        """
        consts = self.pack(batch)
        read = self._reference[-1].reads[0]
        hidden, head, targets = self._hidden(params, consts)[read], self._head(params), consts["targets"]
        parts: list[Tensor] = []
        for h, t in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True):
            logits = F.linear(h, head)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            parts.append(-F.cross_entropy(logits, t, reduction="none", ignore_index=-100))
        if not parts:
            return hidden.new_zeros(batch["input_ids"].shape)
        predicted = torch.cat(parts)
        return torch.cat([predicted.new_zeros(1), predicted[:-1]]).view(batch["input_ids"].shape)


def statistics(stages: tuple[Any, ...]) -> tuple[str, ...]:
    """Values that are written and never read, but those of the loss stage."""
    read = {name for stage in stages for name in stage.reads}
    return tuple(name for stage in stages for name in stage.writes if name not in read and name not in RESULTS)


def scoring(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The stages that the scores of the next token need: those up to the last that writes the first value of the loss."""
    read = stages[-1].reads[0]
    last = max(at for at, stage in enumerate(stages) if read in stage.writes)
    return stages[: last + 1]


def run(stages: tuple[Stage, ...], params: Tree, consts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Run stages one after another on whole parameters, plainly. Returns every value as it stands in the end."""
    by_path, values = tree.items(params), dict[str, Tensor]()
    missing = sorted({path for stage in stages for path in stage.params.values()} - by_path.keys())
    if missing:
        shown = missing[:5] + ["..."] * (len(missing) > 5)
        raise ValueError(f"the parameters have no {shown}: they are not this model's (of a state, give state.params)")
    for stage in stages:
        own = {name: by_path[path] for name, path in stage.params.items()}
        written = stage(own, tuple(values[name] for name in stage.reads), consts)
        values.update(zip(stage.writes, written, strict=True))
    return values


def cross_entropy(z_loss: float = 0.0, further: int = 0) -> Callable[..., tuple[Float[Tensor, ""], ...]]:
    """The plain loss stage, every logit at once: ``fn(params, x, *, targets, weights, normalizer) -> loss_writes(z_loss)``.

    ``loss`` is Σ weight × (cross-entropy + z-loss) × normalizer. With a z-loss, ``cross_entropy`` is the same without it, a
    metric that carries no gradient.

    Args:
        z_loss: coefficient of the z-loss.
        further: how many values it reads after the first, each with the same head and with targets and weights of its own
            (`loss_consts`). They add to ``loss``, not to ``cross_entropy``.
    """

    def losses(
        params: Mapping[str, Tensor],
        x: Float[Tensor, "T H"],
        targets: Int[Tensor, " T"],
        weights: Float[Tensor, " T"],
        normalizer: Float[Tensor, ""],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        logits = F.linear(x, params["weight"])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        entropy = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
        total = entropy + z_loss * logits.logsumexp(-1).square() if z_loss else entropy
        scale = weights.to(total.dtype) * normalizer.to(total.dtype)
        return (total * scale).sum(), (entropy.detach() * scale).sum()

    wanted = len(loss_writes(z_loss, further))

    def loss(params: Mapping[str, Tensor], *reads: Tensor, **consts: Tensor) -> tuple[Tensor, ...]:
        parts = [losses(params, x, *terms) for x, terms in zip(reads, loss_terms(consts, len(reads)), strict=True)]
        total = parts[0][0]
        for more, _ in parts[1:]:
            total = total + more
        return (total, parts[0][1])[:wanted]

    return loss


def loss_writes(z_loss: float, further: int = 0) -> tuple[str, ...]:
    """What a loss stage writes."""
    return ("loss", "cross_entropy") if z_loss or further else ("loss",)


def loss_consts(further: int = 0) -> tuple[str, ...]:
    """The constants that a loss stage takes; for each further value it reads, targets and weights with its number."""
    more = (f"{name}_{i}" for i in range(1, further + 1) for name in ("targets", "weights"))
    return ("targets", "weights", "normalizer", *more)


def loss_terms(consts: Mapping[str, Tensor], reads: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(targets, weights, normalizer) of each value that a loss stage reads."""
    suffixes = ["", *(f"_{i}" for i in range(1, reads))]
    return [(consts[f"targets{suffix}"], consts[f"weights{suffix}"], consts["normalizer"]) for suffix in suffixes]
