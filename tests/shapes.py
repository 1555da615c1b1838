"""Shapes checked while tests run: every call of an xtf function whose annotations are jaxtyping's is held to them, with beartype.

`install` puts jaxtyping's import hook before xtf is imported. What it adds to a function differs from jaxtyping's own in three
ways, so that it can be on in every test:

* only functions with an annotation of a shape are wrapped; pyright checks all other types before anything runs;
* Dynamo, which cannot trace the checks (``fullgraph=True`` would fail), sees the function itself;
* a function that refuses bad input itself, with a ``ValueError``, may do so: tests of refusals see what users see.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jaxtyping
import torch

_jaxtyped: Callable[..., Any] = jaxtyping.jaxtyped
_SHAPED = ("[Tensor, '", "Batch")  # how an annotation of a shape reads


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
        # made when first called: models define a function or two for each layer, and many are never run
        return _wrapped(fn, functools.cache(lambda: _jaxtyped(fn, typechecker=typechecker)))

    return decorate


def _wrapped(fn: Callable[..., Any], strict: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        try:
            return strict()(*args, **kwargs)
        except jaxtyping.TypeCheckError:
            fn(*args, **kwargs)  # its own refusal, if it has one
            raise

    return checked
