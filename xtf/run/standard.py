"""The built-in recipe: what ``xtf train`` does without a recipe file."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch

import xtf
from xtf.collectives.planned import even
from xtf.collectives.process_group import backend as device_backend
from xtf.data.batches import Packing
from xtf.data.text import TOKENIZER_FILE
from xtf.deterministic import WORKSPACE
from xtf.mesh import Mesh
from xtf.optim import Optimizer
from xtf.run.recipe import Data, Evaluation, Files, Recipe, Schedule
from xtf.run.training_data import DemoText, FileData, Learn
from xtf.step import TrainStep
from xtf.transforms import (
    accumulate,
    chunk_loss,
    context_parallel,
    expert_parallel,
    float8,
    precision,
    remat,
    shard,
    swap_activations,
    swap_optimizer,
)
from xtf.transforms.swap_activations import automatic

Transform = Callable[[TrainStep], TrainStep]


def standard(
    *,
    model: str = "tiny-moe",
    init_from: Path | None = None,
    data: tuple[Path, ...] = (),
    eval_data: tuple[Path, ...] = (),
    held_out: int = 64,
    steps: int = 300,
    tokens_per_step: int | None = None,
    seq: int | None = None,
    lr: float | None = None,
    warmup: int = 20,
    decay: Literal["cosine", "linear", "constant"] = "cosine",
    optimizer: Literal["adamw", "muon"] = "adamw",
    weight_decay: float = 0.1,
    clip: float = 1.0,
    skip_spikes: float = 0.0,
    transforms: str | None = None,
    mesh: str = "data=-1",
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor",
    deterministic: bool = False,
    seed: int = 0,
    tokenizer: Path | None = None,
    template: str | None = None,
    skip_bad_lines: bool = False,
    special_tokens_in_text: bool = False,
    cache: Path | None = None,
    packing: Packing = "best_fit",
    mix: tuple[float, ...] = (),
    loss_weights: tuple[float, ...] = (),
    learn: tuple[Learn, ...] = (),
    stop_after_skips: int = 10,
    evaluate_every: int = 50,
    save_every: int = 100,
    keep: int = 2,
    keep_every: int = 0,
    wait_for_saves: bool = False,
    prompt: str | None = None,
    sample: int = 80,
) -> Recipe:
    """Train a model on files of conversations or text, or without any on "Pride and Prejudice".

    Args:
        model: A Hugging Face checkpoint folder to start from, or a preset trained from initial values.
        init_from: Start a preset from this checkpoint folder.
        data: Files to train on: JSONL, JSON or Parquet, of conversations (messages, conversations) or text (text, content).
        eval_data: Files to evaluate on.
        held_out: Documents at the end of each data file that are evaluated on and not trained on, without --eval-data.
        steps: Updates to make.
        tokens_per_step: Tokens of a global batch, a multiple of --seq (by default 8 rows).
        seq: Tokens of a row, into which documents are packed (by default 128 for the demo, 1024 for files).
        lr: Peak learning rate (by default 5e-3 for a preset, 2e-5 for a checkpoint).
        warmup: Steps of linear warm-up; at most a tenth of the steps is used.
        decay: Of the learning rate after the warm-up, to a tenth of its peak.
        optimizer: AdamW, or Muon for matrices with AdamW for the rest.
        weight_decay: Decoupled; vectors (norms, biases) have none.
        clip: Largest global norm of the gradients; 0 does not clip.
        skip_spikes: Skip a step whose gradient norm is more than this many times the median of the last 128; 0 skips none.
        transforms: In the order of compose, as shard,chunk_loss,accumulate=2,precision=bfloat16,expert_parallel=expert/2 (by
            default chunk_loss, and shard where there are several ranks).
        mesh: Axes of the ranks, as data=-1, data=-1,expert=8 or replica=2,data=4 (shard then keeps a copy per replica).
        backend: What stages are compiled with.
        deterministic: Use only algorithms that give the same bits every time.
        seed: Of initial values, the order of the data, and the sample.
        tokenizer: Folder of the tokenizer (by default that of the model).
        template: Chat template: a .jinja file or the name of one that ships with xtf (by default the tokenizer's own).
        skip_bad_lines: Skip lines that cannot be read; they are counted and listed.
        special_tokens_in_text: Let texts that look like special tokens become these.
        cache: Folder where tokenised files are kept (by default in the user's cache folder).
        packing: How documents are laid into rows; "balanced" gives rows, and so ranks, of the same cost in every step.
        mix: How often each data file is drawn from, a weight for each; by default every document once an epoch.
        loss_weights: What the loss weights of each data file are multiplied by.
        learn: What is learned of the conversations of each data file.
        stop_after_skips: Stop when as many steps in a row were skipped, because loss or gradients were not finite or far above what they
            had been; 0 never stops.
        evaluate_every: Steps between evaluations; 0 evaluates before the first and after the last step only.
        save_every: Steps between two savings of the whole state; 0 saves only when the run is stopped.
        keep: How many saved states are kept, the newest.
        keep_every: Saved states of steps that are multiples of this are kept for good, too; a multiple of --save-every, or 0.
        wait_for_saves: Train on only when a state is written, instead of copying it first; a save then takes no memory.
        prompt: A text, or for conversations a user's message, that the trained model answers in the end.
        sample: Tokens of this answer.
    """
    if deterministic:
        os.environ.setdefault(WORKSPACE, ":4096:8")  # cuBLAS reads it when it is first used
    folder = None if is_preset(model) else Path(model)
    called = model if folder is None else folder.name
    built = xtf.models.preset(model) if folder is None else xtf.models.from_hf(folder)
    given = filled_in({"model": model, "init_from": init_from, "data": data, "seq": seq, "tokens_per_step": tokens_per_step, "lr": lr}
                      | {"tokenizer": tokenizer, "prompt": prompt})  # fmt: skip
    length, total, rate, tokens_of, asked = (given[name] for name in ("seq", "tokens_per_step", "lr", "tokenizer", "prompt"))
    ranks = parse_mesh(mesh)
    if length < 2:
        raise ValueError(f"--seq is {length}, expected at least 2: the first token of a row is never a target")
    if total < length or total % length:
        raise ValueError(
            f"--tokens-per-step is {total}, expected a multiple of --seq ({length}), as {max(1, round(total / length)) * length}"
        )
    least = {"steps": (steps, 1), "held-out": (held_out, 0), "seed": (seed, 0), "evaluate-every": (evaluate_every, 0)}
    least |= {
        "stop-after-skips": (stop_after_skips, 0),
        "save-every": (save_every, 0),
        "keep": (keep, 1),
        "keep-every": (keep_every, 0),
        "sample": (sample, 0),
        "warmup": (warmup, 0),
    }
    for name, (value, bound) in least.items():
        if not bound <= value < 2**63:
            raise ValueError(f"--{name} is {value}, expected at least {bound}")
    if prompt == "":
        raise ValueError("--prompt is empty: give at least one word")
    chosen: Data = (
        FileData(
            data,
            tokens_of,
            total // length,
            length,
            seed,
            held_out,
            eval_data,
            template,
            skip_bad_lines,
            special_tokens_in_text,
            cache,
            packing,
            mix,
            loss_weights,
            learn,
        )
        if data
        else DemoText(total // length, length, seed)
    )
    if not data and (mix or loss_weights or learn):
        raise ValueError("--mix, --loss-weights and --learn are of data files: give --data")
    if not data and eval_data:
        raise ValueError("--eval-data without --data: give the files to train on too")
    if not data and built.vocab < 2048:
        raise ValueError(f"--model {model} has a vocabulary of {built.vocab}, the tokenizer of the demo's text one of 2048: take another")
    update = _optimizer(optimizer, rate, warmup, decay, steps, weight_decay, clip, skip_spikes)
    step = xtf.train_step(built, update, device=device_backend()[1])
    applied = parse_transforms(default_transforms(ranks) if transforms is None else transforms, ranks)
    step = xtf.compile(xtf.compose(*applied)(step), backend=backend, donate=True, deterministic=deterministic)
    return Recipe(
        mesh=ranks,
        step=step,
        data=chosen,
        schedule=Schedule(steps, save_every, keep, keep_every, wait_for_saves),
        evaluation=Evaluation(evaluate_every, asked, chat=bool(data), tokens=sample),
        files=Files(tokens_of, folder or init_from),
        seed=seed,
        stop_after_skips=stop_after_skips,
        title=f"{called} on {', '.join(path.name for path in data)}" if data else f'{called} on "Pride and Prejudice"',
    )


def default_transforms(mesh: Mesh) -> str:
    """What is applied where ``--transforms`` is not given."""
    return "shard,chunk_loss" if mesh.size > 1 else "chunk_loss"


def is_preset(model: str) -> bool:
    """Whether a model is meant by its preset's name, not by its folder."""
    return model in xtf.models.PRESETS or not (Path(model).exists() or os.sep in model)


def filled_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `standard` with the values that follow from others, where they were not given. ``transforms`` follows from
    the ranks, which may change from launch to launch, and stays open."""
    found = absolute(settings)
    folder = None if is_preset(found["model"]) else Path(found["model"])
    start, demo = folder or found["init_from"], not found["data"]
    if found["seq"] is None:
        found["seq"] = 128 if demo else 1024
    if found["tokens_per_step"] is None:
        found["tokens_per_step"] = 8 * found["seq"]
    if found["lr"] is None:
        found["lr"] = 5e-3 if start is None else 2e-5
    if found["tokenizer"] is None:
        found["tokenizer"] = start or TOKENIZER_FILE.parent
    if found["prompt"] is None and demo:
        found["prompt"] = "Elizabeth could not but smile at"
    return found


def absolute(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the paths of files and folders in full: a run may go on from another directory.

    Example:
        >>> absolute({"cache": Path("/tmp/a"), "model": "tiny-moe", "steps": 3})
        {'cache': PosixPath('/tmp/a'), 'model': 'tiny-moe', 'steps': 3}
    """

    def full(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(full(item) for item in cast(tuple[Any, ...], value))
        return value.absolute() if isinstance(value, Path) else value

    found = {name: full(value) for name, value in settings.items()}
    if isinstance(model := found.get("model"), str) and not is_preset(model):
        found["model"] = os.path.abspath(model)
    return found


def _optimizer(name: str, lr: float, warmup: int, decay: str, steps: int, weight_decay: float, clip: float, spikes: float) -> Optimizer:
    if not 0 < lr < 1:
        raise ValueError(f"--lr is {lr}, expected a rate between 0 and 1, as 0.0001")
    for flag, value in (("weight-decay", weight_decay), ("clip", clip)):
        if not 0 <= value < math.inf:
            raise ValueError(f"--{flag} is {value}, expected a number of at least 0")
    if spikes and not 1 < spikes < math.inf:
        raise ValueError(f"--skip-spikes is {spikes}, expected 0, or a number above 1, as 10")
    warm = min(warmup, steps // 10)
    if decay == "constant":
        rate = xtf.optim.warmup_constant(lr, warm)
    else:
        rate = (xtf.optim.warmup_cosine if decay == "cosine" else xtf.optim.warmup_linear)(lr, warm, steps, final=lr / 10)
    make = xtf.optim.adamw if name == "adamw" else xtf.optim.muon_adamw
    update = make(rate, betas=(0.9, 0.95), weight_decay=weight_decay, mask=xtf.optim.no_decay_1d)
    before = [xtf.optim.skip_spikes(spikes)] if spikes else []
    before += [xtf.optim.clip_by_global_norm(clip)] if clip else []
    return xtf.optim.chain(*before, update) if before else update


PLAN = "plan:"
"""What a mesh of planned ranks begins with."""


def parse_mesh(text: str) -> Mesh:
    """The mesh of a text as ``replica=2,data=-1``; of ``plan:data=8,expert=8`` one of ranks that are not there (`xtf.plan_mesh`), on which
    -1 is 1.

    Raises:
        ValueError: for what is no list of ``axis=size``, or sizes that do not fit the ranks there are.
    """
    sizes: dict[str, int] = {}
    planned, given = text.startswith(PLAN), text.removeprefix(PLAN)
    for part in given.split(","):
        name, _, size = part.partition("=")
        if not name.strip().isidentifier() or not size.strip().lstrip("-").isdigit() or name.strip() in sizes:
            raise ValueError(f"--mesh {text}: expected different axes with sizes, as data=-1 or replica=2,data=4")
        sizes[name.strip()] = int(size)
    if planned:
        return xtf.plan_mesh(rank=0, routing=even, **{name: 1 if size == -1 else size for name, size in sizes.items()})
    try:
        return xtf.mesh(**sizes)
    except ValueError as error:
        raise ValueError(
            f"--mesh {text}: {error}, or start as many with torchrun; a run that goes on may be given another --mesh"
        ) from None


class _Named(NamedTuple):
    """A transform by name: how it is made of its value, and what values it takes."""

    make: Callable[[Mesh, str], Transform]
    values: str


def _shard(mesh: Mesh, value: str) -> Transform:
    axes = value.split("+") if value else [name for name in mesh if name != "replica"]
    missing = [name for name in axes if name not in mesh.sizes]
    if missing:
        raise ValueError(f"shard={value}: the mesh has no axis {', '.join(missing)}; it has {', '.join(mesh)}")
    return shard(*(mesh[name] for name in axes), replicate=mesh["replica"] if "replica" in mesh.sizes else None)


def _precision(mesh: Mesh, value: str) -> Transform:
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if value not in dtypes:
        raise ValueError(f"precision={value}: expected one of {', '.join(dtypes)}, what stages compute in")
    return precision(compute=dtypes[value], reduce=torch.float32)


def _chunk_loss(mesh: Mesh, value: str) -> Transform:
    return chunk_loss(tokens=_count("chunk_loss", value) if value else None)


def _accumulate(mesh: Mesh, value: str) -> Transform:
    return accumulate(_count("accumulate", value))


def _swap_activations(mesh: Mesh, value: str) -> Transform:
    if value not in ("", "automatic"):
        raise ValueError(f"swap_activations={value}: expected nothing or automatic; any other policy is given in a recipe")
    return swap_activations(automatic()) if value else swap_activations()


def _swap_optimizer(mesh: Mesh, value: str) -> Transform:
    if value:
        raise ValueError(f"swap_optimizer={value}: it takes no value")
    return swap_optimizer()


def _remat(mesh: Mesh, value: str) -> Transform:
    if value in ("", "everything", "nothing"):
        return remat(value or "everything")
    names = [name.strip() for name in value.split("+")]
    try:
        policy: float | list[str] = float(value)
    except ValueError:
        policy = names
    if "" in names or (isinstance(policy, float) and not 0 <= policy <= 1):
        said = "everything, nothing, a budget from 0 to 1, or names joined by +, as remat=attention+qkv"
        raise ValueError(f"remat={value}: expected {said}")
    return remat(policy)


def _expert_parallel(mesh: Mesh, value: str) -> Transform:
    name, slash, parts = value.partition("/")
    name = name or "expert"
    if name not in mesh.sizes:
        raise ValueError(
            f"expert_parallel={value or name}: the mesh has no axis {name}; it has {', '.join(mesh)}: give one, as --mesh data=-1,expert=2"
        )
    if slash and (not parts.isdigit() or int(parts) < 1):
        raise ValueError(f"expert_parallel={value}: expected an axis and a number of parts, as expert_parallel={name}/2")
    return expert_parallel(mesh[name], overlap=int(parts or 1))


def _context_parallel(mesh: Mesh, value: str) -> Transform:
    name = value or "context"
    if name not in mesh.sizes:
        raise ValueError(
            f"context_parallel={name}: the mesh has no axis {name}; it has {', '.join(mesh)}: give one, as --mesh data=-1,context=2"
        )
    return context_parallel(mesh[name])


def _float8(mesh: Mesh, value: str) -> Transform:
    said = value.split("+") if value else []
    if set(said) - {"e5m2", "power_of_two", "activations"} or len(set(said)) < len(said):
        raise ValueError(f"float8={value}: expected nothing, or some of e5m2, power_of_two and activations joined by +")
    gradients = torch.float8_e5m2 if "e5m2" in said else torch.float8_e4m3fn
    return float8(gradients=gradients, power_of_two="power_of_two" in said, weight_gradient="activations" not in said)


def _count(name: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"{name}={value}: expected a number of at least 1, as {name}=2")
    return int(value)


TRANSFORMS: dict[str, _Named] = {
    "shard": _Named(_shard, "axes joined by +, by default all but replica"),
    "chunk_loss": _Named(_chunk_loss, "tokens of a chunk, by default chosen"),
    "accumulate": _Named(_accumulate, "micro-batches"),
    "swap_activations": _Named(_swap_activations, "nothing, or automatic: as much as copies hide"),
    "swap_optimizer": _Named(_swap_optimizer, "nothing"),
    "remat": _Named(_remat, "everything, nothing, a budget from 0 to 1, or names of values joined by +: attention+qkv"),
    "expert_parallel": _Named(_expert_parallel, "an axis, by default expert, and after a slash the parts that overlap: expert/2"),
    "context_parallel": _Named(_context_parallel, "an axis, by default context"),
    "float8": _Named(
        _float8,
        "nothing, or joined by +: e5m2 (gradients), power_of_two (scales), activations (gradients of weights stay as they are)",
    ),
    "precision": _Named(_precision, "bfloat16, float16 or float32"),
}


def parse_transforms(text: str, mesh: Mesh) -> list[Transform]:
    """Transforms of a text as ``shard,chunk_loss,accumulate=2``, in the order of `xtf.compose`.

    Raises:
        ValueError: for an unknown transform (it shows the nearest) or a value that it does not take.

    Example:
        >>> len(parse_transforms("chunk_loss=512,accumulate=2", xtf.mesh()))
        2
    """
    found: list[Transform] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in TRANSFORMS:
            near = difflib.get_close_matches(name, TRANSFORMS)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(TRANSFORMS)}"
            raise ValueError(f"--transforms has no {name!r}; {hint}")
        found.append(TRANSFORMS[name].make(mesh, value))
    return found
