"""Compile: lower every distinct stage of a step for one backend, once."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx
from torch._dynamo import utils as dynamo_utils
from torch._functorch import config as functorch_config

from xtf import tree
from xtf.backends import backend_of
from xtf.batch import PER_DOCUMENT
from xtf.deterministic import check_device
from xtf.stage import Lower, Rows
from xtf.step import Compilation, TrainStep, eager
from xtf.whole_step import LowerGraph, check, whole_step

Backend = Literal["inductor", "aot_eager", "eager"]
Unit = Literal["stage", "step"]
_BACKENDS = ("inductor", "aot_eager", "eager")


def compile(
    step: TrainStep,
    *,
    backend: Backend = "inductor",
    unit: Unit = "stage",
    donate: bool = False,
    deterministic: bool = False,
) -> TrainStep:
    """Lower a finished step.

    Each distinct stage (equal `xtf.stage.Stage.key`) is compiled once in a process and used by all layers, and by all simulated
    ranks, alike; it is one graph without breaks. Transfers and collectives stay with the walk, between stages.

    Args:
        step: the step, with all its transforms.
        backend: ``"inductor"`` generates code; ``"aot_eager"`` traces and runs torch's own kernels (to tell a tracing problem from a
            code generation one); ``"eager"`` compiles nothing.
        unit: what is compiled at a time.
        donate: let the step reuse the memory of the state it is given; reading that state afterwards raises. Peak memory then
            holds one copy of parameters and optimizer state. Tensors taken out of a state before it was donated are
            overwritten: clone what is to be kept.
        deterministic: let torch use only algorithms that give the same bits every time (``torch.use_deterministic_algorithms``), while the
            step runs; what it was set to before is set again. A run then gives the same bits as another on the same layout and kind of
            device, with as many threads. An operation that has no such algorithm raises RuntimeError.

    Raises:
        ValueError: for an unknown backend or unit, a step that is compiled already, or ``deterministic`` on CUDA without the environment
            variable CUBLAS_WORKSPACE_CONFIG.

    Example:
        >>> import xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> xtf.compile(step, backend="eager", donate=True).compilation.donate
        True
    """
    if not isinstance(step, TrainStep):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"compile takes a TrainStep, got {type(step).__name__}: make one with xtf.train_step(model, optimizer)")
    if backend not in _BACKENDS:
        raise ValueError(f"compile(backend={backend!r}): expected one of {', '.join(map(repr, _BACKENDS))}")
    if unit not in ("stage", "step"):
        raise ValueError(f"compile(unit={unit!r}): expected 'stage' or 'step'")
    for name, value in (("donate", donate), ("deterministic", deterministic)):
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"compile({name}={value!r}): expected True or False")
    if step.compilation.done:
        raise ValueError(f"compile: the step is already compiled for {step.compilation.backend!r}; compile the step it was made from")
    if deterministic:
        check_device(step.device)
    options = backend_of(step.device).inductor
    if unit == "stage":
        lower = lowering(backend, options, deterministic=deterministic)
        return dataclasses.replace(step, compilation=Compilation(backend, lower, donate, deterministic))
    check(step)
    whole = functools.partial(whole_step, lower=graph_lowering(backend, options))
    return dataclasses.replace(step, compilation=Compilation(backend, eager, donate, deterministic, whole))


def graph_lowering(backend: Backend, options: Mapping[str, Any] = types.MappingProxyType({})) -> LowerGraph:
    """The `xtf.whole_step.LowerGraph` of a backend, with inductor's options."""

    def lower(graph: fx.GraphModule, varies: Sequence[int]) -> Callable[..., Any]:
        if backend == "eager":
            return graph

        def whole_step(unused: None, *inputs: Tensor) -> Any:
            return graph(*inputs)

        compiled = _Compiled(whole_step, backend, False, options, "the step", varies)
        return functools.partial(compiled, None)

    return lower


def lowering(backend: Backend, options: Mapping[str, Any] = types.MappingProxyType({}), *, deterministic: bool = False) -> Lower:
    """The `Lower` of a backend: compiled functions are shared by everything in the process that has the same key.

    ``options`` are inductor's, see `xtf.backends.Backend`.
    """
    if backend == "eager":
        return eager

    def lower(fn: Callable[..., Any], key: Hashable) -> Callable[..., Any]:
        with _CACHE_LOCK:
            # The key alone would do if it always said everything; a transform that forgets to change it must not be given
            # another function's code.
            whole = (backend, deterministic, repr(options), key, fingerprint(fn))
            if whole not in _CACHE:
                _CACHE[whole] = _Compiled(fn, backend, isinstance(key, Rows), options, _said(key))
            return _CACHE[whole]

    return lower


