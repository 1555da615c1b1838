"""Faults of what is stored and read: weights that are converted, states that are resharded, data that are ordered."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.silent.record import case, moe, replaced
from xtf import checkpoint, models, optim, testing, tree
from xtf.checkpoint import load_params, reading, save_params, save_state, writing
from xtf.checkpoint_map import Source, Stack, fill, take_apart
from xtf.data import Documents, PackedBatches, pipeline, tokenize_files
from xtf.data.text import TOKENIZER_FILE
from xtf.mesh import Mesh, simulate, split_batch
from xtf.optim import AdamState
from xtf.step import TrainStep, compose, train_step
from xtf.testing import LawError
from xtf.transforms import expert_parallel, shard

# Conversion ----------------------------------------------------------------------------------------------------------------------

SQUARE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 29, "moe_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2,
    "max_position_embeddings": 32, "norm_topk_prob": True,
}  # fmt: skip
"""Experts whose matrices are as wide as high: no shape tells that one is transposed."""


@cache
def theirs() -> Any:
    return hf_models.build(SQUARE, torch.float32)


def converted() -> None:
    """transformers' weights into ours and back: every expert by name, and the same scores on both sides."""
    ids = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(0))
    reference = theirs()
    want = reference(input_ids=ids).logits.detach()
    with tempfile.TemporaryDirectory() as folder:
        there, back = Path(folder, "theirs"), Path(folder, "ours")
        reference.save_pretrained(there)
        model = models.from_hf(there)
        params = load_params(model, there)
        _compare_experts("read", tree.items(params), load_file(there / "model.safetensors"))
        _compare_scores("read", model.logits(params, ids), want)
        save_params(model, params, back)
        _compare_experts("written", tree.items(params), load_file(back / "model.safetensors"))
        auto: Any = transformers.AutoModelForCausalLM
        _compare_scores("written", auto.from_pretrained(back)(input_ids=ids).logits.detach(), want)


