"""Saving while training goes on: the same bits as saving in between, nothing written and nothing copied where training waits, and every
failure raised on all ranks, once."""

from __future__ import annotations

import builtins
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import xtf
from tests import gloo, laws, testing_state
from tests.testing_state import bits_of, run
from xtf import testing
from xtf.checkpoint import CheckpointError, StateSaver, background, latest, load_state, prune, save_state, saving, snapshot
from xtf.checkpoint.shard_file import Block
from xtf.mesh import Mesh, simulate, split_batch
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import chunk_loss, expert_parallel, shard, swap_optimizer

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "donated": {"donate": True},
    "swapped": {"donate": True, "swap": True, "optimizer": "muon"},
    "swapped, not donated": {"swap": True},
    "sharded": {"layout": {"data": 2}, "donate": True},
    "replicas": {"layout": {"data": 2, "replicate": 2}, "donate": True, "swap": True},
    "experts": {"layout": {"data": 2, "expert": 2}, "donate": True, "model": "qwen3_moe"},
}


def make_step(mesh: Mesh | None, case: Mapping[str, Any]) -> TrainStep:
    parts: list[Any] = [chunk_loss(7)]
    if mesh is not None:
        axes = [mesh[name] for name in mesh if name != "replicate"]
        parts.append(shard(*axes, replicate=mesh["replicate"] if "replicate" in mesh.sizes else None))
        parts += [expert_parallel(mesh["expert"])] if "expert" in mesh.sizes else []
    parts += [swap_optimizer()] if case.get("swap") else []
    optimizer = laws.OPTIMIZERS["muon"]() if case.get("optimizer") == "muon" else testing.default_optimizer()
    step = compose(*parts)(train_step(laws.model(case.get("model", "tiny")), optimizer))
    return xtf.compile(step, backend="eager", donate=bool(case.get("donate")))


def advance(step: TrainStep, mesh: Mesh | None, state: Any, steps: int) -> tuple[Any, list[Tensor]]:
    losses: list[Tensor] = []
    for _ in range(steps):
        batch = testing.random_batch(61, seed=int(state.step))
        state, metrics = step(state, batch if mesh is None else split_batch(batch, mesh))
        losses.append(metrics["loss"])
    return state, losses


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@contextmanager
def slow(monkeypatch: pytest.MonkeyPatch) -> Generator[threading.Event]:
    """Files are written only when the event is set."""
    gate, plain = threading.Event(), saving.write_shard

    def write(*args: Any) -> Any:
        gate.wait(60)
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_shard", write)
        yield gate


def in_background(mesh: Mesh | None, case: Mapping[str, Any], folder: Path, gate: threading.Event) -> list[Tensor]:
    """Save at steps 2 and 4, train on while nothing is written yet, and to step 6."""
    step = make_step(mesh, case)
    with StateSaver(step) as saver:
        state, losses = advance(step, mesh, step.init(0), 2)
        saver.save(state, folder / "step-2", extra={"at": 2})
        state, more = advance(step, mesh, state, 2)
        assert not saver.done() and not (folder / "step-2").exists()
        if mesh is not None:
            mesh.join(*mesh).barrier()
        gate.set()
        saver.save(state, folder / "step-4", extra={"at": 4})
        state, last = advance(step, mesh, state, 2)
    assert saver.done()
    return losses + more + last


