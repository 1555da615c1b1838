"""Faults of the mean: which targets count, and by how many tokens, ranks or micro-batches a sum is divided."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.silent.record import case, further, moe, replaced, tied
from xtf import model as model_module
from xtf import testing
from xtf.batch import normalizer, pack
from xtf.model import Model
from xtf.step import TrainStep, compose, train_step
from xtf.step_loss import StepLoss
from xtf.testing import LawError
from xtf.transforms import accumulate, chunk_loss, context_parallel, shard

# What counts ---------------------------------------------------------------------------------------------------------------------


def by_hand(model: Model, params: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean cross-entropy of a batch, document by document, of logits alone: nothing of `xtf.batch`."""
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for ids, labels, documents, weights in zip(*batch.values(), strict=True):
        for document in documents[documents >= 0].unique().tolist():
            here = documents == document
            logits = model.logits(params, ids[here][None])[0, :-1]
            learned = labels[here][1:] != -100
            entropy = F.cross_entropy(logits, labels[here][1:].masked_fill(~learned, 0), reduction="none")
            total += (entropy * weights[here][1:])[learned].sum()
            count += weights[here][1:][learned].sum()
    return total / count


def documents_by_hand() -> None:
    model, batch = tied(), testing.random_batch(61)
    assert list(batch) == ["input_ids", "labels", "document_ids", "loss_weights"]
    step, params = train_step(model, testing.default_optimizer()), model.init(0)
    want, got = by_hand(model, params, batch), {"step.loss": step.loss(params, batch), "model.loss": model.loss(params, batch)}
    got["chunk_loss"] = chunk_loss(7)(step).loss(params, batch)
    for name, value in got.items():
        if abs(value - want) > 1e-12 * want:
            raise LawError(f"{name} is {value:.6f}, {value / want:.6f} × the mean by hand")


@case(
    "ignored labels counted in a mean",
    documents_by_hand,
    says=[r"^step\.loss is \d\.\d+, 0\.\d+ × the mean by hand"],
    reported=["meta-llama/llama-cookbook#101", "meta-pytorch/torchtune#1875"],
)
def ignored_count() -> Generator[None]:
    """`xtf.batch.pack`, as a model calls it, weighs positions whose label is -100: they have no cross-entropy, but are divided by."""

    def wrong(batch: Mapping[str, Tensor]) -> dict[str, Any]:
        packed, following = pack(batch), batch["loss_weights"].reshape(-1).roll(-1)
        return packed | {"weights": following * packed["valid"]}

    with packed_by(wrong):
        yield


def packed_by(wrong: Callable[[Mapping[str, Tensor]], dict[str, Any]]) -> AbstractContextManager[None]:
    """Batches with labels are packed by this."""
    return replaced((model_module, "pack", lambda batch: wrong(batch) if "labels" in batch else pack(batch)))


@case(
    "padded tokens counted in a mean",
    documents_by_hand,
    says=[r"^step\.loss is \d\.\d+, \d\.\d+ × the mean by hand"],
    reported=["arcee-ai/DAM#16", "EleutherAI/gpt-neo#45"],
)
def padding_learned() -> Generator[None]:
    """`xtf.batch.pack`, as a model calls it, takes padding for one more document, whose labels are learned."""

    def wrong(batch: Mapping[str, Tensor]) -> dict[str, Any]:
        padding = batch["document_ids"] < 0
        labels = torch.where(padding, batch["input_ids"], batch["labels"])
        return pack({**batch, "document_ids": batch["document_ids"].masked_fill(padding, 99), "labels": labels})

    with packed_by(wrong):
        yield


@case(
    "the first token of a packed document learned from the one before",
    documents_by_hand,
    says=[r"^step\.loss is \d\.\d+, \d\.\d+ × the mean by hand"],
    reported=["pytorch/torchtitan#4075", "meta-pytorch/torchtune#1177"],
)
def across_documents() -> Generator[None]:
    """`xtf.batch.pack`, as a model calls it, makes the first token of a document a target of the last token of the one before."""

    def wrong(batch: Mapping[str, Tensor]) -> dict[str, Any]:
        rows = pack({**batch, "document_ids": batch["document_ids"].clamp_max(0)})  # a row's documents as one
        return pack(batch) | {name: rows[name] for name in ("targets", "weights")}

    with packed_by(wrong):
        yield


# What a sum is divided by --------------------------------------------------------------------------------------------------------


@case(
    "gradient accumulation with unequal token counts",
    lambda: testing.check(compose(accumulate(3), chunk_loss(9)), model=[tied(), moe()]),
    says=[
        r"metric loss: .* the reference",
        r"gradient of layers\.0\.mlp\.gate: .* not a multiple of the reference",
        r"metric cross_entropy",
    ],
    right=[r"metric tokens"],
    reported=["huggingface/transformers#34191", "ml-explore/mlx-lm#1544", "verl-project/verl#906", "meta-pytorch/torchtune#1875"],
)
def mean_of_means() -> Generator[None]:
    """`StepLoss` normalises each micro-batch by its own weights, and divides by their number."""
    begin = StepLoss.__init__

    def wrong(self: StepLoss, *args: Any) -> None:
        begin(self, *args)
        for micro, own in zip(self.micros, self.weights, strict=True):
            micro["normalizer"] = normalizer(own) / len(self.micros)
        self.shares = torch.full_like(self.weights, 1 / len(self.micros))

    with replaced((StepLoss, "__init__", wrong)):
        yield


