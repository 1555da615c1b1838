"""Shapes checked while tests run: calls of xtf functions with jaxtyping's annotations are held to them, with beartype.

`install` puts jaxtyping's import hook before xtf is imported. What the hook adds to a function differs from jaxtyping's own, so
that it can be on in every test:

* only functions with an annotation of a shape are wrapped; pyright checks all other types before anything runs;
* arguments of shapes and dtypes that a function was found right for are not checked again: a full check takes 50 µs, which small
  models would feel;
* Dynamo, which cannot trace a check (``fullgraph=True`` would fail), sees the function itself;
* a function that refuses bad input itself, with a ``ValueError``, may do so: tests of refusals see what users see.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

import jaxtyping
import torch
from torch import Tensor

_jaxtyped: Callable[..., Any] = jaxtyping.jaxtyped
_SHAPED = ("[Tensor, '", "Batch")  # how an annotation of a shape reads
_STRICT: dict[Hashable, Callable[..., Any]] = {}  # jaxtyping's checks, by name of the function
_RIGHT: set[Hashable] = set()  # the calls that were found right
_LOCAL = threading.local()  # its ``fn`` is the function that a check is about to call
_LOCK = threading.Lock()  # simulated ranks are threads, and beartype need not bear two that make a check at once


def install() -> None:
    """Check what is imported from now on; ``JAXTYPING_DISABLE=1`` in the environment switches it off."""
    if not jaxtyping.config.jaxtyping_disable:
        jaxtyping.jaxtyped = _checked  # what the hook writes above every function
        jaxtyping.install_import_hook("xtf", "beartype.beartype")


def _checked(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    def decorate(fn: Any) -> Any:
        annotations: list[str] = [a for a in getattr(fn, "__annotations__", {}).values() if isinstance(a, str)]
        if not isinstance(fn, types.FunctionType) or not any(mark in a for a in annotations for mark in _SHAPED):
            return fn
        return _wrapped(fn, typechecker)

    return decorate


def _wrapped(fn: types.FunctionType, typechecker: Callable[..., Any]) -> Callable[..., Any]:
    name = fn.__module__, fn.__qualname__

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        call = name, _kind(args), _kind(kwargs)
        if _was_right(call):
            return fn(*args, **kwargs)
        with _LOCK:
            if name not in _STRICT:
                _STRICT[name] = _jaxtyped(_stand_in(fn), typechecker=typechecker)
        _LOCAL.fn = fn
        try:
            out = _STRICT[name](*args, **kwargs)
        except jaxtyping.TypeCheckError as wrong:
            try:
                fn(*args, **kwargs)
            except ValueError:
                raise  # its own refusal
            except Exception:
                raise wrong from None
            raise
        with contextlib.suppress(TypeError):
            _RIGHT.add(call)
        return out

    return checked


def _stand_in(fn: types.FunctionType) -> Callable[..., Any]:
    """Has the annotations of ``fn`` and calls what `_LOCAL` holds. Making a check takes milliseconds, and a model makes its stages'
    functions anew: one check serves all that differ in what they close over."""
    local = _LOCAL

    def call(*args: Any, **kwargs: Any) -> Any:
        return local.fn(*args, **kwargs)

    # the globals are those in which the annotations have their meaning
    return functools.wraps(fn)(types.FunctionType(call.__code__, fn.__globals__, closure=call.__closure__))


def _kind(value: Any) -> Any:
    """Equal for values that are right for the same annotations."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple([(name, _kind(v)) for name, v in cast(Mapping[Any, Any], value).items()])
    if isinstance(value, tuple):
        return tuple([_kind(v) for v in cast(tuple[Any, ...], value)])
    return value if isinstance(value, int | str | None) else type(value)


def _was_right(call: Hashable) -> bool:
    try:
        return call in _RIGHT
    except TypeError:  # a symbolic size, while a graph is traced, has no hash
        return False
