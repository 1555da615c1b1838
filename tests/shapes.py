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
_RIGHT: set[Hashable] = set()  # the calls that were found right
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
        return _wrapped(fn, functools.cache(lambda: _jaxtyped(fn, typechecker=typechecker)))

    return decorate


def _wrapped(fn: types.FunctionType, make_strict: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        call = fn.__module__, fn.__qualname__, _kind(args), _kind(kwargs)
        if call in _RIGHT:
            return fn(*args, **kwargs)
        with _LOCK:
            strict = make_strict()
        try:
            out = strict(*args, **kwargs)
        except jaxtyping.TypeCheckError as wrong:
            try:
                fn(*args, **kwargs)
            except ValueError:
                raise  # its own refusal
            except Exception:
                raise wrong from None
            raise
        _RIGHT.add(call)
        return out

    return checked


def _kind(value: Any) -> Hashable:
    """Equal for values that are right for the same annotations."""
    if isinstance(value, Tensor):
        if not all(type(size) is int for size in value.shape):
            return object()  # equal to nothing: symbolic sizes, while a graph is traced, have no hash
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((name, _kind(v)) for name, v in cast(Mapping[Any, Any], value).items())
    if isinstance(value, tuple):
        return type(value), tuple(_kind(v) for v in cast(tuple[Any, ...], value))
    return value if isinstance(value, int | str | None) else type(value)
