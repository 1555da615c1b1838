"""The whole state of training: resumed to the bit, on other layouts, killed while saving, damaged, and without disk."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import xtf
from tests import gloo, laws
from xtf import optim, testing, tree
from xtf.checkpoint import CheckpointError, latest, load_newest_state, load_state, prune, remove_leftovers, save_state, saving, shard_file
from xtf.checkpoint.training_index import read_index
from xtf.checkpoint_map import Named
from xtf.mesh import Mesh, simulate, split_batch
from xtf.model import Model
from xtf.optim import Optimizer
from xtf.spec import Init, ParamSpec
from xtf.state import State
from xtf.step import Sharding, TrainStep, compose, train_step
from xtf.transforms import accumulate, chunk_loss, precision, shard

OPTIMIZERS: Mapping[str, Callable[[], Optimizer]] = {
    "adamw": lambda: optim.adamw(lr=optim.warmup_linear(1e-2, 4, 20), weight_decay=0.1),
    "clip": testing.default_optimizer,
    "muon": laws.OPTIMIZERS["muon"],
    "sgd": lambda: optim.sgd(lr=1e-2, momentum=0.9, nesterov=True),
}
PRECISIONS: Mapping[str, Any] = {
    "mixed": {"params": torch.float32, "compute": torch.bfloat16, "reduce": torch.float32},
    "bf16": {"params": torch.bfloat16},
}


def make_step(mesh: Mesh | None, case: Mapping[str, Any]) -> TrainStep:
    """A step from factors: ``model``, ``optimizer``, ``micros``, ``precision``, ``donate``. The axis ``replicate`` holds replicas."""
    parts: list[Any] = [chunk_loss(7)]
    if mesh is not None:
        axes = [mesh[name] for name in mesh if name != "replicate"]
        parts.append(shard(*axes, replicate=mesh["replicate"] if "replicate" in mesh.sizes else None))
    parts += [accumulate(case["micros"])] if case.get("micros") else []
    parts += [precision(**PRECISIONS[case["precision"]])] if case.get("precision") else []
    step = compose(*parts)(train_step(laws.model(case.get("model", "tiny")), OPTIMIZERS[case.get("optimizer", "clip")]()))
    return xtf.compile(step, backend="eager", donate=True) if case.get("donate") else step


def train(step: TrainStep, mesh: Mesh | None, state: State, steps: int) -> tuple[State, list[Tensor]]:
    losses: list[Tensor] = []
    for _ in range(steps):
        batch = testing.random_batch(61, seed=int(state.step))
        state, metrics = step(state, batch if mesh is None else split_batch(batch, mesh))
        losses.append(metrics["loss"])
    return state, losses


def same_bits(a: Any, b: Any) -> bool:
    return tree.same_structure(a, b) and all(
        x is y or (x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y)))
        for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)
    )


def bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def run(layout: Mapping[str, int], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """On simulated ranks, or without a mesh."""
    return simulate(lambda mesh: fn(mesh, *args), **layout) if layout else [fn(None, *args)]


def whole(step: TrainStep, node: Any) -> Any:
    """A state, or a part of one, with whole leaves: trees of the parameters' structure are gathered, all else is as it is."""
    if tree.same_structure(node, step.model.specs):
        return step.full(node)
    if isinstance(node, State):
        return {name: whole(step, getattr(node, name)) for name in ("params", "opt", "step")}
    if isinstance(node, dict):
        return {key: whole(step, value) for key, value in node.items()}
    if isinstance(node, tuple):
        return type(node)(*(whole(step, x) for x in node)) if hasattr(node, "_fields") else tuple(whole(step, x) for x in node)
    return node


# Resumed to the bit

LAYOUTS: list[dict[str, int]] = [{}, {"data": 1}, {"data": 2}, {"data": 4}, {"data": 2, "replicate": 2}, {"replicate": 2}]
FACTORS: dict[str, Any] = {
    "layout": LAYOUTS,
    "optimizer": tuple(OPTIMIZERS),
    "precision": (None, "mixed", "bf16"),
    "donate": (False, True),
    "micros": (None, 2),
}


def resumed(mesh: Mesh | None, case: Mapping[str, Any], folder: Path) -> list[str]:
    """What differs between six steps, and three, saved, loaded in a new step, and three more."""
    step = make_step(mesh, case)
    straight, losses = train(step, mesh, step.init(0), 6)
    state, first = train(step, mesh, step.init(0), 3)
    save_state(step, state, folder / "a", extra={"seed": 0, "at": [3, None, "é"], "best": float("inf")})
    again = make_step(mesh, case)
    loaded, extra = load_state(again, folder / "a")
    wrong = [] if same_bits(loaded, state) else ["what is loaded"]
    wrong += [] if {x.device for x in tree.leaves(loaded) if x is not None} == {torch.device("cpu")} else ["devices"]
    wrong += [] if extra == {"seed": 0, "at": [3, None, "é"], "best": float("inf")} else [f"extra {extra}"]
    ended, last = train(again, mesh, loaded, 3)
    wrong += [] if same_bits(ended, straight) else ["the state after six steps"]
    return wrong + ([] if same_bits(first + last, losses) else ["losses"])


