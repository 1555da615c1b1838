"""The demo run: a small mixture-of-experts model, trained on the text that ships with the package."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.text import Text
from torch import Tensor

import xtf
import xtf.models
from xtf.data import Tokens, batches, demo_tokenizer, unigram_entropy, windows
from xtf.data.text import TOKENIZER_FILE
from xtf.files import write_atomically
from xtf.model import Model
from xtf.run.interrupt import Interrupted, deferred_interrupt
from xtf.run.memory import available_memory, check_fits, count
from xtf.run.metrics import MetricsWriter
from xtf.run.plot import plot_loss
from xtf.run.progress import Progress
from xtf.run.sampling import generate
from xtf.state import State
from xtf.step import TrainStep
from xtf.transforms import chunk_loss
from xtf.tree import Tree


@dataclass(frozen=True)
class TrainOptions:
    """Train a small mixture-of-experts model on "Pride and Prejudice", on the CPU, and let it write."""

    steps: int = 300
    """Updates to make."""
    batch: int = 8
    """Rows of a batch."""
    seq: int = 128
    """Tokens of a row."""
    lr: float = 5e-3
    """Peak learning rate of AdamW; it warms up linearly and falls along a cosine to a tenth."""
    warmup: int = 20
    """Steps of the warm-up; at most a tenth of the steps is used."""
    seed: int = 0
    """Of the initial parameters, the batches and the sample."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="RUN_DIR")] = None
    """Folder of the run, new or empty. By default runs/ and the time."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """What stages are compiled with."""
    preset: Annotated[str, tyro.conf.arg(help=f"The model: {', '.join(xtf.models.PRESETS)}.")] = "tiny-moe"
    evaluations: int = 6
    """How often the held-out text is evaluated."""
    prompt: str = "Elizabeth could not but smile at"
    """The text the trained model continues."""
    sample: int = 80
    """Tokens of the continuation."""
    tensorboard: bool = False
    """Also write TensorBoard files."""

    def check(self) -> None:
        """Raise `ValueError` for a value out of its range, and for a folder that is taken."""
        for name, least in (("steps", 1), ("batch", 1), ("seq", 2), ("warmup", 0), ("evaluations", 1), ("sample", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}, expected at least {least}")
        if not 0 < self.lr < 1:
            raise ValueError(f"--lr is {self.lr}, expected a rate between 0 and 1, as 0.005")
        if not self.prompt:
            raise ValueError("--prompt is empty: give at least one word to continue")
        if self.out is not None:
            _check_free(self.out)


def run(options: TrainOptions, *, console: Console | None = None) -> Path:
    """Train, evaluate, save and sample.

    Args:
        options: what to do.
        console: where the results are printed; progress goes to standard error.

    Returns:
        The run's folder. It holds ``config.json`` (options, model and versions), ``metrics.jsonl`` (a row per step; ``tokens`` and
        ``tokens_per_second`` count supervised tokens, all but the first of each row), ``loss.png``, ``checkpoint/`` (Hugging Face
        layout, with the tokenizer) and ``sample.txt``.

    Raises:
        ValueError: for options that are not possible, or a model that does not fit into memory, before anything is written.
        Interrupted: if Ctrl-C ended it. The steps that were done are saved, unless it was pressed again while that was done.
    """
    options.check()
    progress, folder = Progress(options.steps), None
    try:
        model = xtf.models.preset(options.preset)
        total, active = model.param_count()
        check_fits(total, available_memory(), f"--preset {options.preset}")
        tokens = Tokens.demo()
        batch_at = batches(tokens.train, batch=options.batch, seq=options.seq, seed=options.seed)
        held_out = list(windows(tokens.held_out, batch=options.batch, seq=options.seq))
        if model.vocab < tokens.vocab:
            raise ValueError(
                f"--preset {options.preset} has a vocabulary of {model.vocab}, the tokenizer one of {tokens.vocab}: take another"
            )
        step = _step(model, options)
        folder = new_folder(options.out)
        entropy = unigram_entropy(tokens.held_out, tokens.train, tokens.vocab)
        _write_json(folder / "config.json", _description(model, options, tokens, entropy))
        progress.message(
            f"{options.preset}: {count(total)} parameters, {count(active)} active per token; "
            f"{len(tokens.train):,} tokens of text; the first step compiles"
        )
        with MetricsWriter(folder, tensorboard=options.tensorboard) as writer:
            state, done, loss = _loop(step, options, progress, writer, batch_at, held_out)
        params = step.full(state.params)
        xtf.save_params(model, params, folder / "checkpoint", tokenizer_from=TOKENIZER_FILE.parent)
        plot_loss(folder, entropy=entropy, title=f'{options.preset} on "Pride and Prejudice"')
        if done < options.steps:
            raise KeyboardInterrupt
        text = generate(model, params, demo_tokenizer(), options.prompt, tokens=options.sample, seed=options.seed, window=options.seq)
    except KeyboardInterrupt as error:
        raise Interrupted(folder, progress.step, options.steps) from error
    with write_atomically(folder / "sample.txt") as file:
        file.write(f"{options.prompt}{text}\n".encode())
    _summarize(console or Console(), folder, loss, entropy, options.prompt, text)
    return folder


def _loop(
    step: TrainStep,
    options: TrainOptions,
    progress: Progress,
    writer: MetricsWriter,
    batch_at: Callable[[int], dict[str, Tensor]],
    held_out: Sequence[Mapping[str, Tensor]],
) -> tuple[State, int, float]:
    """Train until the last step, or until Ctrl-C. Returns the state, how many steps were done, and the last held-out loss."""
    state, done, loss = step.init(options.seed), 0, float("nan")
    due = {round(options.steps * (i + 1) / options.evaluations) for i in range(options.evaluations)}
    say = "stopping after this step, then saving; Ctrl-C again stops at once and loses the steps that are not saved yet"
    with progress, deferred_interrupt(lambda: progress.message(say)) as interrupt:
        while done < options.steps and not interrupt.asked:
            # in the first step, which compiles for a while, there is nothing to save yet, and nothing waits
            with interrupt.held() if done else nullcontext():
                batch = batch_at(done)
                state, metrics = step(state, batch)
                done += 1
                progress.update(done, loss=float(metrics["cross_entropy"]), tokens=int(metrics["tokens"]))
                extra = {} if progress.tokens_per_second is None else {"tokens_per_second": progress.tokens_per_second}
                if done in due or interrupt.asked:
                    progress.pause()
                    extra["held_out_loss"] = loss = evaluate(step, state.params, held_out)
                    progress.resume()
                writer.write(done, metrics | extra)
    return state, done, loss


def evaluate(step: TrainStep, params: Tree, held_out: Iterable[Mapping[str, Tensor]]) -> float:
    """Mean cross-entropy, in nats per token, over batches; auxiliary losses do not count."""
    total, count = 0.0, 0
    for batch in held_out:
        found = step.evaluate(params, batch)
        n = int(found["tokens"])
        total, count = total + float(found["cross_entropy"]) * n, count + n
    return total / count


def new_folder(path: Path | None) -> Path:
    """Make a run's folder: ``path``, which must be new or empty, or ``runs/`` and the time, made unique.

    Raises:
        ValueError: if something stands there.
    """
    if path is None:
        base = Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")
        path = next(p for p in (base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 1000))) if not p.exists())
    _check_free(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _check_free(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"--out {path} is a file: give a folder that is new or empty")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"--out {path} is not empty: give a folder that is new or empty, so that no earlier run is lost")


def _step(model: Model, options: TrainOptions) -> TrainStep:
    warmup = min(options.warmup, options.steps // 10)
    rate = xtf.optim.warmup_cosine(options.lr, warmup, options.steps, final=options.lr / 10)
    decay = xtf.optim.adamw(rate, betas=(0.9, 0.95), weight_decay=0.1, mask=xtf.optim.no_decay_1d)
    optimizer = xtf.optim.chain(xtf.optim.clip_by_global_norm(1.0), decay)
    return xtf.compile(xtf.compose(chunk_loss())(xtf.train_step(model, optimizer)), backend=options.backend, donate=True)


def _description(model: Model, options: TrainOptions, tokens: Tokens, entropy: float) -> dict[str, Any]:
    total, active = model.param_count()
    return {
        "command": "train",
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(options).items()},
        "model": {"family": model.family, "parameters": total, "active_parameters_per_token": active, "config": dict(model.hf_config)},
        "data": {
            "train_tokens": len(tokens.train),
            "held_out_tokens": len(tokens.held_out),
            "vocab": tokens.vocab,
            "unigram_entropy": entropy,
        },
        "versions": {"xtf": xtf.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
    }


def _write_json(path: Path, value: object) -> None:
    with write_atomically(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def _summarize(console: Console, folder: Path, loss: float, entropy: float, prompt: str, text: str) -> None:
    console.print(
        Text.assemble(
            "\nheld-out loss ", (f"{loss:.3f}", "bold cyan"), f" nats per token; unigram entropy is {entropy:.3f}: ",
            f"context is worth {entropy - loss:.2f} nats" if loss < entropy else "context is not used yet: train longer",
        )
    )  # fmt: skip
    console.print(Text.assemble("\n", (prompt, "bold"), (text, "italic"), "\n"))
    about = {
        "metrics.jsonl": "a row per step",
        "loss.png": "the losses over the steps",
        "checkpoint": "Hugging Face layout, with tokenizer",
        "sample.txt": "the text above",
        "config.json": "options, model, versions",
    }
    for name, what in about.items():
        console.print(Text.assemble(f"  {folder / name}", (f"  {what}", "dim")), soft_wrap=True)
