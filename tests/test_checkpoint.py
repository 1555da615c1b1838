"""Checkpoints: blocks read exactly, round trips, every error named, the old checkpoint safe."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from xtf import files, tree
from xtf.checkpoint import CheckpointError, load, load_leaves, load_params, read_config, reading, save, save_leaves, save_params, writing
from xtf.checkpoint_map import Concat, Named, Source, Stack, fill, names, shapes, take_apart
from xtf.files import folder_atomically, write_atomically
from xtf.mesh import Mesh, simulate
from xtf.model import Model
from xtf.optim import sgd
from xtf.spec import Init, ParamSpec
from xtf.step import Precision, Sharding, TrainStep, train_step


@dataclass(frozen=True)
class Described:
    specs: Any
    sources: Mapping[str, Source]
    hf_config: Mapping[str, Any] = field(default_factory=lambda: {"model_type": "llama", "tie_word_embeddings": True})


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> ParamSpec:
    return ParamSpec(shape, dtype, (None,) * len(shape), Init.normal(1.0))


def experts(layer: int, count: int) -> Source:
    def one(e: int, which: str) -> Source:
        return Named(f"model.layers.{layer}.mlp.experts.{e}.{which}.weight")

    return Stack(tuple(Concat((one(e, "gate_proj"), one(e, "up_proj"))) for e in range(count)))


MODEL = Described(
    specs={
        "embed": spec(11, 4),
        "layers": [
            {
                "experts": spec(3, 6, 3, dtype=torch.bfloat16),
                "norm": spec(4),
                "bias": spec(3, dtype=torch.float64),
                "steps": spec(dtype=torch.int64),
            }
            for _ in range(2)
        ],
    },
    sources={
        "embed": Named("model.embed_tokens.weight"),
        **{f"layers.{i}.experts": experts(i, 3) for i in range(2)},
        **{f"layers.{i}.norm": Named(f"model.layers.{i}.norm.weight") for i in range(2)},
        **{f"layers.{i}.bias": Named(f"model.layers.{i}.mlp.gate.bias") for i in range(2)},
        **{f"layers.{i}.steps": Named(f"model.layers.{i}.steps") for i in range(2)},
    },
)


def some_params(seed: int = 0, model: Described = MODEL) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return tree.map(lambda s: torch.randn(s.shape, generator=generator).mul(100).to(s.dtype), model.specs)


def named_tensors(params: Any, model: Described = MODEL) -> dict[str, Tensor]:
    leaves = tree.items(params)
    return {name: t.contiguous() for path, source in model.sources.items() for name, t in take_apart(source, leaves[path])}


def same_bits(a: Any, b: Any) -> bool:
    return tree.same_structure(a, b) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_params(MODEL, some_params(), tmp_path / "ckpt")
    return tmp_path / "ckpt"


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# Sources


@st.composite
def sources_and_leaves(draw: st.DrawFn) -> tuple[Source, Tensor, list[tuple[int, int]]]:
    """A random expression, a leaf of the shape it gives, and a block."""
    counter = iter(range(10_000))

    def build(shape: tuple[int, ...], depth: int) -> Source:
        kinds = ["named"] if depth == 0 or not shape else ["named", "stack", "concat"]
        kind = draw(st.sampled_from(kinds))
        if kind == "stack" and shape[0] > 0:
            return Stack(tuple(build(shape[1:], depth - 1) for _ in range(shape[0])))
        if kind == "concat":
            dim = draw(st.integers(0, len(shape) - 1))
            cut = draw(st.integers(0, shape[dim]))
            sizes = (cut, shape[dim] - cut)
            parts = tuple(build((*shape[:dim], size, *shape[dim + 1 :]), depth - 1) for size in sizes)
            return Concat(parts, dim, None if sizes[0] == sizes[1] else sizes)
        return Named(f"t{next(counter)}")

    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    block = [tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in shape]
    return build(shape, 3), torch.arange(torch.Size(shape).numel()).view(shape), [(a, b) for a, b in block]


@settings(max_examples=200, deadline=None)
@given(sources_and_leaves())
def test_any_block_of_any_source_reads_what_it_keeps(case: tuple[Source, Tensor, list[tuple[int, int]]]) -> None:
    source, leaf, ranges = case
    parts = dict(take_apart(source, leaf))
    assert list(parts) == names(source)
    assert {name: tuple(t.shape) for name, t in parts.items()} == shapes(source, leaf.shape)
    read_elements = 0

    def read(name: str, block: Any) -> Tensor:
        nonlocal read_elements
        found = parts[name][tuple(slice(*r) for r in block)]
        read_elements += found.numel()
        return found

    wanted = leaf[tuple(slice(*r) for r in ranges)]
    out = torch.full(wanted.shape, -1)
    fill(source, leaf.shape, ranges, read, out)
    assert torch.equal(out, wanted)
    assert read_elements == wanted.numel()


@pytest.mark.parametrize(
    ("source", "shape", "says"),
    [
        (Stack((Named("a"), Named("b"))), (3, 4), "a Stack of 2 parts"),
        (Concat((Named("a"), Named("b"))), (3, 4), "state their sizes"),
        (Concat((Named("a"), Named("b")), sizes=(1, 3)), (3, 4), r"sizes \(1, 3\)"),
        (Concat((Named("a"), Named("b")), dim=2), (4, 4), "dims 0 to 1"),
        (Concat((Named("a"), Named("a"))), (4, 4), "'a' twice"),
        (Stack(()), (0,), "at least one part"),
    ],
)
def test_a_source_that_cannot_give_the_leaf_is_refused(source: Source, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shapes(source, shape)


def test_leaves_without_source_and_tensors_used_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"without a source \['b'\], unknown paths \['c'\]"):
        load_params(Described({"a": spec(1), "b": spec(1)}, {"a": Named("a"), "c": Named("c")}), tmp_path)
    twice = Described({"a": spec(1), "b": spec(1)}, {"a": Named("x"), "b": Named("x")})
    with pytest.raises(ValueError, match="'a' and 'b' both use the tensor 'x'"):
        save_params(twice, some_params(model=twice), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


# Round trips


@pytest.mark.parametrize("shard_bytes", [1, 150, 400, 10_000])
def test_what_is_saved_is_loaded(tmp_path: Path, shard_bytes: int) -> None:
    params = some_params()
    save_params(MODEL, params, tmp_path / "ckpt", shard_bytes=shard_bytes)
    assert same_bits(load_params(MODEL, tmp_path / "ckpt"), params)
    wanted = named_tensors(params)
    shards = sorted((tmp_path / "ckpt").glob("*.safetensors"))
    found = {name: t for file in shards for name, t in load_file(file).items()}
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    for file in shards:
        sizes = [t.nbytes for t in load_file(file).values()]
        assert sum(sizes) <= shard_bytes or len(sizes) == 1
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    if shard_bytes == 10_000:
        assert [file.name for file in shards] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "ckpt" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(wanted)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted.values())
        assert {file.name for file in shards} == set(index["weight_map"].values())


def test_config_and_tokenizer_are_written(tmp_path: Path) -> None:
    source = tmp_path / "from"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (source / name).write_text(name)
    save_params(MODEL, some_params(), tmp_path / "ckpt", tokenizer_from=source)
    assert {p.name for p in (tmp_path / "ckpt").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert read_config(tmp_path / "ckpt") == {**MODEL.hf_config, "dtype": "bfloat16"}
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        save_params(MODEL, some_params(1), tmp_path / "ckpt", tokenizer_from=source)
    assert same_bits(load_params(MODEL, tmp_path / "ckpt"), some_params(0))


def test_leaves_are_cast_to_the_dtype_of_their_spec(tmp_path: Path, saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.update({"model.embed_tokens.weight": tensors["model.embed_tokens.weight"].to(torch.bfloat16)}))
    loaded = load_params(MODEL, saved)
    assert torch.equal(loaded["embed"], some_params()["embed"].to(torch.bfloat16).float())
    wide = tree.map(lambda t: t.double() if t.is_floating_point() else t, some_params())
    save_params(MODEL, wide, tmp_path / "other")
    assert same_bits(load_params(MODEL, tmp_path / "other"), some_params())


def test_one_leaf_is_held_at_a_time_and_other_ranks_only_take_part(tmp_path: Path) -> None:
    leaves, asked = tree.items(some_params()), {True: list[str](), False: list[str]()}

    def getter(write: bool) -> Any:
        def get_leaf(path: str) -> Tensor:
            asked[write].append(path)
            return leaves[path]

        return get_leaf

    save_leaves(MODEL, getter(True), tmp_path / "ckpt", shard_bytes=100)
    save_leaves(MODEL, getter(False), tmp_path / "none", shard_bytes=100, write=False)
    assert asked[True] == asked[False] == tree.paths(MODEL.specs)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    assert same_bits(load_params(MODEL, tmp_path / "ckpt"), some_params())


def test_saving_lets_each_leaf_go(tmp_path: Path) -> None:
    import weakref

    alive: list[Any] = []

    def get_leaf(path: str) -> Tensor:
        assert sum(ref() is not None for ref in alive) == 0, "an earlier leaf is still held"
        leaf = torch.zeros(1000)
        alive.append(weakref.ref(leaf))
        return leaf

    model = Described([spec(1000) for _ in range(5)], {str(i): Named(f"t{i}") for i in range(5)})
    save_leaves(model, get_leaf, tmp_path / "ckpt")
    assert len(alive) == 5


# Blocks


class CountingSlice:
    """A safetensors slice that adds the bytes it gives to ``count``."""

    def __init__(self, block: Any, count: list[int]) -> None:
        self.block, self.count = block, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)

    def __getitem__(self, index: Any) -> Tensor:
        found = self.block[index]
        self.count[0] += found.nbytes
        return found


@pytest.mark.parametrize("shard_bytes", [200, 10_000])
def test_each_rank_reads_only_the_bytes_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int) -> None:
    params = some_params()
    save_params(MODEL, params, tmp_path / "ckpt", shard_bytes=shard_bytes)
    count = [0]
    plain_open = reading._open  # pyright: ignore[reportPrivateUsage]

    def counting_open(folder: Any, stack: Any) -> Any:
        found = plain_open(folder, stack)
        for tensor in found.values():
            object.__setattr__(tensor, "block", CountingSlice(tensor.block, count))
        return found

    monkeypatch.setattr(reading, "_open", counting_open)
    specs, total = tree.items(MODEL.specs), 0
    blocks: list[dict[str, Tensor]] = []
    for rank in range(5):  # more ranks than some leaves have rows

        def ranges(path: str, rank: int = rank) -> list[tuple[int, int]]:
            shape = specs[path].shape
            dim = len(shape) - 1 if path == "layers.1.experts" else 0
            return [(n * rank // 5, n * (rank + 1) // 5) if i == dim else (0, n) for i, n in enumerate(shape)]

        count[0] = 0
        block = load_leaves(MODEL, tmp_path / "ckpt", ranges)
        assert count[0] == sum(t.nbytes for t in block.values())
        total += count[0]
        blocks.append(block)
    scalars = [path for path, s in specs.items() if not s.shape]
    assert total == sum(t.nbytes for t in tree.leaves(params)) + 4 * sum(tree.items(params)[p].nbytes for p in scalars)
    for path, leaf in tree.items(params).items():
        parts = [b[path] for b in blocks]
        whole = parts[0] if not leaf.ndim else torch.cat(parts, -1 if path == "layers.1.experts" else 0)
        assert torch.equal(whole, leaf)


def test_only_the_pages_of_the_block_are_read(tmp_path: Path) -> None:
    """Of a 64 MiB leaf one rank of 16 maps in about its own 4 MiB."""
    model = Described({"w": spec(4096, 4096)}, {"w": Named("w")})
    save_params(model, {"w": torch.zeros(4096, 4096)}, tmp_path / "ckpt")
    resident: list[int] = []
    plain_fill = reading.fill

    def measuring_fill(*args: Any) -> None:
        plain_fill(*args)
        mine = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                mine = line.endswith("ckpt/model.safetensors")
            elif mine and line.startswith("Rss:"):
                resident.append(int(line.split()[1]) * 1024)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "fill", measuring_fill)
        load_leaves(model, tmp_path / "ckpt", lambda _: [(1024, 1280), (0, 4096)])
    assert 4 << 20 <= sum(resident) <= 8 << 20


@pytest.mark.parametrize("bad", [[(0, 12), (0, 4)], [(0, 11)], [(-1, 2), (0, 4)], [(3, 2), (0, 4)]])
def test_a_range_outside_the_leaf_is_refused(saved: Path, bad: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"ranges\('embed'\) gave .* whole leaf \(11, 4\)"):
        load_leaves(MODEL, saved, lambda path: bad if path == "embed" else [(0, n) for n in tree.items(MODEL.specs)[path].shape])


# Placed steps


def placed_step(mesh: Mesh | None, params: torch.dtype | None = None) -> TrainStep:
    """A step of a model without stages, sharded over a mesh: all that reading and writing need."""
    model = Model("none", None, MODEL.specs, lambda packed: {}, lambda ops: (), MODEL.sources, MODEL.hf_config, vocab=11)
    step = train_step(model, sgd(lr=0.1)).replace("precision", precision=Precision(params=params))
    return step if mesh is None else step.replace("shard", sharding=Sharding((mesh["data"], mesh["other"])))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 2), (5, 1)])
def test_a_placed_step_loads_its_blocks_and_saves_the_whole(tmp_path: Path, saved: Path, sizes: tuple[int, int]) -> None:
    params = some_params()

    def run(mesh: Mesh) -> bool:
        step = placed_step(mesh)
        state = load(step, saved)
        save(step, state, tmp_path / "again", shard_bytes=300)
        there = same_bits(load_params(MODEL, tmp_path / "again"), params)  # on every rank, as soon as save returns
        return there and same_bits(state.params, step.place(params)) and same_bits(step.full(state.params), params)

    assert all(simulate(run, data=sizes[0], other=sizes[1]))


def test_one_rank_needs_no_mesh_and_stored_dtypes_are_the_steps(tmp_path: Path, saved: Path) -> None:
    step = placed_step(None, torch.float32)
    state = load(step, saved)
    assert {leaf.dtype for leaf in tree.leaves(state.params)} == {torch.float32, torch.int64}
    save(step, state, tmp_path / "again")
    assert tree.items(load_params(MODEL, tmp_path / "again"))["layers.0.experts"].dtype == torch.bfloat16
    assert torch.equal(load_params(MODEL, tmp_path / "again")["layers"][0]["experts"], some_params()["layers"][0]["experts"])


@pytest.mark.parametrize("early", [True, False])
def test_what_the_writing_rank_cannot_write_ends_every_rank(
    tmp_path: Path, saved: Path, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if early:
        (saved / "notes.txt").write_text("mine")
    else:
        monkeypatch.setattr(writing, "_write_leaf", no_space_after_two_leaves())

    def run(mesh: Mesh) -> str:
        step = placed_step(mesh)
        state = load(step, saved)
        try:
            save(step, state, saved)
        except (CheckpointError, OSError) as error:
            return str(error)
        return "written"

    first, second = simulate(run, data=2, other=1)
    assert ("notes.txt" if early else "No space left on device") in first
    assert "was not written: the first rank failed" in second
    assert same_bits(load_params(MODEL, saved), some_params())
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def no_space_after_two_leaves() -> Any:
    plain, count = writing._write_leaf, [0]  # pyright: ignore[reportPrivateUsage]

    def write_leaf(*args: Any) -> None:
        count[0] += 1
        if count[0] > 2:
            raise OSError(28, "No space left on device")
        plain(*args)

    return write_leaf


# What does not fit


def test_everything_that_does_not_fit_is_named_at_once(saved: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.final_norm.weight"] = tensors.pop("model.layers.1.norm.weight")
        del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
        tensors["model.embed_tokens.weight"] = torch.zeros(12, 4)
        tensors["model.layers.0.steps"] = torch.tensor(1.5)
        tensors["model.layers.0.mlp.shared.weight"] = torch.zeros(2, 2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)

    rewrite(saved, change)
    with pytest.raises(CheckpointError) as caught:
        load_params(MODEL, saved)
    error = caught.value
    assert error.missing == ("model.layers.0.mlp.experts.2.up_proj.weight", "model.layers.1.norm.weight")
    assert set(error.extra) == {"model.layers.0.mlp.shared.weight", "model.layers.1.final_norm.weight"}
    assert set(error.misshapen) == {"model.embed_tokens.weight", "model.layers.0.steps"}
    text = str(error)
    assert all(name in text for name in (*error.missing, *error.extra, *error.misshapen, str(saved)))
    assert "the checkpoint has (12, 4), the model expects (11, 4)" in text
    assert "the checkpoint has dtype F32, the model expects torch.int64" in text
    assert "model.layers.1.norm.weight (4,); renamed to 'model.layers.1.final_norm.weight'?" in text
    assert "inv_freq" not in text


def test_extras_can_be_ignored_by_name(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.update({"mtp.0.weight": torch.zeros(2), "mtp.1.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="2 extra"):
        load_params(MODEL, saved)
    with pytest.raises(CheckpointError, match="1 extra"):
        load_params(MODEL, saved, ignore=[r"mtp\.0\.weight"])
    assert same_bits(load_params(MODEL, saved, ignore=[r"mtp\..*"]), some_params())


def test_a_tied_head_must_equal_the_embedding(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert same_bits(load_params(MODEL, saved), some_params())
    rewrite(saved, lambda tensors: tensors["lm_head.weight"].view(-1)[-1:].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight.*tie_word_embeddings"):
        load_params(MODEL, saved)
    rewrite(saved, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(12, 4)}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight: the checkpoint has \(12, 4\), the tied embedding is \(11, 4\)"):
        load_params(MODEL, saved)


def test_quantised_weights_are_called_that(saved: Path) -> None:
    config = read_config(saved) | {"quantization_config": {"quant_method": "fp8"}}
    (saved / "config.json").write_text(json.dumps(config))
    rewrite(saved, lambda tensors: tensors.update({"model.layers.0.norm.weight_scale_inv": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"weight_scale_inv[\s\S]*quantised"):
        load_params(MODEL, saved)


def test_a_long_list_is_cut_in_the_message_and_whole_in_the_error(tmp_path: Path) -> None:
    model = Described([spec(1) for _ in range(300)], {str(i): Named(f"t{i}") for i in range(300)})
    save_params(model, some_params(model=model), tmp_path / "ckpt")
    renamed = Described(model.specs, {str(i): Named(f"u{i}") for i in range(300)})
    with pytest.raises(CheckpointError) as caught:
        load_params(renamed, tmp_path / "ckpt")
    assert len(caught.value.missing) == len(caught.value.extra) == 300
    assert str(caught.value).count("... and 200 more") == 2
    assert len(str(caught.value).splitlines()) < 220


def truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_a_damaged_file_is_named(saved: Path, size: int) -> None:
    truncate(saved / "model.safetensors", size)
    with pytest.raises(CheckpointError, match=r"ckpt/model\.safetensors is not a complete safetensors file"):
        load_params(MODEL, saved)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    def broken(says: str, path: Path = tmp_path / "ckpt") -> None:
        with pytest.raises(CheckpointError, match=says):
            load_params(MODEL, path)

    broken("no checkpoint folder at Qwen/Qwen3-30B-A3B", Path("Qwen/Qwen3-30B-A3B"))
    save_params(MODEL, some_params(), tmp_path / "ckpt", shard_bytes=300)
    folder, index = tmp_path / "ckpt", tmp_path / "ckpt" / "model.safetensors.index.json"
    broken("config.json is a file", folder / "config.json")
    whole = json.loads(index.read_text())
    first = min(whole["weight_map"].values())
    index.write_text(json.dumps({"weight_map": whole["weight_map"] | {"model.nothing": first}}))
    broken(rf"names tensors that are not in their files:[\s\S]*model.nothing \(in {first}\)")
    index.write_text(json.dumps({"weight_map": whole["weight_map"] | {"a": "gone.safetensors"}}))
    broken(r"index\.json names files that are not in .*gone\.safetensors")
    index.write_text(json.dumps({}))
    broken(r"index\.json has no 'weight_map'")
    index.write_text("{")
    broken(r"index\.json is not valid JSON")
    index.unlink()
    broken(r"has neither model\.safetensors nor model\.safetensors\.index\.json")
    (folder / "pytorch_model.bin").write_text("")
    broken(r"pytorch_model\.bin.*save it again with transformers")
    (folder / "config.json").write_text("[]")
    broken(r"config\.json must hold a JSON object, got list")
    (folder / "config.json").unlink()
    broken(r"config\.json is missing")


def test_params_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    params = some_params()
    with pytest.raises(ValueError, match=r"missing \['embed'\], unknown \['embedding'\]"):
        save_params(MODEL, {"layers": params["layers"], "embedding": params["embed"]}, tmp_path / "ckpt")
    with pytest.raises(ValueError, match=r"embed \(5, 4\), expected \(11, 4\)"):
        save_params(MODEL, {**params, "embed": params["embed"][:5]}, tmp_path / "ckpt")
    with pytest.raises(ValueError, match=r"'embed' has shape \(5, 4\), expected the whole leaf \(11, 4\)"):
        save_leaves(MODEL, lambda path: torch.zeros(5, 4), tmp_path / "ckpt")
    with pytest.raises(ValueError, match="shard_bytes is 0"):
        save_params(MODEL, params, tmp_path / "ckpt", shard_bytes=0)
    complex_model = Described({"a": spec(1, dtype=torch.complex64)}, {"a": Named("a")})
    with pytest.raises(ValueError, match=r"no dtype \['torch\.complex64'\]"):
        save_params(complex_model, {"a": torch.zeros(1)}, tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []


# The old one is safe


@contextmanager
def largest_file(size: int) -> Generator[None, None, None]:
    """Files of this process cannot grow beyond ``size`` bytes: a write fails as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


