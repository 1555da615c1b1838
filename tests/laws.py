"""What the tests of laws share: cases (a layout, a model, a batch, transforms in some order) and covers of them.

A cover holds every pair of values of two factors in some case, so that few cases try every pairwise interaction; ``-m full`` runs
products of the factors that a transform is about, with values of the others drawn for each case (`crossed`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from xtf import optim, testing
from xtf.mesh import Mesh
from xtf.model import Model
from xtf.models import from_hf, qwen3_moe
from xtf.step import compose
from xtf.transforms import accumulate, chunk_loss, context_parallel, expert_parallel, shard


@dataclass(frozen=True)
class Case:
    """One law. ``sizes`` are those of the mesh; the axis ``replicate`` holds replicas, all others are sharded over, if ``sharded``.
    The ranks of ``context`` share sequences. With a ``dispatcher`` experts are spread over the axis ``expert``, without such an axis over
    ``context``."""

    sizes: tuple[tuple[str, int], ...] = ()
    model: str = "llama"
    batch: str = "documents"
    regather: bool = True
    chunk: int | None = None
    micros: int | None = None
    order: int = 0
    optimizer: str = "adamw"
    sharded: bool = True
    dispatcher: str | None = None
    overlap: int = 1

    def __str__(self) -> str:
        on = "x".join(f"{name}{n}" for name, n in self.sizes) or "one"
        said = [on, self.model, self.batch]
        said += ["keep"] if not self.regather else []
        said += [f"chunk{self.chunk}"] if self.chunk else []
        said += [f"micros{self.micros}"] if self.micros else []
        said += ["whole"] if not self.sharded else []
        said += [f"{self.dispatcher}{self.overlap}"] if self.dispatcher else []
        return "-".join([*said, f"order{self.order}", self.optimizer])

    def transform(self, mesh: Mesh | None) -> testing.Transform:
        """The transforms of this case in its order, on this rank."""
        parts: list[testing.Transform] = []
        if mesh is not None and self.dispatcher is not None:
            spread = mesh["expert" if "expert" in mesh.sizes else "context"]
            parts.append(expert_parallel(spread, overlap=self.overlap, dispatcher=self.dispatcher))
        if mesh is not None and "context" in mesh.sizes:
            parts.append(context_parallel(mesh["context"]))
        if mesh is not None and self.sharded:
            axes = [mesh[name] for name in mesh if name != "replicate"]
            parts.append(shard(*axes, replicate=mesh["replicate"] if "replicate" in mesh.sizes else None, regather=self.regather))
        parts += [chunk_loss(tokens=self.chunk)] if self.chunk else []
        parts += [accumulate(self.micros)] if self.micros else []
        orders = list(itertools.permutations(parts))
        return compose(*orders[self.order % len(orders)])

    def check(self) -> testing.Report:
        """Check it on simulated ranks."""
        transform = self.transform if self.sizes else self.transform(None)
        sizes: dict[str, Any] = dict(self.sizes)
        (report,) = testing.check(transform, **self._what(), **sizes)
        return report

    def observe(self, mesh: Mesh) -> testing.Observation:
        """What this rank, of whatever kind, sees."""
        what = self._what()
        return testing.observe(mesh, self.transform(mesh), what["model"], what["batch"], what["optimizer"], 0)

    def compare(self, seen: Sequence[testing.Observation]) -> testing.Report:
        """Judge what ranks saw."""
        return testing.compare(str(self), seen, **self._what(), seed=0, tolerance=1e-12)

    def _what(self) -> dict[str, Any]:
        return {"model": model(self.model), "batch": batch(self.batch), "optimizer": OPTIMIZERS[self.optimizer]()}


def case(**fields: Any) -> Case:
    """A case from factors; ``layout`` is a dict of sizes."""
    layout = fields.pop("layout", {})
    return Case(sizes=tuple(layout.items()), **fields)


def observe(mesh: Mesh, case: Case) -> testing.Observation:
    """`Case.observe` as a function that workers can be sent."""
    return case.observe(mesh)


def product(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(factors, row, strict=True)) for row in itertools.product(*factors.values())]


def crossed(every: Mapping[str, Sequence[Any]], **others: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of some factors; the values of the others are drawn for each, the same at every call."""
    draw = random.Random(0)
    return [row | {name: draw.choice(list(values)) for name, values in others.items()} for row in product(**every)]


def _muon() -> optim.Optimizer:
    # In float64, as all of a law. eps of its AdamW as in xtf.testing.default_optimizer.
    return optim.chain(optim.clip_by_global_norm(0.1), optim.muon_adamw(lr=1e-2, ns_dtype=torch.float64, eps=1e-3, weight_decay=0.1))


OPTIMIZERS: Mapping[str, Callable[[], optim.Optimizer]] = {"adamw": testing.default_optimizer, "muon": _muon}