def name_of(case: Mapping[str, Any]) -> str:
    return "-".join("x".join(f"{k}{n}" for k, n in v.items()) if isinstance(v, dict) else f"{v}" for v in case.values())


MOE = {"layout": {"data": 2, "replicate": 2}, "optimizer": "muon", "model": "qwen3_moe", "precision": "mixed"}


@pytest.mark.parametrize("case", [*laws.pairwise(**FACTORS), MOE], ids=name_of)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, case: dict[str, Any]) -> None:
    assert all(wrong == [] for wrong in run(case["layout"], resumed, case, tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "latest"]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_resume_matrix(tmp_path: Path, layout: dict[str, int]) -> None:
    for at, case in enumerate(laws.product(**FACTORS | {"layout": [layout], "model": ("tiny", "qwen3_moe")})):
        assert all(wrong == [] for wrong in run(layout, resumed, case, tmp_path / str(at))), case


@pytest.mark.parametrize(
    "case",
    [
        {"optimizer": "muon", "donate": True},
        {"optimizer": "clip", "precision": "mixed", "micros": 2},
        {"optimizer": "sgd", "layout": {"replicate": 2}},
    ],
    ids=name_of,
)
def test_a_resumed_run_on_real_ranks(tmp_path: Path, case: dict[str, Any]) -> None:
    assert gloo.run(resumed, case, tmp_path, ranks=2, **case.get("layout", {"data": 2})) == [[], []]


# On other layouts


def saved_by(mesh: Mesh | None, case: Mapping[str, Any], path: Path) -> tuple[Any, list[Tensor]]:
    """Train three steps and save; the whole state, and the next losses."""
    step = make_step(mesh, case)
    state, _ = train(step, mesh, step.init(0), 3)
    save_state(step, state, path)
    return whole(step, state), train(step, mesh, state, 4)[1]


def loaded_by(mesh: Mesh | None, case: Mapping[str, Any], path: Path) -> tuple[Any, list[Tensor]]:
    step = make_step(mesh, case)
    state, _ = load_state(step, path)
    return whole(step, state), train(step, mesh, state, 4)[1]


def check_reshard(folder: Path, case: Mapping[str, Any], before: dict[str, int], after: dict[str, int]) -> None:
    state, losses = run(before, saved_by, case, folder / "a")[0]
    for found, next_losses in run(after, loaded_by, case, folder / "a"):
        assert same_bits(found, state)
        for a, b in zip(next_losses, losses, strict=True):
            assert abs(a - b) <= 1e-12 * abs(b)


OTHERS: list[dict[str, int]] = [{}, {"data": 2}, {"data": 3}, {"data": 8}, {"data": 2, "other": 2}, {"replicate": 2}]


@pytest.mark.parametrize("before", [{"data": 4}, {"data": 2, "replicate": 2}, {}], ids=str)
@pytest.mark.parametrize("after", OTHERS, ids=str)
def test_any_layout_loads_what_any_wrote(tmp_path: Path, before: dict[str, int], after: dict[str, int]) -> None:
    """``tiny`` has leaves of fewer rows than ranks: some blocks are empty."""
    check_reshard(tmp_path, {"model": "tiny", "optimizer": "clip"}, before, after)


def test_experts_and_muon_on_another_layout(tmp_path: Path) -> None:
    check_reshard(tmp_path, {"model": "qwen3_moe", "optimizer": "muon"}, {"data": 2, "replicate": 2}, {"data": 3})


@pytest.mark.full
@pytest.mark.parametrize("before", [{"data": 4}, {"data": 2, "replicate": 2}, {"data": 8}, {}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reshard_matrix(tmp_path: Path, before: dict[str, int], optimizer: str) -> None:
    for at, (after, model) in enumerate([(after, model) for after in OTHERS for model in ("tiny", "llama", "qwen3_moe")]):
        check_reshard(tmp_path / str(at), {"model": model, "optimizer": optimizer}, before, after)


def test_saved_by_real_ranks_and_loaded_by_simulated(tmp_path: Path) -> None:
    case = {"optimizer": "muon"}
    state, losses = gloo.run(saved_by, case, tmp_path / "a", ranks=3, data=3)[0]
    found, again = run({"data": 2}, loaded_by, case, tmp_path / "a")[1]
    assert same_bits(found, state)
    torch.testing.assert_close(again, losses, rtol=1e-12, atol=0)


# What is written and read


class Kinds(NamedTuple):
    """A step of a model without stages, with leaves of every kind: all that saving and loading need."""

    specs: Any
    step: TrainStep


def spec(*shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> ParamSpec:
    return ParamSpec(shape, dtype, (None,) * len(shape), Init.normal(1.0), trainable)


SPECS: dict[str, Any] = {
    "wide": spec(3, 50, dtype=torch.float64),
    "layers": [{"bf16": spec(5, 3, 2, dtype=torch.bfloat16), "norm": spec(7), "bias": spec(3, trainable=False)} for _ in range(2)],
    "one": spec(),
    "none": spec(0, 4),
    "fp8": spec(9, 2, dtype=torch.float8_e4m3fn, trainable=False),
    "count": spec(dtype=torch.int64, trainable=False),
    "flags": spec(6, dtype=torch.bool, trainable=False),
}


def of_kinds(mesh: Mesh | None, optimizer: Optimizer | None = None, specs: Any = None, config: Any = None) -> TrainStep:
    specs = SPECS if specs is None else specs
    sources = {path: Named(path) for path in tree.paths(specs)}
    model = Model("none", None, specs, lambda packed: {}, lambda ops: (), sources, config or {"model_type": "none", "size": 3}, vocab=11)
    step = train_step(model, optimizer or optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(lr=0.1, momentum=0.9)))
    return step if mesh is None else step.replace("shard", sharding=Sharding((mesh["data"],), (mesh["copies"],)))


def filled(step: TrainStep) -> State:
    """A state of random bits (not-a-numbers of every kind among them), the same whole leaves on every layout."""

    def random_leaves(seed: int, like: Mapping[str, Tensor | None]) -> Any:
        generator, leaves = torch.Generator().manual_seed(seed), dict[str, Tensor | None]()
        for path, leaf in like.items():
            leaves[path] = None
            if leaf is not None:
                high, size = 2 if leaf.dtype == torch.bool else 256, step.specs[path].numel * leaf.dtype.itemsize
                data = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
                leaves[path] = data.view(leaf.dtype).view(step.specs[path].shape)
        return step.place(tree.from_items(step.model.specs, leaves))

    empty = step.init(0)
    clip, sgd = empty.opt
    momentum = random_leaves(2, tree.items(sgd.momentum))
    opt = (clip._replace(norm=torch.tensor(0.25)), sgd._replace(steps=torch.tensor(7), momentum=momentum))
    return State(random_leaves(1, tree.items(empty.params)), opt, torch.tensor(7), torch.tensor(1))


SIZES = [(1, 1), (2, 1), (2, 2), (5, 1), (1, 3)]


@pytest.mark.parametrize("sizes", SIZES)
def test_each_element_is_written_once_whatever_its_kind(tmp_path: Path, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "SEGMENT", 64)  # so that leaves span segments, and segments leaves
    monkeypatch.setattr(shard_file, "_CHUNK", 100)

    def write(mesh: Mesh) -> None:
        step = of_kinds(mesh)
        save_state(step, filled(step), tmp_path / "a")

    simulate(write, data=sizes[0], copies=sizes[1])
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    counts, index = dict[str, int](), read_index(tmp_path / "a")
    for file in files:
        for name, value in load_file(file).items():
            counts[name] = counts.get(name, 0) + value.numel()
    numel = {name: torch.Size(leaf.shape).numel() for name, leaf in index.leaves.items()}
    assert counts == {name: n for name, n in numel.items() if n}
    assert len(files) == sizes[0] * sizes[1]  # replicas share the work
    assert (index.step, index.leaves["opt.1.momentum.layers.0.norm"].shape) == (7, (7,))

    def read(mesh: Mesh) -> bool:
        step = of_kinds(mesh)
        return same_bits(load_state(step, tmp_path / "a")[0], filled(step))

    for data, copies in SIZES:
        assert all(simulate(read, data=data, copies=copies)), (data, copies)
    step = of_kinds(None)
    assert same_bits(load_state(step, tmp_path / "a")[0], filled(step))


def test_only_the_segments_of_a_ranks_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "SEGMENT", 1024)
    one, big = of_kinds(None, optim.sgd(lr=0.1), specs := {"big": spec(64, 256), "small": spec(3)}), 64 * 256 * 4
    save_state(one, one.init(0), tmp_path / "a")
    blocks = simulate(lambda mesh: of_kinds(mesh, optim.sgd(lr=0.1), specs).placements["big"].ranges(), data=8, copies=1)
    index, bytes_read, plain = read_index(tmp_path / "a"), list[int](), os.pread

    def pread(fd: int, count: int, offset: int) -> bytes:
        bytes_read.append(count)
        return plain(fd, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    header = (tmp_path / "a" / "rank-00000.safetensors").stat().st_size - big
    for ranges in blocks:
        bytes_read.clear()
        out = torch.empty([stop - start for start, stop in ranges])
        index.read({"params.big": (ranges, out)})
        assert torch.equal(out, one.init(0).params["big"][tuple(slice(*r) for r in ranges)])
        assert big / 8 <= sum(bytes_read) <= big / 8 + header + 8 + 2 * 1024


def test_the_folder_explains_itself(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"a": 1}')
    step = make_step(None, {"model": "qwen3_moe"})
    save_state(step, step.init(0), tmp_path / "a", tokenizer_from=tokenizer)
    files = ["config.json", "rank-00000.safetensors", "state.json", "tokenizer.json"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == files
    model = xtf.models.from_hf(tmp_path / "a")
    assert model.hf_config == step.model.hf_config
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "float64"
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        save_state(step, step.init(0), tmp_path / "b", tokenizer_from=tmp_path / "a" / "..")
    assert not (tmp_path / "b").exists()


# Parameters alone


def test_parameters_of_a_training_checkpoint_load_like_any_others(tmp_path: Path) -> None:
    case = {"model": "qwen3_moe", "optimizer": "muon"}
    state, _ = run({"data": 4}, saved_by, case, tmp_path / "a")[0]
    assert same_bits(xtf.load_params(laws.model("qwen3_moe"), tmp_path / "a"), state["params"])

    def export(mesh: Mesh) -> bool:
        step = make_step(mesh, {"model": "qwen3_moe", "optimizer": "sgd"})
        fresh = xtf.load(step, tmp_path / "a")
        xtf.save(step, fresh, tmp_path / "hf")
        return (
            int(fresh.step) == 0
            and same_bits(step.full(fresh.params), state["params"])
            and not any(m.any() for m in tree.leaves(fresh.opt.momentum))
        )

    assert all(simulate(export, data=3))
    assert same_bits(xtf.load_params(laws.model("qwen3_moe"), tmp_path / "hf"), state["params"])
    half = make_step(None, {"model": "qwen3_moe", "precision": "bf16"})
    assert same_bits(xtf.load(half, tmp_path / "a").params, tree.map(lambda x: x.bfloat16(), state["params"]))


def test_parameters_that_are_not_the_models_are_named(tmp_path: Path) -> None:
    step = of_kinds(None)
    save_state(step, filled(step), tmp_path / "a")
    specs = {**SPECS, "one": spec(2), "new": spec(1), "flags": spec(6)}
    del specs["none"]
    with pytest.raises(CheckpointError) as error:
        xtf.load(of_kinds(None, optim.sgd(lr=0.1), specs), tmp_path / "a")
    assert (error.value.missing, error.value.extra, error.value.misshapen) == (("new",), ("none",), ("flags", "one"))
    assert "one: the checkpoint has float32[], the model expects float32[2]" in str(error.value)
    assert "flags: the checkpoint has bool[6], the model expects float32[6]" in str(error.value)


def test_the_two_layouts_are_never_confused(tmp_path: Path) -> None:
    step = make_step(None, {})
    state = step.init(0)
    save_state(step, state, tmp_path / "a")
    xtf.save(step, state, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"not a training checkpoint, since it has no state.json; it is a Hugging Face"):
        load_state(step, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"will not be overwritten.*state.json"):
        xtf.save(step, state, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"will not be overwritten.*model.safetensors"):
        save_state(step, state, tmp_path / "hf")
    shutil.copy(tmp_path / "hf" / "model.safetensors", tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"a training checkpoint \(state.json\) and a Hugging Face one \(model.safetensors\)"):
        xtf.load(step, tmp_path / "a")


# What does not fit


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    def write(mesh: Mesh) -> None:
        step = of_kinds(mesh)
        save_state(step, filled(step), tmp_path / "a", extra={"at": 3})

    simulate(write, data=2, copies=1)
    return tmp_path / "a"


def errors(path: Path, make: Callable[[Mesh], TrainStep] = of_kinds) -> list[str]:
    """What each of two ranks says when it loads."""

    def read(mesh: Mesh) -> str:
        with pytest.raises(CheckpointError) as error:
            load_state(make(mesh), path)
        return str(error.value)

    return simulate(read, data=2, copies=1)


def test_another_model_is_named_by_its_fields_and_leaves(saved: Path) -> None:
    specs = {**SPECS, "wide": spec(3, 51, dtype=torch.float64), "one": spec(dtype=torch.bfloat16), "new": spec(1)}
    del specs["none"]
    for message in errors(saved, lambda mesh: of_kinds(mesh, None, specs, {"model_type": "none", "size": 4, "more": [1]})):
        assert "dtypes are those that parameters are stored in" in message
        rows = [line.strip() for line in message.splitlines()]
        for row in (
            "2 fields of config.json:",
            "more: 'nothing' in the checkpoint, [1] in the model",
            "size: 3 in the checkpoint, 4 in the model",
            "3 leaves of another shape or dtype:",
            "params.wide: float64[3, 50] in the checkpoint, float64[3, 51] in the step",
            "opt.1.momentum.wide: float64[3, 50] in the checkpoint, float64[3, 51] in the step",
            "params.one: float32[] in the checkpoint, bfloat16[] in the step",
            "2 leaves missing in the checkpoint:",
            "opt.1.momentum.new",
            "params.new",
            "2 leaves unknown to the step:",
            "opt.1.momentum.none",
            "params.none",
        ):
            assert row in rows, row


def test_another_optimizer_is_named_also_where_its_trees_are_alike(saved: Path) -> None:
    def with_optimizer(optimizer: Optimizer) -> str:
        return errors(saved, lambda mesh: of_kinds(mesh, optimizer))[1]

    plain = with_optimizer(optim.sgd(lr=0.1, momentum=0.9))
    assert "opt.1: SgdState in the checkpoint, nothing in the step" in plain
    assert "opt.momentum.one" in plain and "opt.1.momentum.one" in plain and "must be of the kind that was saved" in plain
    adam = with_optimizer(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(lr=0.1)))
    assert "opt.1: SgdState in the checkpoint, AdamState in the step" in adam and "opt.1.square.one" in adam

    class Alike(NamedTuple):
        steps: Tensor
        momentum: Any

    sgd = optim.sgd(lr=0.1, momentum=0.9)
    alike = Optimizer(lambda params, placement=optim.UNPLACED: Alike(*sgd.init(params, placement)), sgd.update, sgd.metrics)
    message = with_optimizer(optim.chain(optim.clip_by_global_norm(1.0), alike))
    assert "1 states of optimizers" in message and "opt.1: SgdState in the checkpoint, Alike in the step" in message
    assert "leaves" not in message
    # other numbers of the same optimizer are no other optimizer
    load_state(of_kinds(None, optim.chain(optim.clip_by_global_norm(9.0), optim.sgd(lr=0.7, momentum=0.1))), saved)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 2)


def flip(at: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 16
        file.write_bytes(data)

    return change


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("rank-00000.safetensors", truncate, "bytes, .* were written"),
        ("rank-00001.safetensors", Path.unlink, "rank-00001.safetensors is missing"),
        ("rank-00001.safetensors", flip(-3), r"has other bytes than were written \(checksum of bytes"),
        ("rank-00000.safetensors", flip(40), "has another header than was written"),
        ("rank-00000.safetensors", flip(7), "has no header"),
        ("config.json", flip(-5), "config.json has other bytes than were written"),
        ("config.json", Path.unlink, "config.json is missing"),
        ("state.json", truncate, "state.json is not valid JSON"),
        ("state.json", Path.unlink, "state.json is missing: the checkpoint is damaged"),
        (".", shutil.rmtree, "no training checkpoint at"),
    ],
)
def test_what_is_damaged_is_named_on_every_rank(saved: Path, file: str, change: Callable[[Path], None], says: str) -> None:
    change(saved / file)
    for message in errors(saved):
        assert re.search(says, message), message


def test_damage_that_one_rank_reads_is_an_error_on_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "SEGMENT", 64)

    def make(mesh: Mesh) -> TrainStep:
        return of_kinds(mesh, optim.sgd(lr=0.1), {"w": spec(64, 4)})

    simulate(lambda mesh: save_state(make(mesh), make(mesh).init(0), tmp_path / "a"), data=2, copies=1)
    flip(-1)(tmp_path / "a" / "rank-00001.safetensors")
    first, second = errors(tmp_path / "a", make)
    assert "was not loaded: rank 1 failed: CheckpointError" in first and "rank-00001.safetensors" in first
    assert "has other bytes than were written" in second and "not loaded" not in second