BIG = Described({"w": spec(512, 1024)}, {"w": Named("w")})


@pytest.mark.parametrize("exists", [True, False])
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, exists: bool) -> None:
    if exists:
        save_params(BIG, {"w": torch.ones(512, 1024)}, tmp_path / "ckpt")
    with largest_file(1 << 20), pytest.raises(OSError, match=r"File too large.*unchanged.*ckpt"):
        save_params(BIG, {"w": torch.zeros(512, 1024)}, tmp_path / "ckpt")
    assert [p.name for p in tmp_path.iterdir()] == (["ckpt"] if exists else [])
    if exists:
        assert bool((load_params(BIG, tmp_path / "ckpt")["w"] == 1).all())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("rank 3 is gone"), OSError(28, "No space left on device")])
def test_an_interrupt_leaves_what_was_there(tmp_path: Path, saved: Path, error: BaseException) -> None:
    def get_leaf(path: str) -> Tensor:
        if path == "layers.1.experts":
            raise error
        return torch.zeros_like(tree.items(some_params())[path])

    with pytest.raises(type(error)):
        save_leaves(MODEL, get_leaf, saved)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    assert same_bits(load_params(MODEL, saved), some_params())


@pytest.mark.parametrize("exchange", [True, False])
def test_a_checkpoint_is_replaced_whole(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    link = tmp_path / "latest"
    link.symlink_to(saved, target_is_directory=True)
    save_params(MODEL, some_params(1), link, shard_bytes=300)
    assert link.is_symlink() and sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", "latest"]
    assert not (saved / "model.safetensors").exists()
    assert same_bits(load_params(MODEL, saved), some_params(1))


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = os.rename, list[str]()

    def second_fails(a: Any, b: Any) -> None:
        calls.append(str(b))
        if len(calls) == 2:
            raise PermissionError(13, "Permission denied")
        plain(a, b)

    monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(PermissionError):
        save_params(MODEL, some_params(1), saved)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    assert same_bits(load_params(MODEL, saved), some_params())


def test_other_folders_are_not_overwritten(tmp_path: Path, saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"also holds \['notes\.txt'\]"):
        save_params(MODEL, some_params(1), saved)
    assert (saved / "notes.txt").read_text() == "mine"
    other = tmp_path / "weights"
    other.mkdir()
    save_params(MODEL, some_params(), other)  # empty: fine
    (other / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        save_params(MODEL, some_params(1), other)
    with pytest.raises(CheckpointError, match="is a file"):
        save_params(MODEL, some_params(1), saved / "notes.txt")


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.txt"
    with write_atomically(target) as file:
        file.write(b"old")
    with pytest.raises(KeyboardInterrupt), write_atomically(target) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    with largest_file(4), pytest.raises(OSError, match=r"unchanged.*a\.txt"), write_atomically(target) as file:
        file.write(b"too much")
    assert target.read_bytes() == b"old" and [p.name for p in target.parent.iterdir()] == ["a.txt"]
    with write_atomically(target) as file:
        file.write(b"new")
    assert target.read_bytes() == b"new" and [p.name for p in target.parent.iterdir()] == ["a.txt"]
    mask = os.umask(0o027)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~mask
    with pytest.raises(NotADirectoryError), folder_atomically(target):
        pass
