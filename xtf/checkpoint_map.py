"""How a leaf is found in a Hugging Face checkpoint: a small expression over named tensors.

A `Source` says how a leaf is put together, so that any block of it can be read by itself (`fill`) and the whole can be taken
apart again (`take_apart`). Where checkpoints differ, it says all layouts (`Either`), and `resolve` finds the one that a checkpoint has.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")

Range = tuple[int, int]
"""A half-open range of indices along one dim."""


@dataclass(frozen=True)
class Named:
    """The tensor of this name, as it stands."""

    name: str


@dataclass(frozen=True)
class Stack:
    """Parts of equal shape, stacked along a new first dim."""

    parts: tuple[Source, ...]


@dataclass(frozen=True)
class Concat:
    """Parts laid end to end along ``dim``.

    Args:
        parts: the parts, in order.
        dim: the dim of the leaf along which they lie.
        sizes: the size of each part along ``dim``; ``None`` where all are equal.
    """

    parts: tuple[Source, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Transposed:
    """A part whose last two dims are stored the other way round."""

    part: Source


@dataclass(frozen=True)
class Interleaved:
    """A part in which the groups of a leaf alternate along ``dim``: a0 b0 a1 b1 ... is stored where the leaf has a0 a1 ... b0 b1 ...

    Args:
        part: what is stored, of the leaf's shape.
        dim: the dim of the leaf along which its groups lie end to end.
        groups: how many there are.
    """

    part: Source
    dim: int = 0
    groups: int = 2


@dataclass(frozen=True)
class Either:
    """One of several layouts, each of which gives the same leaf. The first is the one that is written."""

    alternatives: tuple[Source, ...]


Source = Named | Stack | Concat | Transposed | Interleaved | Either


def names(source: Source) -> list[str]:
    """Names of the tensors that a leaf is made of, in order; of an `Either`, those of its first layout.

    Example:
        >>> names(Stack((Concat((Named("gate"), Named("up"))), Named("both"))))
        ['gate', 'up', 'both']
    """
    match source:
        case Named():
            return [source.name]
        case Transposed() | Interleaved():
            return names(source.part)
        case Either():
            return names(_first(source))
        case Stack() | Concat():
            return [name for part in source.parts for name in names(part)]


def layouts(source: Source) -> list[Source]:
    """The layouts among which `resolve` chooses: those of an `Either`, else the source alone.

    Example:
        >>> layouts(Either((Named("a"), Either((Named("b"), Named("c"))))))
        [Named(name='a'), Named(name='b'), Named(name='c')]
    """
    return [layout for part in source.alternatives for layout in layouts(part)] if isinstance(source, Either) else [source]


def resolve(source: Source, held: Container[str], rename: Callable[[str], str] = str) -> Source:
    """The source without `Either`, in the layout that a checkpoint has.

    Args:
        source: how the leaf may be put together.
        held: the names that the checkpoint holds.
        rename: gives the checkpoint's name for a tensor; it is applied to each `Named`.

    Returns:
        The first layout of which most names are held: all of them if the checkpoint is whole.

    Example:
        >>> resolve(Either((Stack((Named("0.w"), Named("1.w"))), Named("w"))), {"w"})
        Named(name='w')
    """
    match source:
        case Named():
            return Named(rename(source.name))
        case Transposed():
            return Transposed(resolve(source.part, held, rename))
        case Interleaved():
            return Interleaved(resolve(source.part, held, rename), source.dim, source.groups)
        case Stack():
            return Stack(tuple(resolve(part, held, rename) for part in source.parts))
        case Concat():
            return Concat(tuple(resolve(part, held, rename) for part in source.parts), source.dim, source.sizes)
        case Either():
            _first(source)
            return max((resolve(layout, held, rename) for layout in source.alternatives), key=lambda layout: _share(layout, held))


def shapes(source: Source, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The shape of each named tensor of a leaf of this shape, in the order of `names`.

    Raises:
        ValueError: if the expression cannot give a leaf of this shape, or uses a name twice.

    Example:
        >>> shapes(Stack((Concat((Named("gate"), Named("up"))),)), (1, 6, 4))
        {'gate': (3, 4), 'up': (3, 4)}
        >>> shapes(Interleaved(Transposed(Named("gate_up")), dim=0), (6, 4))
        {'gate_up': (4, 6)}
    """
    match source:
        case Named():
            return {source.name: tuple(shape)}
        case Transposed():
            return shapes(source.part, _swapped(source, shape))
        case Interleaved():
            _group(source, shape)
            return shapes(source.part, shape)
        case Either():
            return shapes(_first(source), shape)
        case Stack() | Concat():
            found = dict[str, tuple[int, ...]]()
            for part, _, _, inner in _parts(source, shape):
                for name, part_shape in shapes(part, inner).items():
                    if name in found:
                        raise ValueError(f"a leaf uses the tensor {name!r} twice: each tensor of a checkpoint belongs to one place")
                    found[name] = part_shape
            return found


