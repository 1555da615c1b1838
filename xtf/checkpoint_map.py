"""How a leaf is found in a Hugging Face checkpoint: a small expression over named tensors.

A `Source` says how a leaf is put together, so that any block of it can be read by itself (`fill`) and the whole can be taken
apart again (`take_apart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

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


Source = Named | Stack | Concat


def names(source: Source) -> list[str]:
    """Names of the tensors that a leaf is made of, in order.

    Example:
        >>> names(Stack((Concat((Named("gate"), Named("up"))), Named("both"))))
        ['gate', 'up', 'both']
    """
    if isinstance(source, Named):
        return [source.name]
    return [name for part in source.parts for name in names(part)]


def shapes(source: Source, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The shape of each named tensor of a leaf of this shape, in the order of `names`.

    Raises:
        ValueError: if the expression cannot give a leaf of this shape, or uses a name twice.

    Example:
        >>> shapes(Stack((Concat((Named("gate"), Named("up"))),)), (1, 6, 4))
        {'gate': (3, 4), 'up': (3, 4)}
    """
    if isinstance(source, Named):
        return {source.name: tuple(shape)}
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

    Args:
        source: how the leaf is put together.
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
    if isinstance(source, Named):
        out.copy_(read(source.name, ranges))
        return
    dim = _dim(source)
    low, high = ranges[dim]
    for part, start, stop, inner in _parts(source, shape):
        begin, end = max(low, start), min(high, stop)
        if begin >= end:
            continue
        if isinstance(source, Stack):
            fill(part, inner, ranges[1:], read, out[begin - low])
        else:
            own = [*ranges[:dim], (begin - start, end - start), *ranges[dim + 1 :]]
            fill(part, inner, own, read, out.narrow(dim, begin - low, end - begin))


def take_apart(source: Source, leaf: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a whole leaf, as views of it, in the order of `names`.

    Example:
        >>> import torch
        >>> [(name, t.tolist()) for name, t in take_apart(Stack((Named("a"), Named("b"))), torch.tensor([[1, 2], [3, 4]]))]
        [('a', [1, 2]), ('b', [3, 4])]
    """
    if isinstance(source, Named):
        yield source.name, leaf
        return
    for part, start, stop, _ in _parts(source, leaf.shape):
        yield from take_apart(part, leaf[start] if isinstance(source, Stack) else leaf.narrow(source.dim, start, stop - start))


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
