"""The mesh: which ranks stand where, and how a batch is cut."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import gloo
from xtf.mesh import Mesh, join, mesh, simulate, split_batch

SIZES = [{"data": 1}, {"data": 8}, {"data": 4, "expert": 2}, {"expert": 2, "data": 3}, {"pod": 2, "data": 2, "expert": 2}, {"a": 1, "b": 3}]


def brute_members(sizes: dict[str, int], rank: int, names: tuple[str, ...]) -> list[int]:
    """The ranks of an axis, by listing every coordinate."""
    places = [dict(zip(sizes, place, strict=True)) for place in itertools.product(*(range(size) for size in sizes.values()))]
    on_axis = [r for r, place in enumerate(places) if all(place[n] == places[rank][n] for n in sizes if n not in names)]
    return sorted(on_axis, key=lambda r: [places[r][n] for n in names])


def _gathered(mesh: Mesh) -> dict[tuple[str, ...], tuple[list[int], int]]:
    """For each way to join axes, the ranks that a gather brings, and the place on the axis."""
    found = {}
    for count in range(1, len(mesh.sizes) + 1):
        for names in itertools.permutations(mesh.sizes, count):
            axis = mesh.join(*names)
            assert axis is mesh.join(*names) and axis.name == ",".join(names) and axis.names == names
            found[names] = axis.all_gather(torch.tensor([mesh.rank])).tolist(), axis.index
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_members_simulated(sizes: dict[str, int]) -> None:
    for rank, found in enumerate(simulate(_gathered, **sizes)):
        for names, (members, index) in found.items():
            assert members == brute_members(sizes, rank, names)
            assert members[index] == rank


@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 2}, {"data": 1, "expert": 3}, {"data": 2}], ids=str)
def test_members_gloo(sizes: dict[str, int]) -> None:
    ranks = sizes["data"] * sizes.get("expert", 1)
    for rank, found in enumerate(gloo.run(_gathered, ranks=ranks, **sizes)):
        for names, (members, index) in found.items():
            assert members == brute_members(sizes, rank, names)
            assert members[index] == rank


def test_coordinate() -> None:
    found = simulate(lambda m: (m.rank, m.size, tuple(m.coordinate.values()), m["b"].index, m["b"].size, list(m), "a" in m), a=2, b=3)
    assert found == [(r, 6, divmod(r, 3), r % 3, 3, ["a", "b"], True) for r in range(6)]


def test_join_function() -> None:
    def body(m: Mesh) -> None:
        assert join(m["data"]) is m["data"]
        assert join(m["data"], m["expert"]) is m.join("data", "expert")
        assert join(m.join("pod", "data"), m["expert"]) is m.join("pod", "data", "expert")
        with pytest.raises(ValueError, match="one mesh"):
            join()
        with pytest.raises(ValueError, match=r"different axes.*'data', 'data'"):
            join(m["data"], m["data"])
        with pytest.raises(ValueError, match="different axes"):
            join(m.join("pod", "data"), m["data"])
        with pytest.raises(ValueError, match=r"no axis 'tensor'.*'pod', 'data', 'expert'"):
            m["tensor"]
        with pytest.raises(ValueError, match="one mesh"):
            join(m["data"], Mesh({"data": 1}, 0, m._build)["data"])  # pyright: ignore[reportPrivateUsage]

    simulate(body, pod=1, data=2, expert=2)


def test_one_process() -> None:
    assert not dist.is_initialized()
    alone = mesh()
    assert (alone.sizes, alone.size, alone.rank) == ({"data": 1}, 1, 0)
    assert mesh(data=-1, expert=1).sizes == {"data": 1, "expert": 1}
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 2}, "hold 2 ranks, but there are 1"),
        ({"data": 4, "expert": 2}, "hold 8 ranks, but there are 1"),
        ({"data": -1, "expert": 2}, "hold 2 ranks, but there are 1"),
        ({"data": -1, "expert": -1}, "only one axis"),
        ({"data": 0}, "'data' must be 1 or more"),
        ({"data": -2}, "'data' must be 1 or more"),
    ],
)
def test_sizes_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh(**sizes)


def test_simulate_refuses() -> None:
    with pytest.raises(ValueError, match="'data' must be 1 or more, got -1"):
        simulate(lambda m: None, data=-1)
    with pytest.raises(ValueError, match="simulations do not nest"):
        simulate(lambda m: simulate(lambda inner: None, data=2), data=2)
    assert simulate(lambda m: m.sizes) == [{"data": 1}]


def _world(m: Mesh) -> tuple[dict[str, int], str | None]:
    sizes = mesh(expert=3, data=-1).sizes
    try:
        mesh(data=2)
    except ValueError as error:
        return sizes, str(error)
    return sizes, None


def test_initialised_world_is_used() -> None:
    for sizes, error in gloo.run(_world, ranks=3):
        assert sizes == {"expert": 3, "data": 1}
        assert error is not None and "hold 2 ranks, but there are 3" in error


@pytest.fixture
def torchrun_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("torchrun_of_one")
def test_environment_starts_the_world() -> None:
    made = mesh(data=-1)
    assert made.sizes == {"data": 1}
    assert dist.is_initialized() and dist.get_backend() == "gloo"


def test_torchrun() -> None:
    """And nothing holds a group that was taken down: its threads would, at the end of the interpreter, now and then abort it."""
    script = """
