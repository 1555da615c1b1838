"""Bytes that tensors hold on the CPU, counted at every allocation and release (not the process's resident size)."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(fn: Callable[[], Any]) -> int:
    """The most bytes that were allocated at once while ``fn`` ran on this thread, above what was when it began.

    From the profiler's memory events: each holds the change and the time. What ``fn`` returns counts, as it is alive at the end.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = fn()
    del kept
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    recorded: list[Any] = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(recorded) if e.name() == "[memory]")
    live = peak = 0
    for _, _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


class Live(TorchDispatchMode):
    """Bytes of the storages that operations of this thread made and that are still alive, now and at most.

    For simulated ranks, which are threads: the profiler sees one thread only. What an operation allocates for itself alone is not
    seen here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: Any) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


class Resident:
    """How far the process's resident memory rises while this is open, sampled every few milliseconds: for sizes in gigabytes."""

    def __init__(self) -> None:
        self.extra = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        process = psutil.Process()
        begin = process.memory_info().rss
        while not self._ended.wait(0.005):
            self.extra = max(self.extra, process.memory_info().rss - begin)

    def __enter__(self) -> Resident:
        gc.collect()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