@case(
    "a mean of the means of ranks",
    lambda: testing.check(lambda mesh: shard(mesh["data"]), model=tied(), data=2),
    says=[r"metric loss on every rank", r"gradient of layers\.0\.mlp\.gate on every rank: .* not a multiple of the reference"],
    right=[r"metric tokens"],
    reported=["NVIDIA/Megatron-LM#4590", "NVIDIA/Megatron-LM#7513"],
)
def mean_of_ranks() -> Generator[None]:
    """`StepLoss` normalises by this rank's own weights, and divides by the number of ranks."""
    begin = StepLoss.__init__

    def wrong(self: StepLoss, step: TrainStep, *args: Any) -> None:
        begin(self, step, *args)
        own = torch.stack([micro["weights"].double().sum() for micro in self.micros]).sum()
        for micro in self.micros:
            micro["normalizer"] = normalizer(own) / (1 if step.token_axis is None else step.token_axis.size)

    with replaced((StepLoss, "__init__", wrong)):
        yield


@case(
    "multi-token-prediction loss normalised by local counts",
    lambda: testing.check(lambda mesh: shard(mesh["data"]), model=further(), data=2),
    says=[r"gradient of layers\.2\.further\.project on every rank: .* not a multiple of the reference", r"metric loss on every rank"],
    right=[r"metric cross_entropy", r"metric tokens", r"metric aux_loss"],
    reported=["NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#2417", "NVIDIA/Megatron-LM#3159"],
)
def further_by_own() -> Generator[None]:
    """`StepLoss` gives the further targets weights that are divided by this rank's own targets, and averaged over ranks."""
    begin = StepLoss.__init__

    def wrong(self: StepLoss, step: TrainStep, *args: Any) -> None:
        begin(self, step, *args)
        ranks = 1 if step.token_axis is None else step.token_axis.size
        for micro in self.micros:
            own = normalizer(micro["weights"].double().sum()) / ranks
            micro["weights_1"] = micro["weights_1"] * (own / micro["normalizer"])

    with replaced((StepLoss, "__init__", wrong)):
        yield


# Sequences on several ranks ------------------------------------------------------------------------------------------------------

_CONTEXT = sys.modules["xtf.transforms.context_parallel"]


def sequences_on_two() -> Any:
    return testing.check(lambda mesh: context_parallel(mesh["context"]), model=tied(), context=2)


@case(
    "token counts doubled under sequence splitting",
    sequences_on_two,
    says=[
        r"^\s*loss on every rank: .* it is 0\.5 × the reference",
        r"metric tokens on every rank: .* it is 2 × the reference \(the signature of a doubled reduction\)",
        r"gradient of embed\.weight on every rank: .* it is 0\.5 × the reference",
    ],
    reported=["pytorch/torchtitan#2983", "verl-project/verl#5983"],
)
def whole_sequences() -> Generator[None]:
    """`StepLoss` counts the tokens of whole sequences on each rank that has a part of them, before they are split."""
    begin = StepLoss.__init__

    def wrong(self: StepLoss, step: TrainStep, *args: Any) -> None:
        begin(self, step, *args)
        for axis in step.sequence_axes:
            self.weights, self.tokens, self.supervised = (v * axis.size for v in (self.weights, self.tokens, self.supervised))
            for micro in self.micros:
                micro["normalizer"] = micro["normalizer"] / axis.size

    with replaced((StepLoss, "__init__", wrong)):
        yield


@case(
    "evaluation loss times the number of ranks that share a sequence",
    sequences_on_two,
    says=[r"evaluated loss on every rank: .* it is 2 × the reference"],
    right=["metric", "gradient of", "after the step", r"^\s*loss"],
    reported=["huggingface/transformers#48167"],
)
def evaluation_scaled() -> Generator[None]:
    """`TrainStep.evaluate` sums over the ranks of a sequence what is summed already."""
    evaluate = TrainStep.evaluate

    def wrong(self: TrainStep, *args: Any, **options: Any) -> dict[str, Tensor]:
        found = evaluate(self, *args, **options)
        for axis in self.sequence_axes:
            found["loss"] = found["loss"] * axis.size
        return found

    with replaced((TrainStep, "evaluate", wrong)):
        yield


@case(
    "further targets shifted after sequences are split",
    lambda: testing.check(lambda mesh: context_parallel(mesh["context"]), model=further(), context=2),
    says=[r"gradient of layers\.2\.further\.project on every rank: .* not a multiple of the reference", r"metric loss on every rank"],
    right=[r"metric cross_entropy", r"metric tokens"],
    reported=["NVIDIA/Megatron-LM#7498", "modelscope/mcore-bridge#104"],
)
def shifted_locally() -> Generator[None]:
    """`context_parallel` takes the target after the next from the tokens that a rank has: wrong where a chunk ends."""
    own_tokens = _CONTEXT._own_tokens

    def wrong(*args: Any) -> dict[str, Any]:
        own = own_tokens(*args)
        if "targets_1" not in own:
            return own
        return own | {"targets_1": torch.where(own["targets_1"] == -100, -100, own["targets"].roll(-1))}

    with replaced((_CONTEXT, "_own_tokens", wrong)):
        yield
