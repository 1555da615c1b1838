"""Work that ranks do together: all succeed, or all raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from xtf.checkpoint.folder import CheckpointError
from xtf.collectives import Axis

T = TypeVar("T")


def together(everyone: Axis | None, device: torch.device, what: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
    """Do something on every rank, and end on all of them in the same way. It is a barrier.

    Args:
        everyone: all ranks; ``None`` for one.
        device: where collectives run.
        what: the beginning of the error on ranks where nothing failed.
        work: gives this rank's own result, and a JSON value to tell the others.

    Returns:
        This rank's result, and what each rank told.

    Raises:
        CheckpointError: on ranks that did not fail, if others did; it says which and why.
        BaseException: what ``work`` raised, on the rank where it did.
    """
    own: list[T] = []
    error: BaseException | None = None
    try:
        result, told = work()
        own.append(result)
        said = {"told": told}
    except BaseException as problem:
        error, said = problem, {"error": f"{type(problem).__name__}: {problem}"}
    answers = _exchange(everyone, device, said)
    if error is not None:
        raise error
    failed = [f"rank {rank} failed: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        raise CheckpointError(f"{what}: {'; '.join(failed[:3])}{f'; and {len(failed) - 3} more' if len(failed) > 3 else ''}")
    return own[0], [answer["told"] for answer in answers]


def _exchange(everyone: Axis | None, device: torch.device, value: Any) -> list[Any]:
    """The JSON value of each rank."""
    if everyone is None:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    gathered = everyone.start_all_gather(size, [1] * everyone.size, label="checkpoint").wait()
    sizes = [int(n) for n in gathered]
    flat = everyone.start_all_gather(data, sizes, label="checkpoint").wait().cpu()
    return [json.loads(part.numpy().tobytes()) for part in torch.split(flat, sizes)]
