"""Real ranks for `xtf.testing.check`: processes of this machine that speak gloo, made for one call."""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from xtf.mesh import mesh

MOST_RANKS = 64
_START = 120.0  # seconds in which every process has begun and imported torch
_GRACE = 5.0  # seconds the other ranks have to end when one has raised
_LINES = 12  # of what a rank that hangs was doing

_HOW = (
    "other processes import what they are sent by name, so give functions of a module (no lambdas or functions inside functions; in a "
    "notebook write them to a file), and for what holds functions itself, a model or an optimizer, a function that makes it, as "
    'functools.partial(xtf.testing.small_model, "llama")'
)


def on_real_ranks(fn: Callable[..., Any], given: Mapping[str, Any], *, timeout: float, sizes: Mapping[str, int]) -> list[Any]:
    """``fn(mesh, **given)`` in as many new processes as the mesh has ranks; the results in rank order.

    Args:
        fn: a function of a module.
        given: what it takes; each is pickled, and so is what ``fn`` returns.
        timeout: seconds for ``fn``, once all processes have started.
        sizes: of the mesh.

    Raises:
        ValueError: for what cannot be sent, by its name, or sizes that are not possible.
        TimeoutError: naming the ranks that had not answered, and where each stood.
        RuntimeError: naming a rank that died.
        Exception: what the first rank raised that did, with its traceback as a note.
    """
    ranks = _count(sizes)
    job = _pickled(fn, given, sizes)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    path = [entry or os.getcwd() for entry in sys.path]
    processes, pipes = list[Any](), list[Connection]()
    with tempfile.TemporaryDirectory() as folder:
        stands = [Path(folder, f"rank-{rank}") for rank in range(ranks)]
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                args = (theirs, store.port, rank, ranks, path, timeout, str(stands[rank]), job)
                process: Any = context.Process(target=_work, args=args, daemon=True, name=f"xtf rank {rank}")
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(processes, pipes, stands, timeout)
        finally:
            for process in processes:
                process.kill()
            for process, pipe in zip(processes, pipes, strict=True):
                process.join()
                pipe.close()


def _count(sizes: Mapping[str, int]) -> int:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"the size of axis {name!r} must be 1 or more, got {size!r}: give a whole number, as {name}=2")
    ranks = math.prod(sizes.values())
    if not sizes or ranks > MOST_RANKS:
        raise ValueError(
            f"{dict(sizes)} are {ranks} ranks, each a process of this machine: give a mesh of 1 to {MOST_RANKS}, as data=2, or "
            'ranks="simulated"'
        )
    return ranks


def _pickled(fn: Callable[..., Any], given: Mapping[str, Any], sizes: Mapping[str, int]) -> bytes:
    """What is sent, each part by itself: one that cannot be sent is named here, one that the others cannot take is named there."""
    parts: dict[str, bytes] = {}
    for name, value in given.items():
        try:
            parts[name] = pickle.dumps(value)
        except Exception as error:
            raise ValueError(f"the {name} cannot be sent to other processes ({error}): {_HOW}") from None
    return pickle.dumps((fn, parts, dict(sizes)))


def _collect(processes: list[Any], pipes: list[Connection], stands: list[Path], timeout: float) -> list[Any]:
    for _ in _answers(processes, pipes, stands, _START):
        pass  # all have imported what they need
    results, errors = dict[int, Any](), list[BaseException]()
    for rank, answer in _answers(processes, pipes, stands, timeout, errors):
        ok, results[rank] = pickle.loads(answer)
        errors += [] if ok else [results[rank]]
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(pipes))]


def _answers(
    processes: list[Any],
    pipes: list[Connection],
    stands: list[Path],
    timeout: float,
    errors: Sequence[BaseException] = (),
) -> Iterator[tuple[int, bytes]]:
    """One answer of each rank, as they come. When there are ``errors``, which grow as answers are read, the others have a few seconds."""
    waiting, deadline, graced = {pipe: rank for rank, pipe in enumerate(pipes)}, time.monotonic() + timeout, False
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise errors[0] if errors else TimeoutError(_hung(sorted(waiting.values()), processes, stands, timeout))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answer = pipe.recv_bytes()
            except (EOFError, ConnectionError):
                processes[rank].join(_GRACE)
                died = RuntimeError(
                    f"rank {rank} of {len(pipes)} died with exit code {processes[rank].exitcode} before it answered; see what it wrote. "
                    'A script that starts processes needs if __name__ == "__main__": around what starts them'
                )
                raise errors[0] if errors else died from None
            yield rank, answer
        if errors and not graced:
            deadline, graced = min(deadline, time.monotonic() + _GRACE), True


def _hung(ranks: list[int], processes: list[Any], stands: list[Path], timeout: float) -> str:
    for rank in ranks:
        os.kill(processes[rank].pid, signal.SIGUSR1)  # faulthandler writes where it stands
    time.sleep(0.5)
    said = [f"ranks {ranks} of {len(stands)} did not answer within {timeout:g} s"]
    if others := sorted(set(range(len(stands))) - set(ranks)):
        said.append(f"ranks {others} did: these wait for a collective that those never joined, or are slower")
    for rank in ranks:
        lines = stands[rank].read_text().splitlines()[:_LINES] if stands[rank].exists() else ["  not started"]
        said += [f"rank {rank} stands at", *(f"  {line.strip()}" for line in lines)]
    return "\n".join(said)


# In the processes ------------------------------------------------------------------------------------------------------------------


def _work(pipe: Connection, port: int, rank: int, ranks: int, path: list[str], timeout: float, stand: str, job: bytes) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    with open(stand, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        pipe.send_bytes(b"begun")
        try:
            fn, parts, sizes = pickle.loads(job)
            given = {name: _unpickled(name, part) for name, part in parts.items()}
            store = PrefixStore("xtf", TCPStore("127.0.0.1", port))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=max(timeout, 1.0)))
            answer = pickle.dumps((True, fn(mesh(**sizes), **given)))
        except BaseException as error:
            answer = report(error, rank)
        pipe.send_bytes(answer)
        pipe.recv_bytes()  # until it is killed: another rank may still be connected to this one


def _unpickled(name: str, part: bytes) -> Any:
    try:
        return pickle.loads(part)
    except Exception as error:
        raise ValueError(
            f"the {name} was sent to other processes, which cannot load it ({type(error).__name__}: {error}): {_HOW}"
        ) from None


def report(error: BaseException, rank: int) -> bytes:
    """The answer of a rank that raised, pickled: the error with its traceback as a note, or the text alone where it cannot be sent."""
    text = f"on rank {rank}:\n{''.join(traceback.format_exception(error))}"
    error.add_note(text)
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
    except Exception:
        return pickle.dumps((False, RuntimeError(text)))
    return answer


def end_with_parent() -> None:
    """A thread's work: end this process when the one that started it has ended, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