def in_between(mesh: Mesh | None, case: Mapping[str, Any], folder: Path) -> list[Tensor]:
    step = make_step(mesh, case)
    state, losses = step.init(0), list[Tensor]()
    for at in (2, 4, 6):
        state, more = advance(step, mesh, state, 2)
        losses += more
        if at < 6:
            save_state(step, state, folder / f"step-{at}", extra={"at": at})
    return losses


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_files_are_those_of_a_save_that_training_waits_for(
    tmp_path: Path, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = case.get("layout", {})
    with slow(monkeypatch) as gate:
        losses = run(layout, in_background, case, tmp_path / "a", gate)
    assert all(bits_of(a) == bits_of(b) for a, b in zip(losses, run(layout, in_between, case, tmp_path / "b"), strict=True))
    for name in ("step-2", "step-4"):
        assert files(tmp_path / "a" / name) == files(tmp_path / "b" / name)
    assert latest(tmp_path / "a") == tmp_path / "a" / "step-4"
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["latest", "step-2", "step-4"]


def on_real_ranks(mesh: Mesh, case: Mapping[str, Any], folder: Path) -> bool:
    step = make_step(mesh, case)
    with StateSaver(step) as saver:
        state, _ = advance(step, mesh, step.init(0), 2)
        saver.save(state, folder / "a")
        saved = bits_of(state)
        state, _ = advance(step, mesh, state, 3)
    return bits_of(load_state(step, folder / "a")[0]) == saved != bits_of(state)


@pytest.mark.parametrize("case", [CASES["sharded"], {"donate": True, "swap": True}], ids=["sharded", "swapped"])
def test_on_real_ranks(tmp_path: Path, case: dict[str, Any]) -> None:
    assert gloo.run(on_real_ranks, case, tmp_path, ranks=2, data=2) == [True, True]


# What training waits for


def test_where_training_waits_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, here, written = make_step(None, {"donate": True}), threading.get_ident(), list[str]()
    plain_open, plain_sync = builtins.open, os.fsync

    def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        if threading.get_ident() == here and set(mode) & set("wxa+"):
            written.append(str(file))
        return plain_open(file, mode, *args, **more)

    def synced(fd: int) -> None:
        if threading.get_ident() == here:
            written.append("fsync")
        plain_sync(fd)

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(os, "fsync", synced)
    with StateSaver(step) as saver:
        saver.save(step.init(0), tmp_path / "a")
    assert written == []
    save_state(step, step.init(0), tmp_path / "b")
    assert "fsync" in written and any("rank-00000" in name for name in written)


def test_nothing_is_copied_where_nothing_is_overwritten(tmp_path: Path) -> None:
    for donate, swap in ((False, False), (False, True), (True, False), (True, True)):
        step = make_step(None, {"donate": donate, "swap": swap})
        state = step.init(0)
        with StateSaver(step) as saver:
            saver.save(state, tmp_path / "a")
            saver.wait()
            held, kept = saver.held, {name: buffer.data_ptr() for name, buffer in saver._buffers.items()}
            saver.save(state, tmp_path / "a")
        size = sum(leaf.nbytes for leaf in testing_state.tensors(state))
        assert held == (size if donate else 0)
        assert {name: buffer.data_ptr() for name, buffer in saver._buffers.items()} == kept  # one snapshot, used again


def test_a_state_that_is_overwritten_all_the_same_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, donating = make_step(None, {}), make_step(None, {"donate": True})
    with slow(monkeypatch) as gate, StateSaver(step) as saver:
        state = step.init(0)
        saver.save(state, tmp_path / "a")
        advance(donating, None, state, 1)
        gate.set()
        with pytest.raises(CheckpointError, match=r"leaves of the state were overwritten while they were saved"):
            saver.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("finite", [True, False])
def test_an_update_waits_until_all_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finite: bool) -> None:
    """Also the update after a step that was skipped, whose state has the memory of the one before."""
    gate, plain = threading.Event(), snapshot.copy_to

    def copy_to(buffer: Tensor, value: Tensor) -> Tensor:
        gate.wait(60)
        return plain(buffer, value)

    monkeypatch.setattr(snapshot, "copy_to", copy_to)
    step = make_step(None, {"donate": True})
    state = step.init(0)
    if not finite:
        testing_state.tensors(state.params)[0].fill_(float("nan"))
    saved = bits_of(state)
    with StateSaver(step) as saver:
        saver.save(state, tmp_path / "a")
        state = state.replace(skipped=torch.tensor(0))  # of the same memory
        threading.Timer(0.3, gate.set).start()
        began = time.monotonic()
        state, metrics = step(state, testing.random_batch(61))
        assert time.monotonic() - began > 0.25 and saver.waited > 0.1 and int(metrics["skipped"]) == (not finite)
        state, _ = step(state, testing.random_batch(61))
    assert bits_of(load_state(step, tmp_path / "a")[0]) == saved != bits_of(state)


