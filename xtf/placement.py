"""Where a leaf lives: which block of it this rank keeps, and the transfers that follow from that.

A leaf is cut by *splits*, one after another. A split is either *owned*, the stage computes on the part as it is (tensor or
expert parallel), or *gathered*, the parts are brought together before the stage runs and its gradient is reduce-scattered after
(ZeRO-3; Rajbhandari et al. 2020, "ZeRO"). Everything else, initial values, loading, saving, gathering, clipping, is derived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from xtf import tree
from xtf.collectives import Axis, Work
from xtf.mesh import join
from xtf.optim.placement import vector_norms
from xtf.record import Extra, storage_key
from xtf.spec import ParamSpec
from xtf.stage import Transfer
from xtf.tree import Path, Tree

Range = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """A cut of one dim into as many near-equal parts as the axis has ranks; sizes differ by at most one."""

    dim: int
    axis: Axis
    gathered: bool


@dataclass(frozen=True)
class Placement:
    """One leaf on a mesh: its spec (in the dtype it is stored in) and its splits, owned ones first."""

    spec: ParamSpec
    splits: tuple[Split, ...] = ()

    def ranges(self, index: Mapping[Split, int] | None = None, *, owned_only: bool = False) -> list[Range]:
        """The block, a half-open range per dim, that a rank keeps: this one, or the one at ``index`` on given splits."""
        block = [(0, n) for n in self.spec.shape]
        for split in self.splits:
            if owned_only and split.gathered:
                continue
            at = split.axis.index if index is None else index.get(split, split.axis.index)
            block[split.dim] = part(block[split.dim], split.axis.size, at)
        return block

    def shape(self, *, owned_only: bool = False) -> tuple[int, ...]:
        """The shape this rank keeps, or with ``owned_only`` the one its stage computes on."""
        return tuple(stop - start for start, stop in self.ranges(owned_only=owned_only))

    @property
    def gathered(self) -> Split | None:
        """The gathered split, if there is one."""
        return next((s for s in self.splits if s.gathered), None)

    @property
    def axes(self) -> set[str]:
        """Names of the mesh axes the leaf is split over."""
        return {name for split in self.splits for name in split.axis.names}


def part(whole: Range, n: int, index: int) -> Range:
    """Part ``index`` of ``n`` near-equal parts of a range.

    Example:
        >>> [part((0, 7), 3, i) for i in range(3)]
        [(0, 2), (2, 4), (4, 7)]
    """
    start, stop = whole
    return start + (stop - start) * index // n, start + (stop - start) * (index + 1) // n


def place(spec: ParamSpec, owned: Mapping[str, Axis], shard: Sequence[Axis]) -> Placement:
    """Place one leaf: owned splits where a logical axis has a rule, then one gathered split over the remaining shard axes.

    The gathered split takes the first dim that gives every rank something; failing that the longest.
    """
    splits = [Split(dim, owned[name], False) for dim, name in enumerate(spec.axes) if name is not None and name in owned]
    used = [name for split in splits for name in split.axis.names]
    if len(set(used)) != len(used):
        rules = {name: owned[name].name for name in spec.axes if name is not None and name in owned}
        raise ValueError(f"a leaf with axes {spec.axes} would be split twice over one mesh axis by the rules {rules}: give each its own")
    rest = [axis for axis in shard if not set(axis.names) & set(used)]
    if rest and spec.shape and spec.trainable:
        axis = join(*rest)
        sizes = Placement(spec, tuple(splits)).shape()
        dim = next((d for d, n in enumerate(sizes) if n >= axis.size), max(range(len(sizes)), key=lambda d: sizes[d]))
        splits.append(Split(dim, axis, True))
    return Placement(spec, tuple(s for s in splits if s.axis.size > 1))


# Cutting and joining ------------------------------------------------------------------------------------------------------------


def cut(whole: Tensor, placement: Placement, *, below: int = 0) -> Tensor:
    """This rank's block of a leaf of which the splits before number ``below`` are made already, as a copy."""
    outer = Placement(placement.spec, placement.splits[:below]).ranges()
    for dim, ((start, stop), (origin, _)) in enumerate(zip(placement.ranges(), outer, strict=True)):
        whole = whole.narrow(dim, start - origin, stop - start)
    return whole.clone(memory_format=torch.contiguous_format)