@pytest.mark.parametrize("key", ["extra", "step"])
def test_an_index_that_was_edited_is_refused(saved: Path, key: str) -> None:
    about = json.loads((saved / "state.json").read_text())
    about["state"][key] = {"at": 4} if key == "extra" else 8
    (saved / "state.json").write_text(json.dumps(about))
    assert all("state.json has other contents than were written" in message for message in errors(saved))


def test_a_part_that_no_file_has_is_named(saved: Path) -> None:
    index = read_index(saved)
    dataclasses.replace(index, shards={"rank-00000.safetensors": index.shards["rank-00000.safetensors"]}).write()
    for message in errors(saved):
        assert "do not have every part of" in message and "params.flags (0 of 6 elements)" in message
    with pytest.raises(CheckpointError, match=r"params.wide \(50 of 150 elements\)"):
        load_state(of_kinds(None), saved)


def mutations(saved: Path, count: int) -> None:
    """Any byte of any file changed: an error that says so, or the very same state."""
    step, chosen = of_kinds(None), random.Random(0)
    wanted, refused = filled(step), 0
    for at in range(count):
        file = chosen.choice(sorted(p for p in saved.iterdir()))
        plain = file.read_bytes()
        data = bytearray(plain)
        if at % 4 == 3:
            del data[chosen.randrange(len(data)) :]
        else:
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        file.write_bytes(data)
        try:
            state, extra = load_state(step, saved)
            assert same_bits(state, wanted) and extra == {"at": 3}
        except CheckpointError as error:
            assert str(saved) in str(error)
            refused += 1
        file.write_bytes(plain)
    assert refused > count * 0.9  # all but what changed nothing, and blanks


