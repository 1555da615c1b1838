"""Trees: paths, order, structure and registered nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given
from hypothesis import strategies as st

from xtf import tree
from xtf.state import State


class Pair(NamedTuple):
    left: Any
    right: Any


NESTED = {"b": [1, {"x": 2}], "a": (3, None), "p": Pair(4, [5])}

trees = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


def test_paths_and_leaves() -> None:
    assert tree.paths(NESTED) == ["a.0", "a.1", "b.0", "b.1.x", "p.0", "p.1.0"]
    assert tree.leaves(NESTED) == [3, None, 1, 2, 4, 5]  # None is a leaf: the gradient of what is not trained
    assert tree.items(NESTED) == {"a.0": 3, "a.1": None, "b.0": 1, "b.1.x": 2, "p.0": 4, "p.1.0": 5}
    assert tree.paths(7) == [""] and tree.leaves(7) == [7]
    assert tree.paths({}) == [] and tree.leaves([{}, ()]) == []


def test_order_is_that_of_keys_not_of_insertion() -> None:
    assert tree.paths({"b": 1, "a": 2}) == tree.paths({"a": 2, "b": 1}) == ["a", "b"]
    assert tree.leaves({"b": 1, "a": 2}) == [2, 1]
    assert tree.same_structure({"b": 1, "a": 2}, {"a": 0, "b": 0})


@given(trees)
def test_round_trips(value: Any) -> None:
    assert tree.unflatten(value, tree.leaves(value)) == value
    assert tree.map(lambda leaf: leaf, value) == value
    assert tree.same_structure(value, tree.map(lambda leaf: (), value)) == (not tree.leaves(value))
    paths = tree.paths(value)
    assert len(paths) == len(tree.leaves(value))
    if len(set(paths)) == len(paths):
        assert tree.from_items(value, tree.items(value)) == value
    assert tree.map_with_path(lambda path, leaf: path, value) == tree.unflatten(value, paths)


def test_map_takes_several_trees() -> None:
    a = {"x": 1, "y": [2, 3]}
    assert tree.map(lambda p, q: p + q, a, {"x": 10, "y": [20, 30]}) == {"x": 11, "y": [22, 33]}
    assert tree.map_with_path(lambda path, p, q: f"{path}={p + q}", a, a) == {"x": "x=2", "y": ["y.0=4", "y.1=6"]}
    with pytest.raises(ValueError):
        tree.map(lambda p, q: p, a, {"x": 1})


def test_structure() -> None:
    assert tree.same_structure(NESTED, tree.map(lambda leaf: "z", NESTED))
    assert not tree.same_structure({"a": 1}, {"a": [1]})
    assert not tree.same_structure([1, 2], (1, 2))
    assert not tree.same_structure({"a": 1}, {"b": 1})
    assert not tree.same_structure({"a": 1}, {"a": 1, "b": 2})


def test_too_few_or_too_many_leaves_are_refused() -> None:
    with pytest.raises(ValueError):
        tree.unflatten([1, 2], [1])
    with pytest.raises(ValueError):
        tree.unflatten([1, 2], [1, 2, 3])
    with pytest.raises(KeyError):
        tree.from_items({"a": 1, "b": 2}, {"a": 1})


def test_a_state_is_a_node_for_both_libraries() -> None:
    state = State({"w": torch.ones(2)}, (torch.zeros(2),), torch.tensor(3), torch.tensor(1))
    assert tree.paths(state) == ["params.w", "opt.0", "step", "skipped"]
    doubled = tree.map(lambda t: t * 2, state)
    assert isinstance(doubled, State) and int(doubled.step) == 6 and doubled.params["w"].tolist() == [2.0, 2.0]
    leaves, _ = torch_pytree.tree_flatten(state)
    assert len(leaves) == 4
    also = torch_pytree.tree_map(lambda t: t + 1, state)
    assert isinstance(also, State) and int(also.step) == 4
    assert repr(state) == "State(step=3, 2 local parameters)"
    replaced = state.replace(step=torch.tensor(9))
    assert int(replaced.step) == 9 and int(state.step) == 3 and replaced.params is state.params


def test_a_registered_class_is_a_node_for_both_libraries() -> None:
    class Box:
        def __init__(self, content: Any, label: str) -> None:
            self.content, self.label = content, label

    def build(label: Any, children: Iterable[Any]) -> Box:
        (content,) = children
        return Box(content, label)

    tree.register_node(Box, lambda box: ((box.content,), box.label), build, ("content",))
    box = Box([1, 2], "kept")
    assert tree.paths({"a": box}) == ["a.content.0", "a.content.1"]
    for mapped in (tree.map(lambda x: x + 1, box), torch_pytree.tree_map(lambda x: x + 1, box)):
        assert isinstance(mapped, Box) and mapped.content == [2, 3] and mapped.label == "kept"
