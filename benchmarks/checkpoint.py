"""What saving a training state costs, and what happens when a file of it is lost or damaged.

    python benchmarks/checkpoint.py --megabytes 200

One process, one state (a llama and AdamW in float32), saved in turn by `xtf.save_state`, by `xtf.StateSaver` (of a step that does not
donate, and of one that does) and by ``torch.distributed.checkpoint``: ``save`` and ``async_save``, to its default storage and to
safetensors (``HuggingFaceStorageWriter``). Prints for each the pause of the caller (of `xtf.StateSaver`: also what an update would wait
after one forward of 256 tokens), the time until everything is on the disk, GB/s, and the most memory above what was used before, medians
of some rounds; then what each says when it loads a checkpoint of two files of which one is missing, or has one bit that is another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import xtf
from xtf.checkpoint.training import own_blocks
from xtf.mesh import Mesh
from xtf.models import from_hf
from xtf.state import State
from xtf.step import TrainStep

Save = Callable[[Path], Callable[[], tuple[float, float] | None]]
"""Begin to save to a folder; what it returns waits for the end, and may say how long the caller was paused after the beginning, and when
the end was."""


def step_of(megabytes: float, hidden: int) -> TrainStep:
    """A step whose state has about so many MB: a parameter and its two moments are 12 bytes."""
    vocab, inner = 8 * hidden, 3 * hidden
    layer = 4 * hidden**2 + 3 * hidden * inner
    layers = max(1, round((megabytes * 1e6 / 12 - vocab * hidden) / layer))
    model = from_hf(
        {
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": hidden // 4, "vocab_size": vocab, "rms_norm_eps": 1e-5,
            "rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    return xtf.train_step(model, xtf.optim.adamw(lr=1e-3))


def leaves(step: TrainStep, state: State) -> dict[str, Tensor]:
    return {block.name: block.value for block in own_blocks(step, state).blocks}


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@contextmanager
def peak() -> Iterator[list[int]]:
    """Within the block, the most resident memory above that at its beginning goes into the list."""
    found, over, before = [0], threading.Event(), resident()

    def watch() -> None:
        while not over.wait(0.001):
            found[0] = max(found[0], resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def measured(saves: Mapping[str, Save], folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of ``pause`` and ``total`` seconds; ``memory``, the most of all rounds, in bytes. Ways take turns."""
    seen: dict[str, dict[str, list[float]]] = {name: {"pause": [], "total": [], "memory": []} for name in saves}
    for _ in range(rounds):
        for name, save in saves.items():
            with peak() as memory:
                began = time.perf_counter()
                wait = save(folder / "state")
                paused = time.perf_counter() - began
                more, ended = wait() or (0.0, time.perf_counter())
            seen[name]["total"].append(ended - began)
            seen[name]["pause"].append(paused + more)
            seen[name]["memory"].append(memory[0])
            shutil.rmtree(folder / "state")
    return {
        name: {key: max(values) if key == "memory" else statistics.median(values) for key, values in found.items()}
        for name, found in seen.items()
    }


def ways(step: TrainStep, state: State) -> dict[str, Save]:
    donating = xtf.compile(step, backend="eager", donate=True)
    savers = {"not donated": xtf.StateSaver(step), "donated": xtf.StateSaver(donating)}
    tensors, ids = leaves(step, state), torch.arange(256).remainder(step.model.vocab)[None]

    def sync(path: Path) -> Callable[[], None]:
        xtf.save_state(step, state, path)
        return lambda: None

    def in_background(saver: xtf.StateSaver) -> Save:
        def begin(path: Path) -> Callable[[], tuple[float, float]]:
            before, ended = saver.waited, list[float]()
            saver.save(state, path, then=lambda: ended.append(time.perf_counter()))

            def wait() -> tuple[float, float]:
                step.loss(state.params, {"input_ids": ids, "labels": ids})  # what a step does before it overwrites, and less
                state.release()  # as its update does
                saver.wait()
                return saver.waited - before, ended[0]

            return wait

        return begin

    def torchs(writer: Callable[[Path], Any], background: bool) -> Save:
        def begin(path: Path) -> Callable[[], None]:
            if not background:
                dcp_save(dict(tensors), storage_writer=writer(path), no_dist=True)
                return lambda: None
            future: Any = dcp_async_save(dict(tensors), storage_writer=writer(path), no_dist=True)
            return lambda: future.result() and None

        return begin

    found = {"xtf.save_state": sync}
    found |= {f"xtf.StateSaver, {name}": in_background(saver) for name, saver in savers.items()}
    for name, writer in (("default", FileSystemWriter), ("safetensors", HuggingFaceStorageWriter)):
        found |= {f"dcp.save, {name}": torchs(writer, False), f"dcp.async_save, {name}": torchs(writer, True)}
    return found