def fill(
    source: Source, shape: Sequence[int], ranges: Sequence[Range], read: Callable[[str, Sequence[Range]], Tensor], out: Tensor
) -> None:
    """Write the block ``ranges`` of a leaf into ``out``, reading nothing beyond the block.

    Of an `Interleaved` part, runs are read that hold what lies between the rows of one group: nothing more where the block has all
    groups of these rows, at most ``groups`` times the block where it has one. Such a run is held once more while it is sorted out.

    Args:
        source: how the leaf is put together; of an `Either`, the first layout is read.
        shape: the whole leaf's shape.
        ranges: a half-open range per dim of the whole leaf.
        read: ``read(name, ranges)`` gives a block of a named tensor; not called for empty blocks.
        out: of the block's shape, any dtype and device; values are cast as `torch.Tensor.copy_` does.

    Example:
        >>> import torch
        >>> tensors = {"a": torch.zeros(2, 3), "b": torch.ones(2, 3)}
        >>> out = torch.empty(2, 2)
        >>> read = lambda name, r: tensors[name][tuple(slice(*x) for x in r)]
        >>> fill(Concat((Named("a"), Named("b"))), (4, 3), [(1, 3), (0, 2)], read, out)
        >>> out.tolist()
        [[0.0, 0.0], [1.0, 1.0]]
    """
    if out.numel() == 0:
        return
    match source:
        case Named():
            out.copy_(read(source.name, ranges))
        case Transposed():
            fill(source.part, _swapped(source, shape), _swapped(source, ranges), read, out.transpose(-1, -2))
        case Interleaved():
            _fill_interleaved(source, shape, ranges, read, out)
        case Either():
            fill(_first(source), shape, ranges, read, out)
        case Stack() | Concat():
            dim = _dim(source)
            low, high = ranges[dim]
            for part, start, stop, inner in _parts(source, shape):
                begin, end = max(low, start), min(high, stop)
                if begin >= end:
                    continue
                if isinstance(source, Stack):
                    fill(part, inner, ranges[1:], read, out[begin - low])
                else:
                    own = _with(ranges, dim, (begin - start, end - start))
                    fill(part, inner, own, read, out.narrow(dim, begin - low, end - begin))