def uncut(local: Tensor, placement: Placement, *, below: int = 0) -> Tensor:
    """The leaf with its splits undone, from the last down to number ``below``: by default the whole leaf, on every rank."""
    for depth in range(len(placement.splits), below, -1):
        split, outer = placement.splits[depth - 1], Placement(placement.spec, placement.splits[: depth - 1])
        inner = Placement(placement.spec, placement.splits[:depth])
        shapes = [_shape(inner.ranges({split: i})) for i in range(split.axis.size)]
        flat = split.axis.start_all_gather(local.contiguous().reshape(-1), [math.prod(s) for s in shapes], label="full").wait()
        local = _assemble(flat, shapes, split.dim).reshape(outer.shape())
    return local


def _shape(block: Iterable[Range]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in block)


def _assemble(flat: Tensor, shapes: Sequence[tuple[int, ...]], dim: int) -> Tensor:
    """The tensor whose parts along ``dim`` lie one after another in ``flat``."""
    if dim == 0:
        return flat.view(sum(s[0] for s in shapes), *shapes[0][1:])
    pieces = torch.split(flat, [math.prod(s) for s in shapes])
    return torch.cat([p.view(s) for p, s in zip(pieces, shapes, strict=True)], dim)


# The transfers of a stage's parameters -------------------------------------------------------------------------------------------


class _Group:
    """Leaves of one stage that travel in one buffer: same gathered axis, same dtype."""

    def __init__(self, axis: Axis, members: dict[str, Placement]) -> None:
        self.axis, self.members = axis, members
        self.shapes: dict[str, list[tuple[int, ...]]] = {}  # of each rank's part
        self.blocks: dict[str, list[Range]] = {}  # along the split dim, within what the stage computes on
        for name, placement in members.items():
            split = placement.gathered
            assert split is not None
            blocks = [placement.ranges({split: i}) for i in range(axis.size)]
            origin = placement.ranges(owned_only=True)[split.dim][0]
            self.shapes[name] = [_shape(b) for b in blocks]
            self.blocks[name] = [(b[split.dim][0] - origin, b[split.dim][1] - origin) for b in blocks]
        self.sizes = [sum(math.prod(shapes[i]) for shapes in self.shapes.values()) for i in range(axis.size)]

    def start_gather(self, local: Mapping[str, Tensor], dtype: torch.dtype, label: str) -> Work:
        flat = torch.cat([local[name].reshape(-1).to(dtype) for name in self.members])
        return self.axis.start_all_gather(flat, self.sizes, label=label)

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        by_rank = [
            torch.split(piece, [math.prod(shapes[i]) for shapes in self.shapes.values()])
            for i, piece in enumerate(torch.split(flat, self.sizes))
        ]
        whole: dict[str, Tensor] = {}
        for at, (name, placement) in enumerate(self.members.items()):
            split = placement.gathered
            assert split is not None
            parts = [pieces[at].view(self.shapes[name][i]) for i, pieces in enumerate(by_rank)]
            whole[name] = torch.cat(parts, split.dim)
        return whole

    def start_reduce(self, whole: Mapping[str, Tensor], dtype: torch.dtype, label: str) -> Work:
        pieces: list[Tensor] = []
        for i in range(self.axis.size):
            for name, placement in self.members.items():
                split = placement.gathered
                assert split is not None
                start, stop = self.blocks[name][i]
                pieces.append(whole[name].narrow(split.dim, start, stop - start).reshape(-1).to(dtype))
        return self.axis.start_reduce_scatter(torch.cat(pieces), self.sizes, label=label)

    def unpack_local(self, flat: Tensor) -> dict[str, Tensor]:
        mine = [shapes[self.axis.index] for shapes in self.shapes.values()]
        return {n: p.view(s) for n, p, s in zip(self.members, torch.split(flat, [math.prod(s) for s in mine]), mine, strict=True)}


def _groups(placements: Mapping[str, Placement]) -> list[_Group]:
    found: dict[tuple[str, ...], tuple[Axis, dict[str, Placement]]] = {}
    for name, placement in placements.items():
        if placement.gathered is not None:
            axis = placement.gathered.axis
            found.setdefault(axis.names, (axis, {}))[1][name] = placement
    return [_Group(axis, members) for axis, members in found.values()]