def test_memory_that_cannot_be_had_is_an_error_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_to(buffer: Tensor, value: Tensor) -> Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(snapshot, "copy_to", copy_to)
    step = make_step(None, {"donate": True})
    saver, state = StateSaver(step), step.init(0)
    saver.save(state, tmp_path / "a")
    advance(step, None, state, 1)  # it does not wait for ever
    with pytest.raises(MemoryError, match="no room"):
        saver.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_thread_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name.startswith("saving "):
            raise RuntimeError("can't start new thread")
        plain(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    step = make_step(None, {"donate": True})
    saver, state = StateSaver(step), step.init(0)
    saver.save(state, tmp_path / "a")
    advance(step, None, state, 1)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        saver.wait()
    assert saver.done() and list(tmp_path.iterdir()) == []


def test_one_save_at_a_time_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = make_step(None, {}), list[tuple[list[str], bool]]()
    here = threading.get_ident()

    def then() -> None:
        prune(tmp_path, keep_last=1)
        seen.append((sorted(p.name for p in tmp_path.iterdir()), threading.get_ident() == here))

    with slow(monkeypatch) as gate, StateSaver(step) as saver:
        saver.save(step.init(0), tmp_path / "step-0", then=then)
        threading.Timer(0.3, gate.set).start()
        began = time.monotonic()
        saver.save(step.init(0).replace(step=torch.tensor(1)), tmp_path / "step-1", then=then)
        assert time.monotonic() - began > 0.2 and (tmp_path / "step-0").is_dir()
    assert seen == [(["latest", "step-0"], False), (["latest", "step-1"], False)]


# Failures


def failures(mesh: Mesh, folder: Path, spoil: Callable[[Mesh, Path], Callable[[], None]], method: str) -> str:
    """Save well, then spoil something, save again, train on, and hear of it once, by ``method``. Then save well again."""
    step = make_step(mesh, {"donate": True})
    everyone = mesh.join(*mesh)
    state, _ = advance(step, mesh, step.init(0), 1)
    saver = StateSaver(step, timeout=2)
    saver.save(state, folder / "a")
    saver.wait()
    everyone.barrier()
    mend, said = spoil(mesh, folder), "no error"
    everyone.barrier()
    saver.save(state, folder / "b")
    state, _ = advance(step, mesh, state, 1)
    try:
        saver.wait() if method == "wait" else saver.save(state, folder / "c")
    except (OSError, CheckpointError) as error:
        said = f"{type(error).__name__}: {error}"
    mend()
    everyone.barrier()
    saver.wait()  # it is not raised again
    saver.save(state, folder / "d")
    saver.wait()
    return said


def no_disk(rank: int) -> Callable[[Mesh, Path], Callable[[], None]]:
    def spoil(mesh: Mesh, folder: Path) -> Callable[[], None]:
        plain = saving.write_shard

        def full(file: Path, blocks: Any, *rest: Any) -> Any:
            if file.name == f"rank-{rank:05}.safetensors" and file.parent.name.startswith(".b."):
                plain(file, blocks[:3], *rest)
                raise OSError(errno.ENOSPC, "No space left on device")
            return plain(file, blocks, *rest)

        return replaced(mesh, rank, "write_shard", full)

    return spoil


def no_record(mesh: Mesh, folder: Path) -> Callable[[], None]:
    """Rank 1 can write neither its file nor its record."""
    plain = saving.write_shard

    def gone(file: Path, blocks: Any, *rest: Any) -> Any:
        if file.name == "rank-00001.safetensors" and file.parent.name.startswith(".b."):
            os.rename(file.parent, file.parent.with_suffix(".gone"))
            time.sleep(0.1)
            raise OSError(errno.EIO, "Input/output error")
        return plain(file, blocks, *rest)

    return replaced(mesh, 1, "write_shard", gone)


def replaced(mesh: Mesh, rank: int, name: str, value: Any) -> Callable[[], None]:
    plain = getattr(saving, name)
    if mesh.rank == rank:
        setattr(saving, name, value)
    return lambda: setattr(saving, name, plain) if mesh.rank == rank else None


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["wait", "save"])
def test_no_space_on_one_rank_ends_all_and_leaves_nothing(tmp_path: Path, rank: int, method: str, real: bool) -> None:
    if real:
        said = gloo.run(spoiled_disk, tmp_path, rank, method, ranks=2, data=2)
    else:
        said = simulate(lambda mesh: spoiled_disk(mesh, tmp_path, rank, method), data=2)
    assert said[rank].startswith("OSError: [Errno 28] No space left on device") and str(tmp_path / "b") in said[rank]
    assert said[1 - rank].startswith(f"CheckpointError: the training checkpoint {tmp_path / 'b'} was not written: rank {rank} failed")
    assert "No space left on device" in said[1 - rank]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "d", "latest"] and latest(tmp_path) == tmp_path / "d"