def take_apart(source: Source, leaf: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a whole leaf, in the order of `names`: views of it, but for an `Interleaved` part.

    Example:
        >>> import torch
        >>> [(name, t.tolist()) for name, t in take_apart(Stack((Named("a"), Named("b"))), torch.tensor([[1, 2], [3, 4]]))]
        [('a', [1, 2]), ('b', [3, 4])]
        >>> [(name, t.tolist()) for name, t in take_apart(Interleaved(Named("ab")), torch.tensor([1, 2, 10, 20]))]
        [('ab', [1, 10, 2, 20])]
    """
    match source:
        case Named():
            yield source.name, leaf
        case Transposed():
            _swapped(source, leaf.shape)
            yield from take_apart(source.part, leaf.transpose(-1, -2))
        case Interleaved():
            dim, size, shape = source.dim, _group(source, leaf.shape), leaf.shape
            alternating = leaf.reshape(*shape[:dim], source.groups, size, *shape[dim + 1 :]).transpose(dim, dim + 1)
            yield from take_apart(source.part, alternating.reshape(shape))
        case Either():
            yield from take_apart(_first(source), leaf)
        case Stack() | Concat():
            for part, start, stop, _ in _parts(source, leaf.shape):
                yield from take_apart(part, leaf[start] if isinstance(source, Stack) else leaf.narrow(source.dim, start, stop - start))


class Piece(NamedTuple):
    """A block of a leaf that is some rows of the tensors it is stored as.

    Args:
        block: a half-open range per dim of the leaf.
        source: how the block is put together, as a leaf of the shape ``shape``.
        shape: that of the block without the dims along which parts are stacked.
        row: where the block's rows begin in the named tensors.
    """

    block: tuple[Range, ...]
    source: Source
    shape: tuple[int, ...]
    row: int


def pieces(source: Source, shape: Sequence[int], elements: int) -> Iterator[Piece]:
    """A whole leaf in pieces of at most so many elements each, where rows are not larger, that can be read and written one by one.

    A tensor that is stored transposed or interleaved along its first dim is one piece.

    Example:
        >>> for piece in pieces(Stack((Named("a"), Named("b"))), (2, 3, 4), 8):
        ...     print(piece.block, names(piece.source), piece.shape, piece.row)
        ((0, 1), (0, 2), (0, 4)) ['a'] (2, 4) 0
        ((0, 1), (2, 3), (0, 4)) ['a'] (1, 4) 2
        ((1, 2), (0, 2), (0, 4)) ['b'] (2, 4) 0
        ((1, 2), (2, 3), (0, 4)) ['b'] (1, 4) 2
    """
    for block, part, inner in _stored_blocks(source, tuple(shape)):
        if not inner or not inner[0] or not _by_rows(part, len(inner)):
            yield Piece(block, part, inner, 0)
            continue
        dim = len(block) - len(inner)
        rows, start = max(1, elements // max(1, prod(inner[1:]))), block[dim][0]
        for row in range(0, inner[0], rows):
            end = min(row + rows, inner[0])
            yield Piece((*block[:dim], (start + row, start + end), *block[dim + 1 :]), part, (end - row, *inner[1:]), row)


def _stored_blocks(source: Source, shape: tuple[int, ...]) -> Iterator[tuple[tuple[Range, ...], Source, tuple[int, ...]]]:
    """The block of each part that is not stacked or concatenated further, the part, and its own shape."""
    match source:
        case Either():
            yield from _stored_blocks(_first(source), shape)
        case Stack() | Concat():
            dim = _dim(source)
            for part, start, stop, inner in _parts(source, shape):
                for block, stored, own in _stored_blocks(part, inner):
                    if isinstance(source, Stack):
                        yield ((start, stop), *block), stored, own
                    else:
                        low, high = block[dim]
                        yield (*block[:dim], (low + start, high + start), *block[dim + 1 :]), stored, own
        case _:
            yield tuple((0, n) for n in shape), source, shape


def _by_rows(source: Source, dims: int) -> bool:
    """Whether some rows of a part are the same rows of the one tensor it is stored as."""
    match source:
        case Named():
            return True
        case Transposed():
            return dims > 2 and _by_rows(source.part, dims)
        case Interleaved():
            return source.dim > 0 and _by_rows(source.part, dims)
        case _:
            return False


def _fill_interleaved(
    source: Interleaved, shape: Sequence[int], ranges: Sequence[Range], read: Callable[[str, Sequence[Range]], Tensor], out: Tensor
) -> None:
    """`fill` run by run: a run is rows of one or more groups that lie next to each other where they are stored."""
    dim, count, size = source.dim, source.groups, _group(source, shape)
    low, high = ranges[dim]
    rows = {g: (max(low, g * size) - g * size, min(high, (g + 1) * size) - g * size) for g in range(count)}
    rows = {g: (begin, end) for g, (begin, end) in rows.items() if begin < end}
    bounds = sorted({bound for span in rows.values() for bound in span})
    for begin, end in pairwise(bounds):
        groups = [g for g, (first, last) in rows.items() if first <= begin and end <= last]
        if not groups:
            continue
        start, stop = begin * count + groups[0], (end - 1) * count + groups[-1] + 1
        run = out.new_empty([*out.shape[:dim], stop - start, *out.shape[dim + 1 :]])
        fill(source.part, shape, _with(ranges, dim, (start, stop)), read, run)
        for g in groups:
            place = out.narrow(dim, g * size + begin - low, end - begin)
            place.copy_(run[(slice(None),) * dim + (slice(g - groups[0], None, count),)])


def _with(ranges: Sequence[Range], dim: int, own: Range) -> list[Range]:
    return [*ranges[:dim], own, *ranges[dim + 1 :]]


def _swapped(source: Transposed, of_dims: Sequence[T]) -> tuple[T, ...]:
    """A shape, or ranges, with the last two dims swapped."""
    if len(of_dims) < 2:
        raise ValueError(f"cannot transpose {names(source)[:4]}: a leaf of {len(of_dims)} dims has no last two")
    return (*of_dims[:-2], of_dims[-1], of_dims[-2])


def _group(source: Interleaved, shape: Sequence[int]) -> int:
    """The size of each group along the dim."""
    if not 0 <= source.dim < len(shape):
        raise ValueError(f"cannot interleave {names(source)[:4]} along dim {source.dim}: a leaf of shape {tuple(shape)} has no such dim")
    if source.groups < 1 or shape[source.dim] % source.groups:
        raise ValueError(
            f"{source.groups} groups of {names(source)[:4]} cannot give a leaf of shape {tuple(shape)} along dim {source.dim}: "
            "it must divide into them evenly"
        )
    return shape[source.dim] // source.groups


def _first(source: Either) -> Source:
    if not source.alternatives:
        raise ValueError("an Either needs at least one layout")
    return source.alternatives[0]


def _share(source: Source, held: Container[str]) -> float:
    """The part of a source's names that is held, 0 to 1."""
    needed = names(source)
    return sum(name in held for name in needed) / max(len(needed), 1)


def _dim(source: Stack | Concat) -> int:
    return 0 if isinstance(source, Stack) else source.dim


def _parts(source: Stack | Concat, shape: Sequence[int]) -> list[tuple[Source, int, int, tuple[int, ...]]]:
    """Of each part: itself, where it begins and ends along the dim, and its own shape."""
    dim, count = _dim(source), len(source.parts)
    if not count:
        raise ValueError(f"a {type(source).__name__} needs at least one part")
    if not 0 <= dim < len(shape):
        raise ValueError(f"cannot lay {names(source)[:4]} along dim {dim}: a leaf of shape {tuple(shape)} has dims 0 to {len(shape) - 1}")
    if isinstance(source, Stack):
        if shape[0] != count:
            raise ValueError(f"a Stack of {count} parts ({names(source)[0]!r} first) cannot give a leaf of shape {tuple(shape)}")
        return [(part, i, i + 1, tuple(shape[1:])) for i, part in enumerate(source.parts)]
    if source.sizes is None and shape[dim] % count:
        raise ValueError(
            f"a Concat of {count} equal parts ({names(source)[0]!r} first) cannot give a leaf of shape {tuple(shape)} "
            f"along dim {dim}: state their sizes"
        )
    sizes = source.sizes if source.sizes is not None else (shape[dim] // count,) * count
    if len(sizes) != count or sum(sizes) != shape[dim] or min(sizes) < 0:
        raise ValueError(f"a Concat of {count} parts with sizes {sizes} cannot give a leaf of shape {tuple(shape)} along dim {dim}")
    found: list[tuple[Source, int, int, tuple[int, ...]]] = []
    start = 0
    for part, size in zip(source.parts, sizes, strict=True):
        found.append((part, start, start + size, (*shape[:dim], size, *shape[dim + 1 :])))
        start += size
    return found