import weakref
import torch
import torch.distributed as dist
from xtf.mesh import mesh
made = mesh(data=2, expert=-1)
print(made["data"].all_gather(torch.tensor([5])).tolist(), flush=True)
import torch._dynamo
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
print("gone" if group() is None else "held", flush=True)
try:
    made["data"].barrier()
except RuntimeError as error:
    print(error, flush=True)
"""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [*launch, sys.executable, "-c", script]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=True)
    assert done.stdout.count("[5, 5]") == done.stdout.count("gone") == done.stdout.count("make a new mesh") == 2


def _batch(rows: int) -> dict[str, Tensor]:
    ids = torch.arange(rows * 3).reshape(rows, 3)
    return {"input_ids": ids + 1, "labels": ids, "loss_weights": ids.float() + 0.5, "positions": ids % 3}


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 12])
def test_split_batch(rows: int) -> None:
    batch = _batch(rows)
    parts = simulate(lambda m: split_batch(batch, m), data=3, expert=2)
    count = -(-rows // 6)
    padding = {"input_ids": 0, "labels": -100, "document_ids": -1, "loss_weights": 0.0, "positions": 0}
    padded = rows % 6 != 0
    assert all(part.keys() == batch.keys() | ({"document_ids"} if padded else set()) for part in parts)
    for name in parts[0]:
        whole = torch.cat([part[name] for part in parts])
        real = batch.get(name, torch.zeros(rows, 3, dtype=torch.int64))
        assert all(part[name].shape == (count, 3) for part in parts)
        assert whole.dtype == real.dtype and torch.equal(whole[:rows], real)
        assert bool((whole[rows:] == padding[name]).all())


def test_split_batch_keeps_documents() -> None:
    batch = _batch(3) | {"document_ids": torch.tensor([[0, 0, 1], [0, 1, 2], [7, 7, -1]])}
    parts = simulate(lambda m: split_batch(batch, m)["document_ids"].tolist(), data=2)
    assert parts == [[[0, 0, 1], [0, 1, 2]], [[7, 7, -1], [-1, -1, -1]]]


def test_split_batch_axes() -> None:
    batch = {"input_ids": torch.arange(4).reshape(4, 1)}
    parts = simulate(
        lambda m: [split_batch(batch, m, axes=a)["input_ids"].flatten().tolist() for a in (["data"], ["b", "data"], [])], data=2, b=2
    )
    assert [part[0] for part in parts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [part[1] for part in parts] == [[0], [2], [1], [3]]
    assert all(part[2] == [0, 1, 2, 3] for part in parts)


@pytest.mark.parametrize(
    ("change", "axes", "message"),
    [
        ({"inputs": torch.zeros(2, 3)}, None, "unknown keys"),
        ({"labels": torch.zeros(2, 4)}, None, r"'labels'.*\(2, 4\).*\(2, 3\)"),
        ({}, ["tensor"], "axes of the mesh"),
        ({}, ["data", "data"], "axes of the mesh"),
    ],
)
def test_split_batch_refuses(change: dict[str, Tensor], axes: list[str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(_batch(2) | change, mesh(), axes=axes)
    with pytest.raises(ValueError, match="no 'input_ids'"):
        split_batch({"labels": torch.zeros(2, 3)}, mesh())
