"""Trees: the one way xtf walks nested containers of tensors.

A tree is any nesting of dicts, lists, tuples, named tuples and registered nodes. A leaf is addressed by its *path*: the keys
from the root joined with dots, as in ``"layers.3.attention.q"``. Flattening is optree's; nodes of our own are registered
with optree and with torch's own pytree, so that ``torch.func`` and ``torch.export`` see the same leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import optree
import torch.utils._pytree as torch_pytree

Path = str
Tree = Any  # a nesting of containers; Python's type system has no name for it

N = TypeVar("N")

_NAMESPACE = "xtf"


def paths(tree: Tree) -> list[Path]:
    """The path of every leaf, in flattening order.

    Example:
        >>> paths({"layers": [{"w": 1}, {"w": 2}], "norm": 3})
        ['layers.0.w', 'layers.1.w', 'norm']
    """
    found, _, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True, namespace=_NAMESPACE)
    return [".".join(str(key) for key in path) for path in found]


def leaves(tree: Tree) -> list[Any]:
    """The leaves, in flattening order. ``None`` is a leaf (the gradient of what is not trained)."""
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=_NAMESPACE)


def items(tree: Tree) -> dict[Path, Any]:
    """``{path: leaf}`` in flattening order."""
    return dict(zip(paths(tree), leaves(tree), strict=True))


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply ``fn`` to each leaf of ``tree`` and the leaves at the same place in ``rest``."""
    return optree.tree_map(fn, tree, *rest, none_is_leaf=True, namespace=_NAMESPACE)


def map_with_path(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Like `map`, with the leaf's path as first argument."""
    return unflatten(tree, [fn(*row) for row in zip(paths(tree), leaves(tree), *(leaves(r) for r in rest), strict=True)])


def replace(tree: Tree, old: object, new: object) -> Tree:
    """The tree with ``new`` wherever ``old`` itself is a leaf.

    Example:
        >>> replace([1, {"a": None}], None, 2)
        [1, {'a': 2}]
    """
    return unflatten(tree, [new if leaf is old else leaf for leaf in leaves(tree)])


def unflatten(like: Tree, values: Iterable[Any]) -> Tree:
    """A tree of the structure of ``like`` with ``values`` as its leaves, in flattening order."""
    return optree.tree_unflatten(optree.tree_structure(like, none_is_leaf=True, namespace=_NAMESPACE), list(values))


def from_items(like: Tree, values: Mapping[Path, Any]) -> Tree:
    """A tree of the structure of ``like`` whose leaf at each path is ``values[path]``."""
    return unflatten(like, [values[path] for path in paths(like)])


def same_structure(a: Tree, b: Tree) -> bool:
    """Whether two trees have the same containers and keys."""
    return optree.tree_structure(a, none_is_leaf=True, namespace=_NAMESPACE) == optree.tree_structure(
        b, none_is_leaf=True, namespace=_NAMESPACE
    )


def register_node(
    cls: type[N],
    flatten: Callable[[N], tuple[tuple[Any, ...], Any]],
    unflatten: Callable[[Any, Iterable[Any]], N],
    names: tuple[str, ...],
) -> None:
    """Register a class as a tree node, with optree and with torch's pytree alike."""

    def optree_flatten(node: N) -> tuple[Any, ...]:
        children, meta = flatten(node)
        return children, meta, names

    register: Any = getattr(optree, "register_pytree_node")  # noqa: B009  (its declared type is that of containers only)
    register(cls, optree_flatten, unflatten, namespace=_NAMESPACE)
    torch_pytree.register_pytree_node(
        cls, lambda node: (list(flatten(node)[0]), flatten(node)[1]), lambda children, meta: unflatten(meta, children)
    )