class _Compiled:
    """A function compiled on its first call for each signature, by one thread at a time.

    Simulated ranks are threads, and racing first calls would each compile. A stage meets no other rank while it runs (exchanges
    stand between stages), so holding a lock over the first call cannot deadlock.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        backend: Backend,
        rows: bool,
        options: Mapping[str, Any],
        name: str,
        varies: Sequence[int] | None = None,
    ) -> None:
        fresh, given = _fresh(fn), dict(options) if backend == "inductor" else None
        self._fn = torch.compile(fresh, backend=backend, fullgraph=True, options=given)
        self._code, self._name = fresh.__code__, name
        self._rows, self._varies = rows, varies
        self._lock = threading.Lock()
        self._seen: set[Hashable] = set()
        self._compiled = 0

    def __call__(self, *args: Any, **consts: Any) -> Any:
        # args[0] are parameters. The number of documents differs from batch to batch: not a reason to compile again.
        dynamic: list[Tensor]
        if self._varies is not None:
            dynamic = [args[1 + at] for at in self._varies]
        else:
            dynamic = tree.leaves((args[1:], consts)) if self._rows else _by_document(args, consts)
        dynamic = [t for t in dynamic if isinstance(t, Tensor) and t.dim()]  # pyright: ignore[reportUnnecessaryIsInstance]
        for tensor in dynamic:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # pyright: ignore[reportPrivateUsage]
        any_size = {id(t) for t in dynamic if t.shape[0] > 1}  # torch gives 0 and 1 code of their own
        signature = tuple(_signature(leaf, id(leaf) in any_size) for leaf in tree.leaves((args, consts)))
        if signature in self._seen:
            out = self._fn(*args, **consts)
            if _entries(self._code) > self._compiled:
                self._report(expected=False)
            return out
        with self._lock, _patch(_CACHED):
            out = self._fn(*args, **consts)
            self._report(expected=len(any_size) < len(dynamic))
            self._seen.add(signature)
            return out

    def _report(self, *, expected: bool) -> None:
        """Say why it was compiled again, if it was."""
        entries = _entries(self._code)
        if self._compiled and entries > self._compiled and not expected:
            _LOG.warning("%s was compiled again: %s", self._name, _reason(self._code.co_name))
        self._compiled = max(self._compiled, entries)


def _entries(code: types.CodeType) -> int:
    """How often a code has been compiled, and is kept."""
    return len(cast(list[object], _entry_list(code)))


def _reason(name: str) -> str:
    """Why the function of this name that was compiled last had to be: what torch says."""
    metrics: list[Any] = dynamo_utils.get_compilation_metrics()
    reasons = [m.recompile_reason for m in reversed(metrics) if m.co_name == name and m.recompile_reason]
    return str(reasons[0]).strip() if reasons else "torch gives no reason"


def _by_document(args: tuple[Any, ...], consts: Mapping[str, Any]) -> list[Tensor]:
    """What has a first dim of documents, wherever a stage's forward or backward is given it: constants, and where a stage is given
    the documents' tokens, what it reads, keeps, or gets back of each document."""
    nested = (consts, *(cast(Mapping[str, Any], a) for a in args if isinstance(a, Mapping)))
    found: list[Tensor] = [constants[name] for constants in nested for name in PER_DOCUMENT if name in constants]
    counts = [constants["document_tokens"].shape[0] for constants in nested if "document_tokens" in constants]
    if counts:
        rest: list[Any] = tree.leaves((args[1:], consts))
        found += [t for t in rest if isinstance(t, Tensor) and t.dim() and t.shape[0] == counts[0]]
    return found


def _signature(leaf: object, any_size: bool) -> Hashable:
    return (leaf.shape[1:] if any_size else leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: Dynamo keeps its cache, and counts recompilations, per code object, and
    closures of one code (every stage's recomputation) would fill one another's."""
    assert isinstance(fn, types.FunctionType)
    copy = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def _said(key: Hashable) -> str:
    """A stage's key in a message: the words in it.

    Example:
        >>> _said((("qwen3_moe", 16, "attention"), "forward"))
        'qwen3_moe attention forward'
    """
    if isinstance(key, str):
        return key
    return " ".join(filter(None, map(_said, cast(tuple[Hashable, ...], key)))) if isinstance(key, tuple) else ""


def fingerprint(fn: Callable[..., Any]) -> Hashable:
    """What a function computes with besides its arguments: its code, and what its closure and its defaults hold, by value where
    that can be hashed and by identity where not. Functions with equal fingerprints are one function.

    Example:
        >>> make = lambda factor: lambda x: x * factor
        >>> fingerprint(make(2)) == fingerprint(make(2)), fingerprint(make(2)) == fingerprint(make(3))
        (True, False)
    """
    return _content(fn, frozenset())


def _content(value: object, within: frozenset[int]) -> Hashable:
    if isinstance(value, functools.partial):
        parts = cast(tuple[object, ...], (value.func, *value.args, *value.keywords.items()))
        return ("partial", *(_content(part, within) for part in parts))
    if isinstance(value, tuple):
        return ("tuple", *(_content(item, within) for item in cast(tuple[object, ...], value)))
    if not isinstance(value, types.FunctionType):
        try:
            return type(value), hash(value), cast(Hashable, value)
        except TypeError:
            return type(value), id(value)  # kept alive by the function, so no other object takes its place
    if id(value) in within:  # a function that calls itself
        return "itself"
    within |= {id(value)}
    if hasattr(value, "__wrapped__"):  # a decorator: what it closes over is made anew each time, what it wraps is what counts
        return value.__code__, _content(cast(object, getattr(value, "__wrapped__")), within)  # noqa: B009
    held = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items())
    return value.__code__, tuple(_content(item, within) for item in (*held, *defaults))


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


if torch.__version__.startswith(("2.11", "2.12")):
    # There, a process whose first fake tensors are made by another thread than the main one, as simulated ranks do when they compile,
    # crashes at later ones.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        pass

_patch: Any = functorch_config.patch  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_LOG = logging.getLogger(__name__)
_entry_list: Any = getattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list")  # noqa: B009  # pyright: ignore[reportPrivateUsage]
# What torch keeps on disk of a graph with an autograd.Function is off by default; ours compute of nothing but their arguments.
_CACHED: Any = {name: True for name in ("autograd_cache_allow_custom_autograd_functions",) if hasattr(functorch_config, name)}
_CACHE: dict[Hashable, _Compiled] = {}
_CACHE_LOCK = threading.Lock()
