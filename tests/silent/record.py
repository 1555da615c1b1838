"""What a case of the suite is, and the models and batches that several cases share.

A case is one fault that users of other engines reported. Its ``check`` runs the real code and raises a `LawError` where the fault
is; its ``fault`` puts it in by hand, into the function of xtf that would carry it, and its docstring says how.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests import laws
from xtf import testing
from xtf.model import Model
from xtf.models import from_hf
from xtf.stage import Stage

Fault = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Case:
    """A fault that others shipped.

    Args:
        name: what went wrong, in a few words.
        reported: where: ``owner/repository#number``, issues and pull requests alike; none where the fault is only known by name.
        check: raises a `LawError` where the fault is.
        fault: the mutation.
        says: what the message must say (regular expressions): the quantity, the leaf, the factor.
        right: what it must not say is wrong: a fault that shows everywhere is not the one that was put in.
    """

    name: str
    reported: tuple[str, ...]
    check: Callable[[], object]
    fault: Fault
    says: tuple[str, ...]
    right: tuple[str, ...]

    @property
    def mutation(self) -> str:
        """What the fault's docstring says, on one line."""
        return " ".join((self.fault.__doc__ or "").split())

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []


def case(
    name: str, check: Callable[[], object], *, says: Sequence[str], right: Sequence[str] = (), reported: Sequence[str] = ()
) -> Callable[[Callable[[], Generator[None]]], Fault]:
    """Enter a mutation, a generator that puts it in, yields, and takes it out, into `CASES`."""

    def enter(fault: Callable[[], Generator[None]]) -> Fault:
        manager = contextmanager(fault)
        CASES.append(Case(name, tuple(reported), check, manager, tuple(says), tuple(right)))
        return manager

    return enter


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """``(module or class, name, another)``: attributes replaced."""
    with ExitStack() as stack:
        for where, name, another in changes:
            stack.enter_context(mock.patch.object(where, name, another))
        yield


# Models and batches --------------------------------------------------------------------------------------------------------------


def moe() -> Model:
    """Routers with an auxiliary loss."""
    return laws.model("qwen3_moe")


def latent() -> Model:
    """Routers with corrections that no gradient reaches."""
    return laws.model("deepseek_v3")


def tied() -> Model:
    """No experts; the head is the embedding."""
    return laws.model("llama")


@cache
def further() -> Model:
    """With a layer, number 2, that predicts the token after the next."""
    config = dict(laws.model("deepseek_v3").hf_config) | {"num_nextn_predict_layers": 1}
    return from_hf(config, dtype=torch.float64, mtp_loss=0.3, balance_loss=0.05)


@cache
def sinks() -> Model:
    """Attention with sinks, a leaf of one number for each head."""
    config = {
        "model_type": "gpt_oss", "vocab_size": 61, "hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3,
        "initializer_range": 0.3,
    }  # fmt: skip
    return from_hf(config, dtype=torch.float64)


def equal_rows(rows: int) -> dict[str, Tensor]:
    """The same row so often: where each rank has one, what misses a sum is a multiple of what is right."""
    return {name: value[:1].expand(rows, -1).contiguous() for name, value in laws.batch("plain").items()}


def not_finite_at(token: int, model: Model) -> Model:
    """A model whose loss is infinite where this token is a target."""

    def build(ops: Any) -> tuple[Stage, ...]:
        *stages, loss = model.build(ops)

        def fn(params: Any, *reads: Any, targets: Any, **consts: Any) -> Any:
            bad = torch.where((targets == token).any(), torch.inf, 1.0)
            return tuple(out * bad for out in loss.fn(params, *reads, targets=targets, **consts))

        return *stages, dataclasses.replace(loss, fn=fn, key=(loss.key, "not finite at", token))

    return dataclasses.replace(model, build=build)


def poisoned(token: int) -> list[dict[str, Tensor]]:
    """Three batches, the second with this token, the others without."""
    batches = [testing.random_batch(61, seed=seed) for seed in range(3)]
    for batch in batches:
        batch["labels"][batch["labels"] == token] = 0
    batches[1]["labels"][3, 5:] = token
    return batches
