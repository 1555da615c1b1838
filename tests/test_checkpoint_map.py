"""Layouts of a checkpoint: transposed, interleaved and alternative sources against whole-tensor code, and which layout is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xtf.checkpoint_map import (
    Concat,
    Either,
    Interleaved,
    Named,
    Source,
    Stack,
    Transposed,
    fill,
    layouts,
    names,
    resolve,
    shapes,
    take_apart,
)


def stored_of(source: Source, leaf: Tensor) -> dict[str, Tensor]:
    """The stored tensors of a leaf, by whole-tensor code, index by index."""
    match source:
        case Named():
            return {source.name: leaf}
        case Transposed():
            return stored_of(source.part, leaf.mT)
        case Interleaved():
            size = leaf.shape[source.dim] // source.groups
            order = [g * size + i for i in range(size) for g in range(source.groups)]
            return stored_of(source.part, leaf.index_select(source.dim, torch.tensor(order, dtype=torch.int64)))
        case Either():
            return stored_of(source.alternatives[0], leaf)
        case Stack():
            return {k: v for part, one in zip(source.parts, leaf, strict=True) for k, v in stored_of(part, one).items()}
        case Concat():
            parts = leaf.chunk(len(source.parts), source.dim) if leaf.shape[source.dim] else [leaf] * len(source.parts)
            return {k: v for part, one in zip(source.parts, parts, strict=True) for k, v in stored_of(part, one).items()}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Source, Tensor, list[tuple[int, int]]]:
    """A random expression, a leaf of the shape it gives, and a block."""
    counter = iter(range(10_000))

    def build(shape: tuple[int, ...], depth: int) -> Source:
        kinds = ["named"]
        if depth and shape:
            kinds += ["interleaved", "either"] + ["transposed"] * (len(shape) > 1) + ["stack"] * (shape[0] > 0)
            kinds += ["concat"] if shape[0] % 2 == 0 else []
        match draw(st.sampled_from(kinds)):
            case "interleaved":
                dim = draw(st.integers(0, len(shape) - 1))
                groups = draw(st.sampled_from([g for g in range(1, 7) if shape[dim] % g == 0]))
                return Interleaved(build(shape, depth - 1), dim, groups)
            case "transposed":
                return Transposed(build((*shape[:-2], shape[-1], shape[-2]), depth - 1))
            case "either":
                return Either((build(shape, depth - 1), Named(f"other{next(counter)}")))
            case "stack":
                return Stack(tuple(build(shape[1:], depth - 1) for _ in range(shape[0])))
            case "concat":
                return Concat(tuple(build((shape[0] // 2, *shape[1:]), depth - 1) for _ in range(2)))
            case _:
                return Named(f"t{next(counter)}")

    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    block = [tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in shape]
    return build(shape, 3), torch.arange(torch.Size(shape).numel()).view(shape), [(a, b) for a, b in block]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_any_block_of_any_layout(case: tuple[Source, Tensor, list[tuple[int, int]]]) -> None:
    source, leaf, ranges = case
    stored, parts = stored_of(source, leaf), dict(take_apart(source, leaf))
    assert list(parts) == names(source) == list(stored)
    assert all(torch.equal(parts[name], stored[name]) for name in stored)
    assert {name: tuple(t.shape) for name, t in parts.items()} == shapes(source, leaf.shape)
    count = [0]

    def read(name: str, block: Any) -> Tensor:
        found = stored[name][tuple(slice(*r) for r in block)]
        assert found.shape == tuple(b - a for a, b in block)  # nothing beyond the tensor is asked for
        count[0] += found.numel()
        return found

    wanted = leaf[tuple(slice(*r) for r in ranges)]
    out = torch.full(wanted.shape, -1)
    fill(source, leaf.shape, ranges, read, out)
    assert torch.equal(out, wanted)
    if wanted.numel() == leaf.numel():
        assert count[0] == leaf.numel()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(0, 6), st.data())
def test_interleaved_reads_at_most_the_runs_between_its_rows(groups: int, size: int, data: st.DataObject) -> None:
    leaf = torch.arange(3 * groups * size).view(3, -1)
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, groups * size)] * 2)))
    source, out, count = Interleaved(Named("t"), 1, groups), torch.full((2, high - low), -1), [0]
    stored = dict(take_apart(source, leaf))["t"]

    def read(_: str, block: Any) -> Tensor:
        found = stored[tuple(slice(*r) for r in block)]
        count[0] += found.numel()
        return found

    fill(source, leaf.shape, [(0, 2), (low, high)], read, out)
    assert torch.equal(out, leaf[:2, low:high])
    assert out.numel() <= count[0] <= groups * out.numel()


def test_the_fused_experts_of_gpt_oss() -> None:
    """(E, H, 2F), columns gate, up, gate, up: our leaf is (E, 2F, H), all gate rows before all up rows."""
    stored = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(0))
    out = torch.empty(3, 10, 4)
    source = Interleaved(Transposed(Named("w")), 1)
    fill(source, out.shape, [(0, n) for n in out.shape], lambda _, r: stored[tuple(slice(*x) for x in r)], out)
    assert torch.equal(out, torch.cat([stored[..., ::2], stored[..., 1::2]], -1).mT)
    assert torch.equal(dict(take_apart(source, out))["w"], stored)


FUSED = Either((Stack((Named("m.0.w"), Named("m.1.w"))), Named("m.w")))


@pytest.mark.parametrize(
    ("held", "found"),
    [
        (["m.0.w", "m.1.w", "m.w"], FUSED.alternatives[0]),
        (["m.w"], FUSED.alternatives[1]),
        (["m.1.w"], FUSED.alternatives[0]),  # one expert was lost: still that layout
        ([], FUSED.alternatives[0]),
    ],
)
def test_the_layout_that_is_held_is_found(held: list[str], found: Source) -> None:
    assert resolve(FUSED, held) == found
    wrapped = Concat((Transposed(FUSED), Interleaved(FUSED, 1, 3)), 1, (2, 3))
    assert resolve(wrapped, held) == Concat((Transposed(found), Interleaved(found, 1, 3)), 1, (2, 3))


def test_names_are_those_of_the_checkpoint() -> None:
    renamed = resolve(FUSED, ["p.m.w"], lambda name: f"p.{name}")
    assert renamed == Named("p.m.w")
    assert layouts(Named("a")) == [Named("a")] and names(FUSED) == ["m.0.w", "m.1.w"]


@pytest.mark.parametrize(
    ("source", "shape", "says"),
    [
        (Transposed(Named("a")), (3,), "1 dims has no last two"),
        (Interleaved(Named("a"), 2), (4, 4), "along dim 2"),
        (Interleaved(Named("a")), (5, 4), r"2 groups of \['a'\] cannot give a leaf of shape \(5, 4\)"),
        (Interleaved(Named("a"), groups=0), (4,), "0 groups"),
        (Either(()), (4,), "at least one layout"),
    ],
)
def test_a_layout_that_cannot_give_the_leaf_is_refused(source: Source, shape: tuple[int, ...], says: str) -> None:
    for use in (lambda: shapes(source, shape), lambda: list(take_apart(source, torch.zeros(shape)))):
        with pytest.raises(ValueError, match=says):
            use()
