"""Memory: what there is, what is in use, and what a training step will take, before anything is allocated."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path as FilePath

import torch
from torch import Tensor

from xtf import tree
from xtf.ops.cpu import CPU
from xtf.run.flops import meta_constants
from xtf.run.rehearsal import rehearse
from xtf.stage import Exchange, Program, Stage
from xtf.step import TrainStep
from xtf.tree import Path, Tree

BYTES_PER_PARAMETER = 4 * 4
"""float32: the parameter, its gradient, and AdamW's two moments."""


def available_memory() -> int | None:
    """Bytes that can still be allocated on this machine, within the limit of a container; ``None`` where it does not say."""
    found = [_meminfo(), _container()]
    return min((n for n in found if n is not None), default=_physical())


def check_fits(parameters: int, available: int | None, name: str) -> None:
    """Refuse a model whose parameters, gradients and AdamW state do not fit.

    Args:
        parameters: how many.
        available: bytes; ``None`` for not known, which refuses nothing.
        name: what asked for it.

    Raises:
        ValueError: with what is needed and what there is.

    Example:
        >>> check_fits(8_030_261_248, 24 * 10**9, "--preset llama-3.1-8b")
        Traceback (most recent call last):
        ValueError: --preset llama-3.1-8b needs 128.5 GB for 8.03 B parameters, gradients and AdamW's state in float32, ...
    """
    needed = parameters * BYTES_PER_PARAMETER
    if available is not None and needed > available:
        raise ValueError(
            f"{name} needs {needed / 1e9:.1f} GB for {count(parameters)} parameters, gradients and AdamW's state in float32, and this "
            f"machine has {available / 1e9:.1f} GB available: take a smaller one"
        )


def used_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that this process uses: on a GPU the most that its tensors had at once so far, on the CPU its resident set now.

    0 where the system does not say.

    Example:
        >>> used_memory("cpu") > 1e6
        True
    """
    device = torch.device(device)
    if device.type != "cpu":
        peak = getattr(getattr(torch, device.type, None), "max_memory_allocated", None)
        return 0 if peak is None else int(peak(device))
    try:
        return int(FilePath("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _most_resident()


def _most_resident() -> int:
    """The largest resident set so far, on systems that have no ``/proc``."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def count(parameters: int) -> str:
    """A number of parameters as people say it.

    Example:
        >>> count(8_030_261_248), count(134_515_008), count(900)
        ('8.03 B', '134.5 M', '900')
    """
    for scale, digits, sign in ((10**9, 2, "B"), (10**6, 1, "M")):
        if parameters >= scale:
            return f"{parameters / scale:.{digits}f} {sign}"
    return f"{parameters:,}"