def spoiled_disk(mesh: Mesh, folder: Path, rank: int, method: str) -> str:
    return failures(mesh, folder, no_disk(rank), method)


def test_a_rank_that_can_write_nothing_at_all(tmp_path: Path) -> None:
    said = simulate(lambda mesh: failures(mesh, tmp_path, no_record, "wait"), data=2)
    assert said[1].startswith("OSError: [Errno 5] Input/output error") and "rank 1 failed: OSError" in said[0]


def test_a_rank_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = background._Work._run

    def lost(self: Any) -> None:
        if self.save.rank == 1:
            self.written.set()  # as if its record were on another file system
            self.over.set()
        else:
            plain(self)

    monkeypatch.setattr(background._Work, "_run", lost)

    def save(mesh: Mesh) -> str:
        step = make_step(mesh, {})
        saver = StateSaver(step, timeout=0.2)
        saver.save(step.init(0), tmp_path / "a")
        with pytest.raises(CheckpointError) as error:
            saver.wait()
        return str(error.value)

    first, second = simulate(save, data=2)
    for message in (first, second):
        assert "the files of ranks [1] (1 of 2) were not there 0.2 s after that of the first rank" in message
    assert "rank 0 failed" in second and list(tmp_path.iterdir()) == []


def test_a_file_limit_of_the_system(tmp_path: Path) -> None:
    step, old = make_step(None, {}), resource.getrlimit(resource.RLIMIT_FSIZE)
    saver, handler = StateSaver(step), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
    try:
        saver.save(step.init(0), tmp_path / "a")
        with pytest.raises(OSError, match="File too large"):
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_from_the_start_is_raised_at_once_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")

    def save(mesh: Mesh) -> list[str]:
        step, said = make_step(mesh, {}), list[str]()
        state, saver = step.init(0), StateSaver(step)
        for path, extra in (("file", {}), ("taken", {}), ("file/a", {}), ("a", {"x": {1}}), ("a", {"x": (1,)})):
            try:
                saver.save(state, tmp_path / path, extra=extra)
            except (ValueError, OSError) as error:
                said.append(str(error))
            assert saver.done()
            saver.wait()
        return said

    for said in simulate(save, data=2):
        for message, expected in zip(said, ("is a file", "thesis.txt", "file", "extra", "extra"), strict=True):
            assert expected in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]
    for timeout in (0, -1, float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError, match="StateSaver\\(timeout="):
            StateSaver(make_step(None, {}), timeout=timeout)  # pyright: ignore[reportArgumentType]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.mkdir

    def refused(self: Path, *args: Any, **more: Any) -> None:
        if self.name.startswith(".a."):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        plain(self, *args, **more)

    monkeypatch.setattr(Path, "mkdir", refused)

    def save(mesh: Mesh) -> str:
        step = make_step(mesh, {})
        with pytest.raises((OSError, CheckpointError)) as error, StateSaver(step) as saver:
            saver.save(step.init(0), tmp_path / "a")
        return str(error.value)

    for message in simulate(save, data=2):
        assert "Permission denied" in message and str(tmp_path / "a") in message


def test_what_follows_may_fail_too(tmp_path: Path) -> None:
    def then() -> None:
        raise OSError("prune")

    step = make_step(None, {})
    saver = StateSaver(step)
    saver.save(step.init(0), tmp_path / "a", then=then)
    with pytest.raises(OSError, match="prune") as error:
        saver.wait()
    assert error.value.__notes__ == [f"{tmp_path / 'a'} is complete; this came after"]
    load_state(step, tmp_path / "a")


# Ends


