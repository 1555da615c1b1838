"""What is damaged: training checkpoints, Hugging Face folders, recipes and runs, data files, configs and flags.

Each subject is a function of a random generator, the sound inputs (`Inputs`) and an empty folder. It damages a copy, uses it as a user
would, and returns what it did and what was said. It raises for a finding.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import xtf
from tests.fuzz.mutate import VALUES, damage_bytes, damage_folder, damage_json
from tests.fuzz.outcome import Finding, call, command
from tests.parity.test_transformers import DEEPSEEK, GLM, LLAMA, MIXTRAL, MOE, OSS, QWEN2, QWEN3
from xtf import models, testing, tree
from xtf.checkpoint import latest, load_state, save_state
from xtf.data.conversation import parse_row
from xtf.data.rows import read_rows
from xtf.data.text import TOKENIZER_FILE
from xtf.mesh import Mesh, simulate
from xtf.run.folder import read_run
from xtf.transforms import shard

CONFIGS: Sequence[Mapping[str, Any]] = (LLAMA, QWEN2, QWEN3, MOE, MIXTRAL, OSS, DEEPSEEK, GLM)

SMALL = MOE | {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4, "num_experts": 3, "head_dim": 4, "vocab_size": 2048}

RECIPE = '''"""A recipe."""
import xtf
from xtf.run import DemoText, Evaluation, Files, Recipe, Schedule
from xtf.data.text import TOKENIZER_FILE


def recipe(*, lr: float = 1e-3, steps: int = 2, model: str = "tiny-moe") -> Recipe:
    """A recipe.

    Args:
        lr: the rate.
    """
    mesh = xtf.mesh(data=-1)
    step = xtf.train_step(xtf.models.preset(model), xtf.optim.adamw(lr))
    return Recipe(mesh, step, DemoText(rows=8, seq=128), Schedule(steps), Evaluation(0), Files(TOKENIZER_FILE.parent), title="mine")
'''

TURNS = [
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there", "loss_weight": 0.5}]},
    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "system": "Be short."},
    {"text": "It is a truth universally acknowledged, that a single man must be in want of a wife."},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": '{"at": "Bath"}'}}]},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "Rain.", "train": True},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
    },
]


@dataclass(frozen=True)
class Inputs:
    """Sound inputs; none is changed.

    Args:
        folder: holds ``step``, ``other`` (of the same run, other bits), ``hf`` (several files), ``one`` (one file), ``mine.py``,
            ``run``, and data as ``rows.jsonl``, ``rows.json``, ``rows.parquet``.
        state: the leaves of ``step``.
    """

    folder: Path
    state: list[Tensor]


def step_of() -> xtf.TrainStep:
    """The step whose state the training checkpoint holds."""
    return xtf.train_step(models.from_hf(SMALL), testing.default_optimizer())


def prepare(folder: Path) -> Inputs:
    """Write sound inputs."""
    whole = step_of()

    def save(mesh: Mesh) -> None:
        step = shard(mesh["data"])(step_of())
        for name, seed in (("step", 0), ("other", 1)):
            save_state(step, step.init(seed), folder / "run" / "checkpoints" / name, extra={"at": 1}, tokenizer_from=TOKENIZER_FILE.parent)

    simulate(save, data=2)
    for name in ("step", "other"):
        shutil.copytree(folder / "run" / "checkpoints" / name, folder / name)
    xtf.save_params(whole.model, whole.model.init(0), folder / "hf", shard_bytes=100_000, tokenizer_from=TOKENIZER_FILE.parent)
    xtf.save_params(whole.model, whole.model.init(0), folder / "one", tokenizer_from=TOKENIZER_FILE.parent)
    (folder / "mine.py").write_text(RECIPE)
    (folder / "run" / "recipe.py").write_text(RECIPE)
    about = {"recipe": "mine.py", "settings": {"lr": 0.002, "steps": 2, "model": "tiny-moe"}, "steps": 2, "title": "mine"}
    (folder / "run" / "run.json").write_text(json.dumps(about))
    rows = TURNS * 3
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json").write_text(json.dumps(rows))
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.table({"text": [f"{row['text']} {i}" for i, row in enumerate([TURNS[2]] * 40)]})
    pyarrow.parquet.write_table(texts, folder / "rows.parquet")
    state, _ = load_state(whole, folder / "step")
    return Inputs(folder, [leaf for leaf in tree.leaves(state) if leaf is not None])


def same_bits(found: Any, wanted: Sequence[Tensor]) -> bool:
    """Whether these are the leaves that were saved."""
    leaves = [leaf for leaf in tree.leaves(found) if leaf is not None]
    return len(leaves) == len(wanted) and all(
        a.dtype == b.dtype and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        for a, b in zip(leaves, wanted, strict=True)
    )


def training(rng: Random, inputs: Inputs, work: Path) -> tuple[str, str]:
    """A damaged training checkpoint: its own bits, or an error."""
    folder = work / "run" / "step"
    shutil.copytree(inputs.folder / "step", folder)
    forged = rng.random() < 0.2
    if forged:  # its own checksum right: by no accident, but what is wrong is said
        about = json.loads((folder / "state.json").read_text())
        said, about = damage_json(rng, about["state"])
        crc = zlib.crc32(json.dumps(about, sort_keys=True, separators=(",", ":")).encode())
        (folder / "state.json").write_text(json.dumps({"crc32": crc, "state": about}))
        said = f"state.json with its checksum: {said}"
    else:
        said = damage_folder(rng, folder, inputs.folder / "other")
    step, params = step_of(), len(tree.leaves(step_of().model.specs))

    def load() -> None:
        state, extra = load_state(step, folder)
        if not (same_bits(state.params, inputs.state[:params]) and (forged or (same_bits(state, inputs.state) and extra == {"at": 1}))):
            raise Finding("the state is another than was saved")

    def load_params() -> None:
        if not same_bits(xtf.load_params(step.model, folder), inputs.state[:params]):
            raise Finding("the parameters are others than were saved")

    told = [call(load), call(load_params), call(lambda: latest(work / "run"))]
    if rng.random() < 0.3:
        told.append(command("export", str(folder), str(work / "out")))
        if told[-1] == "ran":
            call(lambda: xtf.load_params(step.model, work / "out"))
            if not same_bits(xtf.load_params(step.model, work / "out"), inputs.state[:params]):
                raise Finding("the exported parameters are others than were saved")
    return said, " | ".join(told)


def hugging_face(rng: Random, inputs: Inputs, work: Path) -> tuple[str, str]:
    """A damaged Hugging Face folder. Its format has no checksums: changed bytes of weights cannot be told from others, and headers that
    exchange two tensors of one shape neither. Everything of its structure can."""
    folder = work / "hf"
    shutil.copytree(inputs.folder / rng.choice(("hf", "one")), folder)
    said = damage_folder(rng, folder, inputs.folder / "one")

    def load() -> None:
        model = models.from_hf(folder)
        if sum(spec.numel for spec in tree.leaves(model.specs)) > 1e7:
            return
        params = xtf.load_params(model, folder)
        for path, spec in tree.items(model.specs).items():
            leaf = tree.items(params)[path]
            if tuple(leaf.shape) != spec.shape or leaf.dtype != spec.dtype:
                raise Finding(f"{path} has {leaf.dtype} {tuple(leaf.shape)}")

    told = [call(load)]
    if rng.random() < 0.3:
        told.append(command("export", str(folder), str(work / "out")))
    elif rng.random() < 0.3:
        told.append(command("generate", str(folder), "It is", "--tokens", "2"))
    return said, " | ".join(told)


BAD_RECIPES = (
    "", "1/0", "raise SystemExit(3)", "recipe = 3", "def recipe(", "def recipe(lr): pass",
    "def recipe(): return 3",
    "def recipe(): return None", "def recipe(): raise KeyError('a')", "def recipe(): raise RecursionError", "def recipe(): return recipe()",
    "import nowhere", "def recipe(*, lr: 'Nothing' = 1): return lr", "def recipe(**all): return all", "class recipe: pass",
    "def recipe(): raise AssertionError", "def recipe(): yield 1", "def recipe():\n  import sys\n  sys.exit()", "recipe = print",
    "async def recipe(): return 1", "recipe = len", "recipe = lambda lr=1: lr", "def recipe(*, lr=object()): return lr", "\ufeff" + RECIPE,
    "def recipe(): raise Exception", "def recipe(*args): return args",
    RECIPE + "\nrecipe = recipe()",
    "x = " + "(" * 300 + ")" * 300, "x = " + "9" * 5000, "def recipe():\n    return type('Recipe', (), {})()", "# coding: nothing\n",
)  # fmt: skip


def recipes(rng: Random, inputs: Inputs, work: Path) -> tuple[str, str]:
    """A recipe file that is none, or a damaged ``run.json``."""
    kind = rng.choice(("file", "bytes", "word", "run", "run", "settings"))
    if kind in ("run", "settings"):
        shutil.copytree(inputs.folder / "run", work / "run")
        said = damage_folder(rng, work / "run")
        told = [call(lambda: read_run(work / "run")), command("train", "--out", str(work / "run"), "--resume", "--print")]
        if rng.random() < 0.3:
            told.append(command("plot", str(work / "run")))
        return said, " | ".join(told)
    file = work / "mine.py"
    if kind == "file":
        text = rng.choice(BAD_RECIPES)
        file.write_text(text)
        said = f"recipe {text[:60]!r}"
    elif kind == "bytes":
        said, data = damage_bytes(rng, RECIPE.encode())
        file.write_bytes(data)
    else:
        words = RECIPE.split(" ")
        at, other = rng.randrange(len(words)), rng.randrange(len(words))
        words[at] = rng.choice((words[other], "", "None", "-1", "'x'", "0"))
        said = f"word {at} is {words[at]!r}"
        file.write_text(" ".join(words))
    pairs = rng.choice(((), ("--set", "lr=x"), ("--set", "steps=-1"), ("--set", "model=no"), ("--set", "lr"), ("--set", f"lr={'9' * 400}")))
    return said, command("train", str(file), "--print", *pairs)


def data_lines(rng: Random, inputs: Inputs, work: Path) -> tuple[str, str]:
    """A damaged data file."""
    suffix = rng.choice((".jsonl", ".jsonl", ".json", ".parquet"))
    file = work / f"rows{suffix}"
    data = (inputs.folder / file.name).read_bytes()
    if suffix != ".parquet" and rng.random() < 0.6:
        said, rows = "", json.loads(json.dumps(TURNS * 3))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(rows))
            more, rows[at] = damage_json(rng, rows[at])
            said += f"row {at}: {more}; "
        data = json.dumps(rows).encode() if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows).encode()
    else:
        said, data = damage_bytes(rng, data)
    file.write_bytes(data)

    def read() -> None:
        for row in read_rows(file):
            call(lambda row=row: parse_row(row.value))

    told = [call(read)]
    if rng.random() < 0.6:
        skip = rng.choice(([], ["--skip-bad-lines"]))
        what = rng.choice(
            (["data", "inspect", str(file), "--out", str(work / "lengths.png"), "--ranks", "2"], ["data", "preview", str(file)])
        )
        told.append(command(*what, "--tokenizer", str(TOKENIZER_FILE.parent), "--cache", str(work / "cache"), "--seq", "64", *skip))
    return f"{suffix}: {said}", " | ".join(told)


def configs(rng: Random, inputs: Inputs, work: Path) -> tuple[str, str]:
    """A damaged ``config.json`` of any family: refused, or a model whose loss on a batch is a number."""
    config = dict(rng.choice(CONFIGS))
    said = str(config["model_type"])
    for _ in range(rng.choice((1, 1, 2))):
        more, config = damage_json(rng, config)
        said += f"; {more}"
        if not isinstance(config, dict) or not config:
            break

    def build() -> None:
        model = models.from_hf(config)
        if sum(spec.numel for spec in tree.leaves(model.specs)) > 1e6 or model.vocab < 2:
            return
        ids = torch.arange(14).view(2, 7) % model.vocab
        loss = model.loss(model.init(0), {"input_ids": ids, "labels": ids})
        if loss.shape != () or not math.isfinite(float(loss)):
            raise Finding(f"the loss is {loss}")

    told = [call(build)] if isinstance(config, dict) else []
    if rng.random() < 0.4:
        (work / "config.json").write_text(json.dumps(config))
        told.append(command("train", "--model", str(work), "--tokenizer", str(TOKENIZER_FILE.parent), "--print"))
    return said, " | ".join(told)


FLAGS: Mapping[str, Sequence[str]] = {
    "train": ("--steps", "--lr", "--seq", "--tokens-per-step", "--mesh", "--transforms", "--model", "--data", "--optimizer", "--clip",
              "--warmup",
              "--seed", "--held-out", "--weight-decay", "--decay", "--budget", "--set", "--out", "--tokenizer", "--template", "--mix",
              "--loss-weights", "--learn", "--packing", "--backend", "--prompt", "--sample", "--keep", "--fit", "--resume", "--eval-data",
              "--init-from", "--cache"),
    "memory": ("--model", "--seq", "--tokens-per-step", "--mesh", "--transforms", "--optimizer", "--json", "--count", "--budget"),
    "generate": ("--tokens", "--temperature", "--top-p", "--seed", "--stop", "--dtype", "--device", "--template", "--system", "--chat"),
    "eval": ("--batch-tokens", "--seq", "--long", "--template", "--dtype", "--device", "--logprobs"),
    "export": ("--dtype", "--shard-size", "--prefer"),
    "upcycle": ("--experts", "--top-k", "--dtype", "--shard-size", "--seed"),
    "plot": ("--out", "--x", "--metric", "--smooth"),
}  # fmt: skip

TEXTS = (
    "0", "1", "-1", "2", "3", "9" * 30, "1e308", "-1e9", "nan", "inf", "", " ", "x", "None", "True", "a=b", "data=2", "data=-1", "data=0",
    "data=-1,expert=3", "data=99999999999", "=", ",", "shard", "chunk_loss", "chunk_loss=0", "accumulate=x", "accumulate=0", "nothing=3",
    "shard,shard", "precision=no", "expert_parallel=expert", "plan:data=4", "tiny-moe", "/", "..", "\x01", "é", "float32", "adamw", "muon",
    "1KB", "1e9GB", "20GB", "../nowhere", "nowhere/at-all", "cuda:99", "cpu", "--help", "--", "[red]x[/red]", "{", "%s", "eager",
)  # fmt: skip


def flags(rng: Random, inputs: Inputs, work: Path) -> tuple[str, str]:
    """A command line at random. Training is only shown."""
    name = rng.choice(list(FLAGS))
    first = {
        "train": ["--print"],
        "memory": ["--out", str(work / "memory.png"), "--count", "--seq", "64"],
        "generate": [str(inputs.folder / "one"), "It is"],
        "eval": [str(inputs.folder / "one"), str(inputs.folder / "rows.jsonl"), "--cache", str(work / "cache")],
        "export": [str(inputs.folder / "one"), str(work / "out")],
        "upcycle": [str(inputs.folder / "one"), str(work / "out")],
        "plot": [str(inputs.folder / "run")],
    }[name]
    more: list[str] = ["--tokens", "2"] if name == "generate" else []
    for _ in range(rng.choice((1, 1, 2, 3))):
        more += [rng.choice(FLAGS[name]), *rng.choices(TEXTS, k=rng.choice((0, 1, 1, 1, 2)))]
    if rng.random() < 0.1:
        more[rng.randrange(len(more))] = str(rng.choice(VALUES)).replace("\ud800", "?")
    return f"xtf {name} {' '.join(more)}", command(name, *first, *more)


SUBJECTS: Mapping[str, Callable[[Random, Inputs, Path], tuple[str, str]]] = {
    "training": training,
    "hugging_face": hugging_face,
    "recipes": recipes,
    "data_lines": data_lines,
    "configs": configs,
    "flags": flags,
}