def _compare_experts(how: str, ours: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    wrong: list[str] = []
    for layer in range(2):
        for e in range(3):
            at = f"model.layers.{layer}.mlp.experts.{e}"
            gate_up = torch.cat([stored[f"{at}.{name}_proj.weight"] for name in ("gate", "up")])
            for name, want in (("gate_up", gate_up), ("down", stored[f"{at}.down_proj.weight"])):
                got = ours[f"layers.{layer}.moe.{name}"][e]
                if not torch.equal(got, want):
                    halves = zip(got.chunk(len(want) // 8), want.chunk(len(want) // 8), strict=True)
                    kind = "transposed" if all(torch.equal(a, b.T) for a, b in halves) else "other values"
                    wrong.append(f"{how}: expert {e} of layers.{layer}.moe.{name} and {at}: {kind}")
    if wrong:
        raise LawError("\n".join(wrong))


def _compare_scores(how: str, got: Tensor, want: Tensor) -> None:
    if (got - want).abs().max() > 1e-5 * want.abs().max():
        raise LawError(f"{how}: scores differ by {float((got - want).abs().max()):.3e}")


def _reading(spoil: Callable[[Tensor], object]) -> AbstractContextManager[None]:
    """Blocks of stacked experts are spoilt as they are read."""

    def wrong(source: Source, shape: Any, ranges: Any, read: Any, out: Tensor) -> None:
        fill(source, shape, ranges, read, out)
        if isinstance(source, Stack):
            spoil(out)

    return replaced((reading, "fill", wrong))


@case(
    "expert weights dropped silently by conversion",
    converted,
    says=[r"^read: expert 2 of layers\.0\.moe\.gate_up and .*: other values", r"^read: expert 2 of layers\.1\.moe\.down and"],
    right=["expert [01] of"],
    reported=["NVIDIA/Megatron-LM#5844", "NVIDIA/Megatron-LM#5845"],
)
def dropped() -> Generator[None]:
    """`xtf.checkpoint.reading` leaves the last expert of each layer as it was allocated."""
    with _reading(lambda out: out[-1].zero_()):
        yield


@case(
    "expert weights transposed silently by conversion",
    converted,
    says=[
        r"^read: expert 0 of layers\.0\.moe\.down and model\.layers\.0\.mlp\.experts\.0: transposed",
        r"^read: expert 2 of layers\.1\.moe\.down",
    ],
    right=["gate_up", "other values"],
    reported=["huggingface/transformers#47031", "charlie12345/ROCmFPX#49"],
)
def transposed() -> Generator[None]:
    """`xtf.checkpoint.reading` decides by shape whether an expert's matrix is transposed, and matrices are square."""

    def spoil(out: Tensor) -> None:
        if out.shape[-1] == out.shape[-2]:
            out.copy_(out.transpose(-1, -2).clone())

    with _reading(spoil):
        yield


@case(
    "experts of one rank written for all",
    converted,
    says=[r"^written: expert 1 of layers\.0\.moe\.down and .*: other values", r"^written: expert 2 of layers\.1\.moe\.gate_up and"],
    right=["expert 0 of", "^read:"],
    reported=["KempnerInstitute/KempnerForge#202"],
)
def renumbered() -> Generator[None]:
    """`xtf.checkpoint.writing` takes every expert's tensors from the first expert."""

    def wrong(source: Source, leaf: Tensor) -> Iterator[tuple[str, Tensor]]:
        experts = ".experts." in str(source) and leaf.dim() == 3
        return take_apart(source, leaf[:1].expand_as(leaf) if experts else leaf)

    with replaced((writing, "take_apart", wrong)):
        yield


# Resharding ----------------------------------------------------------------------------------------------------------------------


def _optimizer() -> optim.Optimizer:
    return optim.adamw(lr=1e-2, eps=1e-3, weight_decay=0.1)


def _step(mesh: Mesh) -> TrainStep:
    layout = [expert_parallel(mesh["expert"])] if "expert" in mesh.sizes else []
    return compose(*layout, shard(*(mesh[name] for name in mesh)))(train_step(moe(), _optimizer()))


def resharded() -> None:
    """Two steps on two ranks, saved, and two more on other layouts: the parameters after each equal those of four steps on one rank."""
    batches = [testing.random_batch(61, seed=seed) for seed in range(4)]
    step = train_step(moe(), _optimizer())
    state, after = step.init(0), list[dict[str, Tensor]]()
    for batch in batches:
        state, _ = step(state, batch)
        after.append(tree.items(state.params))

    def first(mesh: Mesh, folder: Path) -> None:
        step = _step(mesh)
        state = step.init(0)
        for batch in batches[:2]:
            state, _ = step(state, split_batch(batch, mesh))
        save_state(step, state, folder)

    def rest(mesh: Mesh, folder: Path) -> list[dict[str, Tensor]]:
        step = _step(mesh)
        state, _ = checkpoint.load_state(step, folder)
        found = list[dict[str, Tensor]]()
        for batch in batches[2:]:
            state, _ = step(state, split_batch(batch, mesh))
            found.append(tree.items(step.full(state.params)))
        return found

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "state")
        simulate(lambda mesh: first(mesh, folder), data=1, expert=2)
        for sizes in ({"expert": 3}, {"data": 2}, {"data": 2, "expert": 2}):
            for at, params in enumerate(simulate(lambda mesh: rest(mesh, folder), **sizes)[0], start=2):
                wrong = [p for p, want in after[at].items() if (params[p] - want).abs().max() > 1e-12 * want.abs().max()]
                if wrong:
                    raise LawError(f"loaded on {sizes}, after step {at + 1} differ: {', '.join(wrong)}")


@case(
    "expert optimizer state stale after resharding",
    resharded,
    says=[r"loaded on {'expert': 3}, after step 3 differ: layers\.0\.moe\.down, layers\.0\.moe\.gate_up, layers\.2\.moe\.down"],
    right=["attention", "embed", "router", "norm"],
    reported=["deepspeedai/DeepSpeed#8198", "areal-project/AReaL#1468", "huggingface/nanotron#107", "NVIDIA/Megatron-LM#1517"],
)
def stale() -> Generator[None]:
    """`xtf.checkpoint.load_state` gives every rank the moments of the first rank's experts."""
    load = checkpoint.load_state

    def wrong(step: TrainStep, path: Any) -> Any:
        state, extra = load(step, path)
        assert isinstance(state.opt, AdamState)

        def first(path: str, own: Tensor, whole: Tensor) -> Tensor:
            at = step.placements[path]
            owned = [split for split in at.splits if not split.gathered]
            if not owned:
                return own
            block = [slice(start, stop) for start, stop in at.ranges({split: split.axis.index * split.gathered for split in at.splits})]
            taken = whole[tuple(block)]
            return torch.cat([taken, own[len(taken) :]]) if taken.shape != own.shape else taken.clone()

        def spoilt(own: Any) -> Any:
            whole = tree.items(step.full(own))
            return step.tree_of({path: first(path, leaf, whole[path]) for path, leaf in tree.items(own).items()})

        return state.replace(opt=state.opt._replace(mean=spoilt(state.opt.mean), square=spoilt(state.opt.square))), extra

    with replaced((checkpoint, "load_state", wrong)):
        yield


# Data ----------------------------------------------------------------------------------------------------------------------------


def tokenized() -> None:
    """A file in many small pieces, on one thread and on four: the same documents in the same order."""
    rows = [{"text": f"Chapter {i}. " + "It is a truth. " * (1 + 7 * i % 13)} for i in range(40)]
    orders: list[list[list[int]]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.jsonl")
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        for threads in (1, 4):
            with replaced((pipeline, "_THREADS", threads), (pipeline, "_CHUNK", 64)):
                found = tokenize_files([file], TOKENIZER_FILE.parent, cache_dir=Path(folder, f"cache {threads}")).documents
                orders.append([document.ids.tolist() for document in found.read(np.arange(len(found)))])
    one, several = orders
    if one != several:
        at = next(i for i, (a, b) in enumerate(zip(one, several, strict=True)) if a != b)
        same = sorted(one) == sorted(several)
        raise LawError(f"4 workers: document {at} is another{', but all of them are there' if same else ''}")


@case(
    "a data order that changes with the number of workers",
    tokenized,
    says=[r"4 workers: document \d+ is another, but all of them are there"],
    reported=["pytorch/pytorch#15170", "webdataset/webdataset#447", "Project-MONAI/MONAI#4569"],
)
def as_they_finish() -> Generator[None]:
    """`xtf.data.pipeline._encoded` gives results as they are finished, where several threads encode: here the later ones first."""
    encoded = pipeline._encoded

    def wrong(pool: Any, chunks: Any) -> Iterator[Any]:
        results = list(encoded(pool, chunks))
        inner, last = results[:-1], results[-1:]
        yield from (inner[::-1] if pool._max_workers > 1 else inner)
        yield from last

    with replaced((pipeline, "_encoded", wrong)):
        yield


def spread() -> None:
    """The rows of each step, whatever the number of ranks that share them."""
    documents = Documents.of([[i] * (2 + 5 * i % 11) for i in range(1, 60)])
    batches = PackedBatches(documents, rows=4, seq=16, seed=3)
    for step in range(5):
        for ranks in (2, 4):
            parts = [batches(step, rank, ranks) for rank in range(ranks)]
            for name, whole in batches(step).items():
                if not torch.equal(torch.cat([part[name] for part in parts]), whole):
                    raise LawError(f"{ranks} ranks: {name} of step {step} differs from that of one rank")


@case(
    "a data order that changes with the number of ranks",
    spread,
    says=[r"2 ranks: input_ids of step 0 differs from that of one rank"],
    reported=["allenai/OLMo#176"],
)
def by_rank() -> Generator[None]:
    """`PackedBatches` gives each rank every n-th row of an order of its own."""
    call = PackedBatches.__call__

    def wrong(self: PackedBatches, step: int, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
        each = -(-self.rows // ranks)
        return {name: value[rank::ranks][:each] for name, value in call(self, step).items()}

    with replaced((PackedBatches, "__call__", wrong)):
        yield