def test_no_changed_byte_is_taken(saved: Path) -> None:
    mutations(saved, 120)


@pytest.mark.full
def test_no_changed_byte_is_taken_of_many(saved: Path) -> None:
    mutations(saved, 3000)


@pytest.mark.parametrize("extra", [{"a": {1: 2}}, {"a": (1, 2)}, {"a": {1, 2}}, {"a": float("nan")}], ids=str)
def test_extra_that_would_come_back_different_is_refused(tmp_path: Path, extra: Any) -> None:
    step = of_kinds(None)
    with pytest.raises(ValueError, match="extra"):
        save_state(step, step.init(0), tmp_path / "a", extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_states_that_cannot_be_placed_are_refused(tmp_path: Path) -> None:
    def rows(value: Any) -> Optimizer:
        def init(params: Any, placement: Any = optim.UNPLACED) -> Any:
            return tree.map(lambda p: None if p is None else value(p), params)

        return Optimizer(init, lambda grads, state, params, placement=optim.UNPLACED: (grads, state), lambda state: {})

    def save(mesh: Mesh, value: Any) -> str:
        step = of_kinds(mesh, rows(value), {"w": spec(4, 3)})
        try:
            save_state(step, step.init(0), tmp_path / "a")
        except ValueError as error:
            return str(error)
        return "saved"

    def refusals(value: Any) -> list[str]:
        return simulate(lambda mesh: save(mesh, value), data=2, copies=1)

    assert all(
        "opt.w has shape (2,), but this rank keeps a block of shape (2, 3)" in e for e in refusals(lambda p: p.new_zeros(p.shape[0]))
    )
    assert all("opt.w of the state is a float" in e for e in refusals(lambda p: 1.0))
    assert all(
        "opt.w of the state is a tensor of torch.complex64" in e for e in refusals(lambda p: torch.zeros(p.shape, dtype=torch.complex64))
    )
    assert list(tmp_path.iterdir()) == []
    assert refusals(lambda p: p.new_zeros(())) == ["saved", "saved"]
    other = of_kinds(None)
    with pytest.raises(ValueError, match=r"params.one has shape \(1,\), this rank keeps \(\)"):
        state = other.init(0)
        save_state(other, state.replace(params=state.params | {"one": torch.zeros(1)}), tmp_path / "b")
    donated = other.init(0)
    donated.donate()
    with pytest.raises(RuntimeError, match="this state was donated"):
        save_state(other, donated, tmp_path / "b")


# No disk


def no_disk(mesh: Mesh, folder: Path, rank: int) -> str:
    """Save twice; the second time one rank finds the disk full in the middle of its file."""
    step = of_kinds(mesh)
    state = filled(step)
    save_state(step, state, folder / "a")
    plain = saving.write_shard

    def full(file: Path, blocks: Any, *rest: Any) -> Any:
        if file.name == f"rank-{rank:05}.safetensors" and file.parent.name.startswith(".b."):
            plain(file, blocks[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(file, blocks, *rest)

    mesh["data"].barrier()
    if mesh.rank == rank:
        saving.write_shard = full
    mesh["data"].barrier()
    try:
        save_state(step, state, folder / "b")
        return "written"
    except (OSError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if mesh.rank == rank:
            saving.write_shard = plain


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_space_on_one_rank_ends_all_and_leaves_nothing(tmp_path: Path, rank: int, real: bool) -> None:
    if real:
        said = gloo.run(no_disk, tmp_path, rank, ranks=2, data=2, copies=1)
    else:
        said = simulate(lambda mesh: no_disk(mesh, tmp_path, rank), data=2, copies=1)
    assert said[rank].startswith("OSError: [Errno 28] No space left on device")
    assert said[1 - rank].startswith("CheckpointError") and f"was not written: rank {rank} failed: OSError" in said[1 - rank]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "latest"] and latest(tmp_path) == tmp_path / "a"
    load_state(of_kinds(None), tmp_path / "a")


def test_a_write_that_the_system_refuses_leaves_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    step = of_kinds(None, optim.sgd(lr=0.1), {"w": spec(100, 100)})
    state, old, handler = step.init(0), resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_state(step, state, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("index"), KeyboardInterrupt()])
def test_a_failure_at_the_end_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    step = of_kinds(None)
    state = filled(step)
    save_state(step, state, tmp_path / "a", extra={"old": 1})

    def fail(self: Any) -> None:
        raise error

    monkeypatch.setattr(saving.StateIndex, "write", fail)
    with pytest.raises(type(error)):
        save_state(step, state, tmp_path / "a", extra={"old": 0})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "latest"]
    assert load_state(step, tmp_path / "a")[1] == {"old": 1}


# Killed


def kill_at_each_flush(folder: str) -> None:
    """In folder ``n``: a whole save, and one that is killed when it flushes something to the disk for the n-th time. One more folder
    for each flush, until a save ends by itself. Called in a process of its own."""
    step = make_step(None, {})
    state, plain = step.init(0), os.fsync
    for n in range(100):
        run_folder = Path(folder) / f"{n:02}"
        save_state(step, state, run_folder / "step-1", extra={"n": 1})
        pid = os.fork()
        if pid == 0:
            calls = iter(range(100))

            def fsync(fd: int, calls: Any = calls, n: int = n) -> None:
                if next(calls) == n:
                    os.kill(os.getpid(), signal.SIGKILL)
                plain(fd)

            os.fsync = fsync
            save_state(step, state, run_folder / "step-2", extra={"n": 2})
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            return


def test_a_kill_at_any_moment_of_a_save_loses_nothing(tmp_path: Path) -> None:
    code = "import sys; from tests.test_training_checkpoint import kill_at_each_flush; kill_at_each_flush(sys.argv[1])"
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=os.environ | {"PYTHONPATH": path}, timeout=60)
    runs, step, kinds = sorted(tmp_path.iterdir()), make_step(None, {}), set[tuple[str, bool]]()
    for folder in runs:
        named = (folder / "latest").read_text().strip()
        found = folder / named
        assert latest(folder) == found
        state, extra = load_state(step, found)
        assert same_bits(state, step.init(0)) and extra == {"n": int(named[-1])}
        kinds.add((named, (folder / "step-2").exists()))
        assert (folder / "step-2").exists() or any(p.name.startswith(".step-2.") for p in folder.iterdir())
        save_state(step, state, folder / "step-2", extra={"n": 2})  # the next save to the same path, and prune, clean up
        assert not any(p.name.startswith(".step-2.") for p in folder.iterdir())
        assert prune(folder, keep_last=5) == []
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-1", "step-2"]
        assert load_state(step, folder / "step-2")[1] == {"n": 2}
    assert kinds == {("step-1", False), ("step-1", True), ("step-2", True)}
    assert len(runs) > 6