@pytest.mark.parametrize(("error", "kept"), [(RuntimeError("mine"), True), (KeyboardInterrupt(), False)])
def test_an_exception_finishes_or_drops_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, kept: bool
) -> None:
    with slow(monkeypatch) as gate, pytest.raises(type(error)):
        step = make_step(None, {})
        with StateSaver(step) as saver:
            saver.save(step.init(0), tmp_path / "a")
            threading.Timer(0.2, gate.set).start()
            raise error
    assert (tmp_path / "a").exists() == kept and not list(tmp_path.glob(".*"))
    if kept:
        load_state(step, tmp_path / "a")
    else:
        assert "was not written either" in str(getattr(error, "__notes__", ""))


def test_a_rank_that_fails_does_not_leave_the_others_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "GRACE", 0.5)

    def save(mesh: Mesh) -> None:
        step = make_step(mesh, {})
        with StateSaver(step) as saver:
            saver.save(step.init(0), tmp_path / "a")
            if mesh.rank == 1:
                raise RuntimeError("mine")
            mesh["data"].barrier()

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="mine"):
        simulate(save, data=2)
    assert time.monotonic() - began < 20
    load_state(make_step(None, {}), tmp_path / "a")  # all files were written


PROGRAM = """
import sys, time
from pathlib import Path
from tests.test_background_save import make_step
from xtf.checkpoint import StateSaver, saving
step, plain = make_step(None, {}), saving.write_shard
def write(*args):
    time.sleep(0.5)
    if sys.argv[2] == "fail":
        raise OSError(28, "No space left on device")
    return plain(*args)
saving.write_shard = write
saver = StateSaver(step)
saver.save(step.init(0), Path(sys.argv[1]) / "a")
if sys.argv[2] == "forgotten":
    del saver
    sys.exit(3)
print("saving", flush=True)
if sys.argv[2] == "signal":
    time.sleep(60)
"""


def program(folder: Path, how: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), how], env=env, stdout=-1, stderr=-1, text=True)


def test_the_end_of_the_program_finishes_and_says_what_failed(tmp_path: Path) -> None:
    hows = ("forgotten", "fail", "signal")
    started = {how: program(tmp_path / how, how) for how in hows}
    assert started["signal"].stdout is not None and started["signal"].stdout.readline() == "saving\n"
    started["signal"].send_signal(signal.SIGTERM)
    ended = {how: (process.communicate(timeout=60)[1], process.returncode) for how, process in started.items()}
    assert ended["forgotten"] == ("", 3)
    load_state(make_step(None, {}), tmp_path / "forgotten" / "a")
    assert "was not written: OSError: [Errno 28] No space left on device" in ended["fail"][0] and not list((tmp_path / "fail").iterdir())
    assert ended["signal"] == ("", -signal.SIGTERM) and latest(tmp_path / "signal") is None
    prune(tmp_path / "signal", keep_last=1)
    assert not list((tmp_path / "signal").iterdir())


# Records


def test_a_record_is_not_left_in_the_checkpoint(tmp_path: Path) -> None:
    def save(mesh: Mesh) -> None:
        step = make_step(mesh, {})
        with StateSaver(step) as saver:
            saver.save(step.init(0), tmp_path / "a")

    simulate(save, data=3)
    assert [p.name for p in sorted((tmp_path / "a").iterdir())] == [
        "config.json",
        *(f"rank-{i:05}.safetensors" for i in range(3)),
        "state.json",
    ]
    about = json.loads((tmp_path / "a" / "state.json").read_text())["state"]
    assert sorted(about["shards"]) == [f"rank-{i:05}.safetensors" for i in range(3)] and list(about["others"]) == ["config.json"]


def test_leaves_in_other_shapes_get_other_buffers() -> None:
    buffers: dict[str, Tensor] = {}
    for value in (torch.ones(3), torch.ones(4), torch.ones(4, dtype=torch.float64), torch.ones(()), torch.ones(3, 2).T):
        taken = snapshot.Snapshot([Block("a", tuple(value.shape), (0,), value)], copy=True, buffers=buffers).fill()
        assert bits_of(taken[0].value) == bits_of(value) and taken[0].value is buffers["a"]