# Damage


def outcome(load: Callable[[], Mapping[str, Tensor]], wanted: Mapping[str, Tensor]) -> str:
    try:
        found = load()
    except (Exception, CheckpointException) as error:
        lines = str(error).strip().splitlines()
        return f"error: {lines[-1] if isinstance(error, CheckpointException) else lines[0]}"
    wrong = {name: int((value != wanted[name]).sum()) for name, value in found.items() if not torch.equal(value, wanted[name])}
    return f"loads, {sum(wrong.values()):,} values of {len(wrong)} leaves are not what was saved" if wrong else "loads what was saved"


def lose(folder: Path) -> None:
    sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".distcp"))[0].unlink()


def flip(folder: Path) -> None:
    """One bit of one value, near the end of a file."""
    file = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".distcp"))[-1]
    data = bytearray(file.read_bytes())
    data[len(data) * 7 // 8] ^= 16
    file.write_bytes(data)


def damages(step: TrainStep, state: State, folder: Path) -> dict[str, dict[str, str]]:
    """For each format, what loading it gives."""
    wanted = leaves(step, state)

    def on_two(mesh: Mesh) -> None:
        sharded = xtf.transforms.shard(mesh["data"])(step)
        xtf.save_state(sharded, xtf.load_state(sharded, folder / "whole")[0], folder / "two")

    def of_xtf(path: Path, prefix: str) -> Mapping[str, Tensor]:
        return leaves(step, xtf.load_state(step, path)[0])

    def of_torch(reader: Callable[[str], Any]) -> Callable[[Path, str], Mapping[str, Tensor]]:
        def load(path: Path, prefix: str) -> Mapping[str, Tensor]:
            found = {name: torch.zeros_like(value) for name, value in wanted.items() if name.startswith(prefix)}
            dcp_load(found, storage_reader=reader(str(path)), no_dist=True)
            return found

        return load

    xtf.save_state(step, state, folder / "whole")
    xtf.simulate(on_two, data=2)
    dcp_save(dict(wanted), storage_writer=FileSystemWriter(folder / "default", thread_count=2), no_dist=True)
    formats = {
        "xtf, two ranks": ("two", of_xtf),
        "the same files, by dcp's safetensors reader": ("two", of_torch(HuggingFaceStorageReader)),
        "dcp, default storage": ("default", of_torch(FileSystemReader)),
    }
    table = dict[str, dict[str, str]]()
    for name, (made, load) in formats.items():
        table[name] = {}
        for what, spoil in (("untouched", None), ("a file missing (parameters are loaded)", lose), ("a bit flipped", flip)):
            copy = folder / "copy"
            shutil.copytree(folder / made, copy)
            if spoil is not None:
                spoil(copy)
            prefix = "params." if spoil is lose else ""  # what is not split is missed by every reader
            table[name][what] = outcome(lambda load=load, copy=copy, prefix=prefix: load(copy, prefix), wanted).replace(str(folder), "...")
            shutil.rmtree(copy)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    about = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    about.add_argument("--megabytes", type=float, default=200, help="of the state")
    about.add_argument("--hidden", type=int, default=512, help="size of the model")
    about.add_argument("--rounds", type=int, default=5)
    about.add_argument("--folder", type=Path, help="where to save (by default a temporary folder)")
    about.add_argument("--json", type=Path, help="write the figures here too")
    given = about.parse_args(arguments)
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    step = step_of(given.megabytes, given.hidden)
    state = step.init(0)
    size = sum(value.nbytes for value in leaves(step, state).values())
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        figures = measured(ways(step, state), Path(made), given.rounds)
        damage = damages(step, state, Path(made))
    console, whole = Console(width=150), figures["xtf.save_state"]["pause"]
    table = Table(
        "", "pause, s", "÷ xtf.save_state", "until it is there, s", "GB/s", "memory, MB", title=f"a state of {size / 1e6:,.0f} MB"
    )
    for name, row in figures.items():
        rate = size / row["total"] / 1e9
        cells = (f"{row['pause']:.3f}", f"{row['pause'] / whole:.1%}", f"{row['total']:.3f}", f"{rate:.2f}", f"{row['memory'] / 1e6:,.0f}")
        table.add_row(name, *cells)
    console.print(table)
    spoiled = Table("", *next(iter(damage.values())), title="two files of which")
    for name, said in damage.items():
        spoiled.add_row(name, *said.values())
    console.print(spoiled)
    if given.json is not None:
        given.json.write_text(json.dumps({"bytes": size, "saves": figures, "damage": damage}, indent=1))


if __name__ == "__main__":
    main()