def gather_transfer(stage: str, placements: Mapping[str, Placement], compute: torch.dtype | None) -> Transfer | None:
    """The transfer that makes a stage's parameters of this rank's blocks, cast to the compute dtype before they travel. Leaves that are
    not trained are not cast: a router's correction moves by steps that 16 bits would swallow.

    ``None`` where there is nothing to gather and nothing to cast.
    """
    groups = _groups(placements)
    dtypes = {name: compute if compute and p.spec.trainable else p.spec.dtype for name, p in placements.items()}
    if not groups and all(dtypes[name] == p.spec.dtype for name, p in placements.items()):
        return None
    by_dtype = [
        (_Group(group.axis, {n: p for n, p in group.members.items() if dtypes[n] == dtype}), dtype)
        for group in groups
        for dtype in dict.fromkeys(dtypes[name] for name in group.members)
    ]
    alone = [name for name, p in placements.items() if p.gathered is None]

    def start(local: Mapping[str, Tensor]) -> tuple[list[Work], dict[str, Tensor]]:
        return [g.start_gather(local, dtype, stage) for g, dtype in by_dtype], {n: local[n].to(dtypes[n]) for n in alone}

    def wait(handle: tuple[list[Work], dict[str, Tensor]]) -> dict[str, Tensor]:
        works, whole = handle
        for (group, _), work in zip(by_dtype, works, strict=True):
            whole = whole | group.unpack(work.wait())
        return {name: whole[name] for name in placements}

    return Transfer(start, wait)


def reduce_transfer(
    stage: str,
    placements: Mapping[Path, Placement],
    sum_over: Mapping[Path, Sequence[Axis]],
    reduce: torch.dtype | None,
    compute: torch.dtype | None = None,
) -> Transfer | None:
    """The transfer that makes this rank's gradients of the stage's whole ones: summed over ``sum_over`` each leaf's axes.

    Over the gathered axis the sum is a reduce-scatter; over the others (replicas in HSDP) an all-reduce of what is left. An
    axis over which a leaf is owned needs no sum: every rank's gradient is that of its own part. Sums are in ``reduce``, what
    comes out is in the wider of that and the leaf's own dtype.

    ``None`` where there is nothing to sum and, ``compute`` being the dtype that stages see, nothing to cast.
    """
    rest: dict[tuple[str, ...], tuple[Axis, list[Path]]] = {}
    gathered: dict[Path, Placement] = {}
    for path, placement in placements.items():
        split = placement.gathered
        names = {name for axis in sum_over[path] for name in axis.names}
        if split is not None:
            if not set(split.axis.names) <= names:
                raise ValueError(
                    f"{path} is sharded over {split.axis.name}, whose ranks do not hold different gradients: shard it over {sorted(names)}"
                )
            gathered[path] = placement
        left = [axis for axis in sum_over[path] if axis.size > 1 and not set(axis.names) & placement.axes]
        if left:
            axis = join(*left)
            rest.setdefault(axis.names, (axis, []))[1].append(path)
    groups = _groups(gathered)
    dtypes = {path: reduce or p.spec.dtype for path, p in placements.items()}
    kept = {path: torch.promote_types(dtypes[path], p.spec.dtype) for path, p in placements.items()}
    if not groups and not rest and all(dtype == (compute or placements[path].spec.dtype) for path, dtype in kept.items()):
        return None
    joint = {id(g): reduce or max((p.spec.dtype for p in g.members.values()), key=lambda d: d.itemsize) for g in groups}
    summed = {path for _, paths in rest.values() for path in paths} | set(gathered)

    def later() -> list[Extra]:
        """The all-reduces that follow a reduce-scatter."""
        sizes = {p: math.prod(placements[p].shape()) * dtypes[p].itemsize for _, paths in rest.values() for p in paths}
        return [Extra(bytes=round(2 * (axis.size - 1) / axis.size * sum(sizes[p] for p in paths))) for axis, paths in rest.values()]

    def start_rest(local: Mapping[Path, Tensor]) -> list[Work]:
        return [
            axis.start_all_reduce(torch.cat([local[p].reshape(-1).to(dtypes[p]) for p in paths]), label=stage)
            for axis, paths in rest.values()
        ]

    def finish(local: dict[Path, Tensor], works: list[Work]) -> dict[Path, Tensor]:
        for (_, paths), work in zip(rest.values(), works, strict=True):
            pieces = torch.split(work.wait(), [local[p].numel() for p in paths])
            local |= {p: piece.view(local[p].shape) for p, piece in zip(paths, pieces, strict=True)}
        seen: set[int] = set()
        return {p: (grad if p in summed else _distinct(grad, seen)).to(kept[p]) for p, grad in local.items()}

    def start(whole: Mapping[Path, Tensor]) -> tuple[dict[Path, Tensor], list[Work], list[Extra]]:
        if not groups:
            return dict(whole), start_rest(whole), []
        scattered = [g.start_reduce(whole, joint[id(g)], stage) for g in groups]
        return {p: g for p, g in whole.items() if p not in gathered}, scattered, later()

    def wait(handle: tuple[dict[Path, Tensor], list[Work], list[Extra]]) -> dict[Path, Tensor]:
        local, works, _ = handle
        if not groups:
            return finish(local, works)
        local = dict(local)
        for group, work in zip(groups, works, strict=True):
            local |= group.unpack_local(work.wait())
        return finish(local, start_rest(local))

    return Transfer(start, wait)


