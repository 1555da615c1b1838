"""Who is timed: the contenders by name, each a function that makes a training step of a workload."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol

from xtf.bench.workload import Workload


class Taken(NamedTuple):
    """What one step took: seconds in all, seconds of these after the gradients (clipping, update), and its loss."""

    seconds: float
    update_seconds: float
    loss: float


class Contender(Protocol):
    """A training step that is ready to run, with its state."""

    def __call__(self) -> Taken:
        """Make one step and wait until it is done."""
        ...


class Entry(NamedTuple):
    """One row of the benchmark.

    Args:
        name: what the row is called.
        library: a key of `LIBRARIES`.
        backend: ``"eager"`` or a compiler of the library; of xtf with ``":step"`` behind it for a step that is one graph.
        transforms: of xtf, as in ``xtf train --transforms``.
    """

    name: str
    library: str
    backend: str
    transforms: str = ""


class _Library(NamedTuple):
    module: str
    needs: str  # the package that must be installed
    backends: tuple[str, ...]


LIBRARIES: dict[str, _Library] = {
    "xtf": _Library("xtf.bench.own", "torch", ("eager", "aot_eager", "inductor", "inductor:step")),
    "transformers": _Library("xtf.bench.hugging_face", "transformers", ("eager", "inductor")),
    "torchtitan": _Library("xtf.bench.titan", "torchtitan", ("eager",)),
    "jax": _Library("xtf.bench.jax_peer", "jax", ("blocks", "ragged_dot")),
}
"""What can be timed: ``open(workload, entry) -> Contender`` of each module makes it."""


def open_contender(workload: Workload, entry: Entry) -> Contender:
    """The contender of an entry, its first step not yet made."""
    make: Callable[[Workload, Entry], Contender] = import_module(LIBRARIES[entry.library].module).open_contender
    return make(workload, entry)


def check_entries(entries: list[Entry]) -> list[Entry]:
    """The entries, known to be possible.

    Raises:
        ValueError: for none, an unknown library or backend, one that is not installed, or two of one name.
    """
    if not entries:
        raise ValueError("nothing to time: give --backend, or --against")
    for entry in entries:
        if entry.library not in LIBRARIES:
            raise ValueError(f"--against {entry.library}: expected one of {', '.join(name for name in LIBRARIES if name != 'xtf')}")
        library = LIBRARIES[entry.library]
        if find_spec(library.needs) is None:
            raise ValueError(f"--against {entry.library}: the package {library.needs} is not installed; pip install {library.needs}")
        if entry.backend not in library.backends:
            raise ValueError(f"{entry.library} has no backend {entry.backend!r}; expected one of {', '.join(library.backends)}")
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError(f"given twice: {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
    return entries
