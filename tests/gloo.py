"""Real ranks for tests: worker processes that speak gloo, started once and kept.

``run(fn, *args, ranks=2, data=2)`` calls ``fn(mesh, *args)`` on that many workers. ``fn`` is a module-level function; arguments and
results are pickled. The pool ends with this process, however that ends.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from xtf.mesh import Mesh, mesh
from xtf.testing.real_ranks import end_with_parent, report

WORKERS = 4
TIMEOUT = 60.0  # seconds a call may take, starting the workers included
GRACE = 5.0  # seconds the other ranks have to end when one has raised


def run(fn: Callable[..., Any], *args: Any, ranks: int, **sizes: int) -> list[Any]:
    """``fn(mesh, *args)`` on ``ranks`` workers with a mesh of ``sizes``; the results in rank order.

    Raises:
        ValueError: for more ranks than workers.
        Exception: the first that a worker raised, with its traceback as a note.
        TimeoutError: if the call took longer than `TIMEOUT`.
        RuntimeError: if a worker died.
    """
    if not 1 <= ranks <= WORKERS:
        raise ValueError(f"ranks must be 1 to {WORKERS}, got {ranks}")
    return _pool.run(fn, args, ranks, sizes)


class _Pool:
    """The workers, and the world they form: it is made anew when its size changes or a call has failed."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.store: Any = None
        self.world = (0, 0)  # a number that is never used again, and the size

    def start(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # A fresh process imports torch once and forks the workers: four times as quick as four fresh processes.
        context, before = multiprocessing.get_context("forkserver"), os.environ.get("OMP_NUM_THREADS")
        context.set_forkserver_preload(["pytest", "torch.distributed", "torch._dynamo", "xtf.mesh"])  # torch.func imports _dynamo
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for rank in range(WORKERS):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, self.store.port, rank), daemon=True, name=f"gloo worker {rank}")
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()
        self.processes, self.pipes, self.store = [], [], None

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], ranks: int, sizes: dict[str, int]) -> list[Any]:
        job = pickle.dumps((fn, args, sizes))
        if not self.processes or not all(process.is_alive() for process in self.processes):
            self.stop()
            self.start()
        if self.world[1] != ranks:
            self.world = (self.world[0] + 1, ranks)
        try:
            results, error = self._collect(pickle.dumps((self.world, list(sys.path), job)), ranks)
        except BaseException:
            self.stop()
            raise
        if error is not None:
            self.world = (self.world[0] + 1, 0)
            if len(results) < ranks:  # some worker still waits for the one that raised
                self.stop()
            raise error
        return [results[rank] for rank in range(ranks)]

    def _collect(self, message: bytes, ranks: int) -> tuple[dict[int, Any], BaseException | None]:
        """What each rank returned (or raised, if it reported at all), and the first exception."""
        deadline, error = time.monotonic() + TIMEOUT, None
        waiting, results = {self.pipes[rank]: rank for rank in range(ranks)}, dict[int, Any]()
        for pipe in waiting:
            pipe.send_bytes(message)
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if error is not None:
                    break
                raise TimeoutError(f"gloo ranks {sorted(waiting.values())} of {ranks} did not answer within {TIMEOUT} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    raise error or RuntimeError(f"gloo rank {rank} of {ranks} died") from None
                results[rank] = value
                if not ok and error is None:
                    error, deadline = value, min(deadline, time.monotonic() + GRACE)
        return results, error


_pool = _Pool()
atexit.register(_pool.stop)


def _work(pipe: Connection, port: int, rank: int) -> None:
    """What a worker process does: jobs, until the pipe ends."""
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    store = TCPStore("127.0.0.1", port)
    joined, meshes = (0, 0), dict[tuple[tuple[str, int], ...], Mesh]()
    while True:
        try:
            world, path, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            sys.path[:] = path
            fn, args, sizes = pickle.loads(job)
            if world != joined:
                meshes.clear()
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group("gloo", store=PrefixStore(str(world[0]), store), rank=rank, world_size=world[1])
                joined = world
            key = tuple(sizes.items())
            if key not in meshes:
                meshes[key] = mesh(**sizes)
            answer = pickle.dumps((True, fn(meshes[key], *args)))
        except BaseException as error:
            answer = report(error, rank)
        pipe.send_bytes(answer)