def _distinct(grad: Tensor, seen: set[int]) -> Tensor:
    """A gradient that nothing was summed into, in memory of its own: autograd may return one tensor for two parameters."""
    storage = grad.untyped_storage()
    if storage_key(storage) in seen or storage.nbytes() != grad.nbytes or not grad.is_contiguous():
        grad = grad.clone(memory_format=torch.contiguous_format)
    seen.add(storage_key(grad.untyped_storage()))
    return grad


# What optimizers see -------------------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """A norm, and the ids and versions of the leaves that it is of. They are kept, so that no others take their ids."""

    which: list[tuple[int, int]]
    leaves: list[Tensor | None]
    norm: Tensor


@dataclass(frozen=True)
class Placed:
    """The placement of every leaf, as optimizers use it (`xtf.optim.Placement`)."""

    leaves: Mapping[Path, Placement]
    donate: bool = False
    _known: list[_Known] = field(default_factory=list["_Known"], init=False, compare=False, repr=False)

    def norm(self, grads: Tree) -> Tensor:
        """Global L2 norm of a tree of this rank's gradients, each element counted once whatever axes it lies on. Shape ().

        The last one is known: a step and the clipping of its gradients ask for the same.
        """
        leaves = tree.leaves(grads)
        which = [(id(leaf), -1 if leaf is None else leaf._version) for leaf in leaves]
        if not self._known or self._known[0].which != which:
            self._known[:] = [_Known(which, leaves, self._norm(grads))]
        return self._known[0].norm

    def _norm(self, grads: Tree) -> Tensor:
        sums: dict[tuple[str, ...], tuple[list[Axis], list[Tensor]]] = {}
        present = {path: grad for path, grad in tree.items(grads).items() if grad is not None}
        for path, norm in zip(present, vector_norms([*present.values()]), strict=True):
            axes = [split.axis for split in self.leaves[path].splits]
            names = tuple(sorted(self.leaves[path].axes))
            sums.setdefault(names, (axes, []))[1].append(norm.square())
        totals: list[Tensor] = []
        for axes, squares in sums.values():
            dtype = max((s.dtype for s in squares), key=lambda d: d.itemsize)
            total = torch.stack([s.to(dtype) for s in squares]).sum()
            totals.append(join(*axes).start_all_reduce(total, label="norm").wait() if axes else total)
        return torch.stack(totals).sum().sqrt() if totals else torch.zeros(())

    def matrices(self, path: Path, local: Tensor) -> Tensor:
        """A leaf with its last two dims whole; leading dims (stacked experts) stay split where no split of a matrix precedes theirs."""
        below = self._first_matrix_split(path)
        return local if below is None else uncut(local, self.leaves[path], below=below)

    def cut(self, path: Path, whole: Tensor) -> Tensor:
        """Back from `matrices` to what this rank keeps."""
        below = self._first_matrix_split(path)
        return whole if below is None else cut(whole, self.leaves[path], below=below)

    def _first_matrix_split(self, path: Path) -> int | None:
        placement = self.leaves[path]
        matrix = len(placement.spec.shape) - 2
        return next((i for i, split in enumerate(placement.splits) if split.dim >= matrix), None)