MODELS = ("llama", "qwen3", "qwen3_moe", "moe_step", "moe_pooled", "deepseek_v3")
"""What `model` knows besides ``"tiny"``, which is for many ranks and many cases: every leaf has fewer rows than 8 ranks need."""


TINY = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}

TINY_MOE = TINY | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 3,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.1,
}


@cache
def model(name: str) -> Model:
    """A small float64 model: tied llama, qwen3 with z-loss, qwen3_moe by each scope of its auxiliary loss."""
    small = testing.small_models()
    if name in small:
        return small[name]
    if name == "tiny":
        return from_hf(TINY, dtype=torch.float64, z_loss=0.02)
    if name == "tiny_moe":
        return from_hf(TINY_MOE, dtype=torch.float64, router_z_loss=0.02)
    config = small["qwen3_moe"].config
    aux = {"moe_step": "step", "moe_pooled": "pooled"}[name]
    return qwen3_moe(config, dtype=torch.float64, z_loss=0.01, router_z_loss=0.01, aux=aux)  # pyright: ignore[reportArgumentType]


BATCHES = ("documents", "plain", "one_rank", "ignored", "row", "token", "weights")

ALL_BATCHES = (*BATCHES, "lengths", "few")
"""Also those that are about sequences."""


def batch(name: str) -> dict[str, Tensor]:
    """A global batch of the small models' vocabulary.

    ``documents``: packed, weighted, unequal, a row without targets. ``plain``: ids and labels only. ``one_rank``: all labels in
    the first row, so that all ranks but one have none. ``ignored``: no label at all. ``row``:
    one row. ``token``: one token, which is no target. ``weights``: weights that differ by a thousand, some 0. ``lengths``: two rows of
    documents of 1 to 23 tokens, the last of one of them padding. ``few``: one row of three tokens.
    """
    whole = testing.random_batch(61)
    ids = {"input_ids": whole["input_ids"]}
    match name:
        case "documents":
            return whole
        case "plain":
            return ids | {"labels": whole["input_ids"]}
        case "one_rank":
            labels = torch.full_like(ids["input_ids"], -100)
            labels[0] = ids["input_ids"][0]
            return ids | {"labels": labels}
        case "ignored":
            return whole | {"labels": torch.full_like(whole["labels"], -100)}
        case "row":
            return {key: value[:1] for key, value in whole.items()}
        case "token":
            return {key: value[:1, :1] for key, value in whole.items()}
        case "weights":
            scale = torch.tensor([1e3, 1.0, 0.0, 1e-3, 1.0], dtype=torch.float64)
            return ids | {"labels": whole["labels"], "loss_weights": whole["loss_weights"] * scale[:, None]}
        case "lengths":
            generator = torch.Generator().manual_seed(1)
            found = torch.randint(61, (2, 41), generator=generator)
            rows = [[i for i, n in enumerate(lengths) for _ in range(n)] for lengths in ((1, 1, 23, 2, 5, 1, 8), (17, 1, 3, 9, 11))]
            documents = torch.tensor(rows)
            documents[1, 30:] = -1
            return {"input_ids": found, "labels": found.masked_fill(documents < 0, -100), "document_ids": documents}
        case "few":
            return {key: value[:1, :3] for key, value in whole.items()}
        case _:
            raise ValueError(f"no batch {name!r}")


def pairwise(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Few rows in which every pair of values of two factors stands together in some row. Greedy, the same at every call."""
    names = list(factors)
    left = {(a, i, b, j) for a, b in itertools.combinations(names, 2) for i in range(len(factors[a])) for j in range(len(factors[b]))}
    rows: list[dict[str, Any]] = []
    while left:
        a, i, b, j = min(left, key=lambda pair: (names.index(pair[0]), pair[1], names.index(pair[2]), pair[3]))
        chosen = {a: i, b: j}
        for name in names:
            if name not in chosen:
                # The value that covers most of what is left, ties to the least used, then the first.
                used = [sum(row[name] is v for row in rows) for v in factors[name]]
                new = [_covered(left, names, chosen, name, at) for at in range(len(factors[name]))]
                chosen[name] = min(range(len(new)), key=lambda at: (-new[at], used[at], at))
        left -= {(x, chosen[x], y, chosen[y]) for x, y in itertools.combinations(names, 2)}
        rows.append({name: factors[name][at] for name, at in chosen.items()})
    return [{name: row[name] for name in names} for row in rows]


def _covered(left: set[tuple[str, int, str, int]], names: list[str], chosen: dict[str, int], name: str, at: int) -> int:
    count = 0
    for other, there in chosen.items():
        first = names.index(other) < names.index(name)
        count += ((other, there, name, at) if first else (name, at, other, there)) in left
    return count