# Which is the newest, and which go


def some_saves(folder: Path, *steps: int) -> TrainStep:
    step = of_kinds(None, optim.sgd(lr=0.1), {"w": spec(2)})
    for n in steps:
        save_state(step, step.init(0).replace(step=torch.tensor(n)), folder / f"step-{n}")
    return step


def test_latest_is_what_was_saved_last(tmp_path: Path) -> None:
    assert latest(tmp_path) is None and latest(tmp_path / "nowhere") is None
    some_saves(tmp_path, 30, 4, 20)
    assert latest(tmp_path) == tmp_path / "step-20"
    (tmp_path / "latest").unlink()
    assert latest(tmp_path) == tmp_path / "step-30"
    for text in ("", "../step-4", "\xff", "."):
        (tmp_path / "latest").write_text(text, encoding="latin-1")
        assert latest(tmp_path) == tmp_path / "step-30"
    (tmp_path / "latest").write_text("step-4\n")
    assert latest(tmp_path) == tmp_path / "step-4"


def test_what_is_not_complete_is_passed_over_and_said(tmp_path: Path) -> None:
    some_saves(tmp_path, 1, 2, 3, 4)
    truncate(tmp_path / "step-4" / "rank-00000.safetensors")
    (tmp_path / "step-3" / "rank-00000.safetensors").unlink()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert latest(tmp_path) == tmp_path / "step-2"
    said = [str(w.message) for w in seen]
    assert len(said) == 2 and "latest names step-4, which cannot be used" in said[0] and "were written" in said[0]
    assert "step 3 is passed over" in said[1] and "is missing" in said[1]
    (tmp_path / "step-2" / "state.json").write_text("{")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert latest(tmp_path) == tmp_path / "step-1"
    assert any("step-2/state.json is not valid JSON" in str(w.message) for w in seen)