def _meminfo() -> int | None:
    """``MemAvailable`` of Linux: free memory, and what can be freed without swapping."""
    try:
        lines = FilePath("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container() -> int | None:
    """The limit of a container (cgroup v2) less what it uses."""
    try:
        limit, used = (FilePath("/sys/fs/cgroup", name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(int(limit) - int(used), 0)


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


# What a step takes --------------------------------------------------------------------------------------------------------------


def estimate(step: TrainStep, tokens: int, *, micro_batches: int = 1) -> dict[str, int]:
    """Bytes that a training step takes on this rank, by kind, without allocating them.

    Each stage runs once, forward and backward, on tensors without values, and what is alive is counted. Not seen are what a kernel
    has for itself, the optimizer's temporaries, what the allocator wastes, and what an `xtf.stage.Exchange` moves. A compiling
    backend fuses, and takes less than is estimated.

    Args:
        step: the finished step.
        tokens: of one micro-batch of this rank, padding included.
        micro_batches: how many this rank makes of its batch; with several, gradients are there from the first on.

    Returns:
        ``parameters``, ``gradients``, ``optimizer``: exact. ``batch``: ids, positions and rotary tables of a micro-batch.
        ``activations``: what all stages together keep for their backward. ``gathered``: whole parameters of two stages and the
        gradients under way in a reduction, where parameters are sharded or cast. ``logits``: what the loss stage has at once, whole
        or a chunk, with the gradients that it makes. ``stage``: what the largest other stage has at once, with its gradients.
        ``update``: updates and new copies of parameters and optimizer state, where the step does not donate.
        ``peak``: the most at any moment, which is less than the sum of all: they are not there together.

    Raises:
        ValueError: for ``tokens`` or ``micro_batches`` below 1.

    Example:
        >>> import xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> found = estimate(step, 1024)
        >>> found["parameters"] == 4 * step.model.param_count()[0], found["optimizer"] // found["parameters"]
        (True, 2)
    """
    for name, value in {"tokens": tokens, "micro_batches": micro_batches}.items():
        if value < 1:
            raise ValueError(f"estimate: {name} is {value}, expected at least 1")
    local = {path: torch.empty(at.shape(), dtype=step.specs[path].dtype, device="meta") for path, at in step.placements.items()}
    trained = frozenset(path for path, spec in step.specs.items() if spec.trainable)
    of_model = tree.from_items(step.model.specs, {path: leaf if path in trained else None for path, leaf in local.items()})
    parameters, optimizer = _bytes(local), _bytes(step.optimizer.init(of_model, step.placed()))
    consts = meta_constants(step.model, tokens)
    dtypes = {path: step.precision.compute or spec.dtype for path, spec in step.specs.items()}
    whole = {path: torch.empty(spec.shape, dtype=dtypes[path], device="meta") for path, spec in step.specs.items()}
    rehearsal = rehearse(_without_exchanges(step), whole, consts, trained)
    kept = _gradients(step, {path: local[path] for path in trained}, rehearsal.gradients)
    gradients, gathered, batch = sum(kept.values()), _gathered(step, dtypes), _bytes(consts)
    complete = gradients if micro_batches > 1 else 0
    most = rehearsal.forward + complete
    for moment in rehearsal.backward:
        # experts that other ranks own get no gradients here
        foreign = sum((whole[path].numel() - _owned(step, path)) * whole[path].element_size() for path in moment.makes)
        most = max(most, moment.bytes - foreign + complete)
        complete = min(gradients, complete + sum(kept[path] for path in moment.completes))
    update = 0 if step.compilation.donate else parameters + gradients + optimizer
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "batch": batch,
        "activations": rehearsal.activations,
        "gathered": gathered,
        "logits": rehearsal.loss,
        "stage": rehearsal.stage,
        "update": update,
        "peak": parameters + optimizer + max(batch + gathered + most, gradients + update),
    }


def _bytes(value: Tree) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(value) if isinstance(leaf, Tensor))


def _owned(step: TrainStep, path: Path) -> int:
    """Elements of a leaf that this rank's stages compute with."""
    return torch.Size(step.placements[path].shape(owned_only=True)).numel()


def _without_exchanges(step: TrainStep) -> Program:
    """The step's program before transfers are declared. A rewrite that puts exchanges into it is left out: they need ranks."""
    step, program = dataclasses.replace(step, ops=CPU), step.model.build(CPU)
    for rewrite in step.rewrites:
        rewritten = rewrite(step, program)
        program = program if any(isinstance(node, Exchange) for node in rewritten) else rewritten
    return program


def _gradients(step: TrainStep, trained: Mapping[Path, Tensor], made: Mapping[Path, torch.dtype]) -> dict[Path, int]:
    """Bytes of each gradient that this rank keeps: in the dtype that a reduction leaves, or as its stage makes it."""
    reduced = {path for node in step.program if isinstance(node, Stage) and node.reduce is not None for path in node.params.values()}
    found: dict[Path, int] = {}
    for path, leaf in trained.items():
        left = torch.promote_types(step.precision.reduce or leaf.dtype, leaf.dtype)
        found[path] = leaf.numel() * (left if path in reduced else made[path]).itemsize
    return found


def _gathered(step: TrainStep, dtypes: Mapping[Path, torch.dtype]) -> int:
    """Bytes of whole leaves: of two stages in a row, or of all where they are not gathered again; once more of the one that
    arrives, while it is put together; and of the flat gradients of a stage that is being reduced."""
    whole, arriving, reducing = list[int](), 0, 0
    for node in step.program:
        if isinstance(node, Stage) and node.gather is not None:
            sizes = {path: _owned(step, path) for path in node.params.values()}
            split = [path for path in sizes if step.placements[path].gathered is not None]
            cast = [path for path in sizes if path in split or dtypes[path] != step.specs[path].dtype]
            whole.append(sum(sizes[path] * dtypes[path].itemsize for path in cast))
            arriving = max(arriving, sum(sizes[path] * dtypes[path].itemsize for path in split))
            reducing = max(reducing, sum(sizes[path] * (step.precision.reduce or step.specs[path].dtype).itemsize for path in split))
    both = max((a + b for a, b in pairwise(whole)), default=sum(whole))
    return (both if step.sharding.regather else sum(whole)) + arriving + reducing