# The newest that can be used


def some_saves_of_two(folder: Path, *steps: int) -> None:
    def write(mesh: Mesh) -> None:
        step = of_kinds(mesh, optim.sgd(lr=0.1), {"w": spec(64, 4)})
        for n in steps:
            save_state(step, step.init(n).replace(step=torch.tensor(n)), folder / f"step-{n}", extra={"n": n})

    simulate(write, data=2, copies=1)


def newest(folder: Path, ranks: int = 2) -> list[tuple[int, str, tuple[str, ...]] | str | None]:
    """What each rank is given: the step, the folder and the reasons; or the error."""

    def read(mesh: Mesh) -> Any:
        step = of_kinds(mesh, optim.sgd(lr=0.1), {"w": spec(64, 4)})
        try:
            found = load_newest_state(step, folder)
        except CheckpointError as error:
            return str(error)
        if found is None:
            return None
        assert found.extra == {"n": int(found.state.step)} and same_bits(found.state.params, step.init(found.extra["n"]).params)
        return int(found.state.step), found.path.name, found.passed

    return simulate(read, data=ranks, copies=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_reads_makes_all_take_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(shard_file, "SEGMENT", 64)
    some_saves_of_two(tmp_path, 1, 2, 3)
    assert newest(tmp_path) == [(3, "step-3", ())] * 2
    flip(-1)(tmp_path / "step-3" / f"rank-0000{rank}.safetensors")
    for found in newest(tmp_path):
        assert isinstance(found, tuple) and found[:2] == (2, "step-2") and len(found[2]) == 1
        assert re.search(rf"step-3 is passed over: .*rank-0000{rank}.safetensors has other bytes than were written", found[2][0])


def test_files_that_are_missing_and_damage_in_a_row(tmp_path: Path) -> None:
    some_saves_of_two(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / "step-5" / "rank-00001.safetensors").unlink()
    flip(-3)(tmp_path / "step-4" / "rank-00000.safetensors")
    flip(-2)(tmp_path / "step-3" / "config.json")
    (tmp_path / "step-2" / "state.json").unlink()
    said = (
        "latest names step-5.*rank-00001.safetensors is missing",
        "state.json is missing: the checkpoint is damaged",
        "step-4 is passed over",
        "step-3 is passed over",
    )
    for found in newest(tmp_path):
        assert isinstance(found, tuple) and found[:2] == (1, "step-1")
        assert len(found[2]) == 4 and all(re.search(what, reason) for what, reason in zip(said, found[2], strict=True)), found[2]
    truncate(tmp_path / "step-1" / "rank-00000.safetensors")
    for message in newest(tmp_path):
        assert (
            isinstance(message, str)
            and f"no state in {tmp_path} can be used: " in message
            and "remove that folder to begin anew" in message
        )
        assert all(f"step-{n}" in message for n in (1, 2, 3, 4, 5)) and message.count("; ") >= 4
    # what is damaged is replaced by the next save of that step, also where its index is lost
    some_saves_of_two(tmp_path, 2, 5)
    assert newest(tmp_path) == [(5, "step-5", ())] * 2


def test_no_checkpoint_and_one_of_another_model(tmp_path: Path) -> None:
    assert newest(tmp_path) == newest(tmp_path / "nowhere") == [None, None]
    some_saves_of_two(tmp_path, 1)
    step = of_kinds(None)
    save_state(step, filled(step), tmp_path / "step-2")  # sound, but of another model: nothing older is taken in its place
    for message in newest(tmp_path):
        assert isinstance(message, str) and "is not of this step" in message


def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_saves_of_two(tmp_path, 1, 2)
    plain = os.pread

    def pread(fd: int, count: int, offset: int) -> bytes:
        if "step-2" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "Input/output error")
        return plain(fd, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    for found in newest(tmp_path):
        assert isinstance(found, tuple) and found[0] == 1 and "Input/output error" in found[2][0]


def test_a_save_that_is_not_to_be_the_latest(tmp_path: Path) -> None:
    step = some_saves(tmp_path, 1)
    save_state(step, step.init(0), tmp_path / "best", update_latest=False)
    assert latest(tmp_path) == tmp_path / "step-1"


def test_prune_keeps_the_last_the_chosen_and_the_latest(tmp_path: Path) -> None:
    some_saves(tmp_path, *range(10, 80, 10), 5)  # the latest is 5: a run that went on from an older one
    (tmp_path / "mine").mkdir()
    (tmp_path / ".notes.tmp").write_text("mine")
    for name in (".step-70.0123abcd.tmp", ".latest.0123abcd.tmp"):
        (tmp_path / name).mkdir()
    assert prune(tmp_path, keep_last=2, keep=lambda step: step % 40 == 0) == [tmp_path / f"step-{n}" for n in (10, 20, 30, 50)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".notes.tmp", "latest", "mine", "step-40", "step-5", "step-60", "step-70"]
    assert latest(tmp_path) == tmp_path / "step-5"
    assert prune(tmp_path, keep_last=1) == [tmp_path / "step-40", tmp_path / "step-60"]
    with pytest.raises(ValueError, match="keep_last is 0"):
        prune(tmp_path, keep_last=0)


def test_prune_never_leaves_only_damaged_ones(tmp_path: Path) -> None:
    some_saves(tmp_path, 1, 2, 3)
    for n in (2, 3):
        truncate(tmp_path / f"step-{n}" / "rank-00000.safetensors")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert prune(tmp_path, keep_last=1) == [tmp_path / "step-2"]
        assert latest(tmp_path) == tmp_path / "step-1"
    assert "latest names step-3, which cannot be used" in str(seen[0].message)


def test_leftovers_of_one_name(tmp_path: Path) -> None:
    for name in (".a.0123abcd.tmp", ".ab.0123abcd.tmp"):
        (tmp_path / name).mkdir()
    assert remove_leftovers(tmp_path, "a") == [tmp_path / ".a.0123abcd.tmp"]
    assert remove_leftovers(tmp_path) == [tmp_path / ".ab.0123abcd.tmp"]
    assert remove_leftovers(tmp_path / "nowhere") == []


def test_a_folder_that_is_something_else_is_not_replaced(tmp_path: Path) -> None:
    step = some_saves(tmp_path, 1)
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"will not be overwritten.*notes.txt"):
        save_state(step, step.init(0), tmp_path / "step-1")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        save_state(step, step.init(0), tmp_path / "file")
    (tmp_path / "empty").mkdir()
    save_state(step, step.init(0), tmp_path / "empty")
    load_state(step, tmp_path / "empty")
