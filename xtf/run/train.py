"""The loop of a run: train, look, save; and go on where a run stopped."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

import xtf
from xtf.checkpoint.background import StateSaver
from xtf.checkpoint.kept import prune
from xtf.checkpoint.training import load_newest_state
from xtf.files import write_atomically
from xtf.run import generation
from xtf.run.flops import ModelFlops, model_flops, peak_flops
from xtf.run.folder import BEST, CHECKPOINTS, LAST, Launch, check_free, holds_run, make_folder, write_description
from xtf.run.generation import GenerateOptions
from xtf.run.interrupt import Interrupt, Interrupted, deferred_interrupt
from xtf.run.lost import limited
from xtf.run.memory import available_memory, check_fits, count, used_memory
from xtf.run.metrics import MetricsWriter
from xtf.run.plot import plot_run
from xtf.run.progress import Progress
from xtf.run.ranks import agree, say, together
from xtf.run.recipe import Opened, Recipe
from xtf.run.skips import Skips
from xtf.state import State
from xtf.step import TrainStep
from xtf.tree import Tree

_LARGE, _SELDOM = 1024, 25
"""The load of more experts than this, over all layers, is written every so many steps only: it would be most of the file."""


class _Position(NamedTuple):
    """Where a run is.

    Args:
        done: steps made.
        saved: the last step whose whole state is saved; ``None`` for none.
        loss: on what is held out, the last; ``nan`` before there is one.
        best: the lowest so far.
    """

    done: int
    saved: int | None = None
    loss: float = math.nan
    best: float = math.inf


def run(recipe: Recipe, launch: Launch, *, console: Console | None = None) -> Path:
    """Train, evaluate, save and sample, on this rank of the recipe's mesh.

    The first rank speaks, and writes what is not sharded. The whole state is saved every ``schedule.save_every`` steps, while training
    goes on (`xtf.StateSaver`), and when SIGINT or SIGTERM asks for an end; a run that goes on from there has the losses of one that
    was never stopped, bit for bit.

    Args:
        recipe: what to do.
        launch: how it was asked for.
        console: where results are printed; progress goes to standard error.

    Returns:
        The run's folder: ``recipe.py`` and ``run.json`` (what it is), ``metrics.jsonl`` (a row per step), plots, ``checkpoints/``
        (whole states), ``best/`` and ``checkpoint/`` (Hugging Face layout, with the tokenizer), ``sample.txt``.

    Raises:
        ValueError: for a recipe that is not possible, before anything is written.
        RunFailed: if too many steps in a row were skipped, or parameters are not finite.
        Interrupted: if a signal ended it.
    """
    mesh, step, total = recipe.mesh, recipe.step, recipe.schedule.steps
    parameters, active = step.model.param_count()
    together(mesh, lambda: check_fits(math.ceil(parameters / mesh.size), available_memory(), recipe.title))
    begun = launch.out is not None and holds_run(launch.out) and launch.resume
    if not begun and launch.out is not None:
        out = launch.out
        together(mesh, lambda: check_free(out), ranks=lambda rank: rank == 0)
    notice = Console(stderr=True) if mesh.rank == 0 else Console(quiet=True)
    words = f"{count(parameters)} parameters" + (f", {count(active)} active per token" if active < parameters else "")
    say(notice, f"{recipe.title}: {words}" + (f"; {mesh.size} ranks" if mesh.size > 1 else ""))
    if begun and launch.out is not None and (launch.out / LAST).is_dir():
        say(notice, f"the run in {launch.out} is finished: {total} steps are done")
        return launch.out
    opened = recipe.data.open(mesh, notice)
    if opened.max_id >= step.model.vocab:
        raise ValueError(
            f"the data hold the id {opened.max_id}, the model's vocabulary is {step.model.vocab} (0 to {step.model.vocab - 1}): the "
            f"tokenizer {recipe.files.tokenizer} does not belong to this model"
        )
    folder = launch.out if begun and launch.out is not None else make_folder(mesh, launch)
    if not begun:
        together(mesh, lambda: write_description(folder, recipe, launch, opened.about), ranks=lambda rank: rank == 0)
    state, position = _start(recipe, folder, notice, begun)
    progress = Progress(total, done=position.done, rank=mesh.rank)
    writing = MetricsWriter(folder, tensorboard=launch.tensorboard, active=mesh.rank == 0, resume_at=position.done)
    with writing as writer, limited(step, mesh, launch.timeout):
        trained = _Loop(recipe, opened, folder, progress, writer)
        state, position, stopped = trained(state, position)
    entropy = opened.about.get("unigram_entropy")
    together(mesh, lambda: plot_run(folder, entropy=entropy, title=recipe.title), ranks=lambda rank: rank == 0)
    if stopped:
        raise Interrupted(folder, position.done, total, position.saved, stopped)
    xtf.save(step, state, folder / LAST, tokenizer_from=recipe.files.tokenizer)
    if mesh.rank == 0:
        text = _sample(recipe, folder) if mesh.size == 1 and recipe.evaluation.prompt is not None else None
        _summarize(console or Console(), recipe, folder, opened, position, text)
    return folder


def _start(recipe: Recipe, folder: Path, notice: Console, begun: bool) -> tuple[State, _Position]:
    """The state a run begins with, or goes on with."""
    step, start = recipe.step, recipe.files.start
    saved = load_newest_state(step, folder / CHECKPOINTS) if begun else None
    if saved is not None:
        for reason in saved.passed:
            say(notice, reason)
        done = int(saved.state.step)
        say(notice, f"going on after step {done} of {recipe.schedule.steps}, from {saved.path}")
        loss, best = (
            float(saved.extra[name]) if saved.extra.get(name) is not None else default
            for name, default in (("loss", math.nan), ("best", math.inf))
        )
        return saved.state, _Position(done, done, loss, best)
    if begun:
        say(notice, f"{folder} has no saved state: beginning anew")
    state = step.init(recipe.seed) if start is None else xtf.load(step, start, ignore=recipe.files.ignore)
    return state, _Position(0)


class _Loop:
    """Steps until the last, or until a signal."""

    def __init__(self, recipe: Recipe, opened: Opened, folder: Path, progress: Progress, writer: MetricsWriter) -> None:
        self.recipe, self.opened, self.folder, self.progress, self.writer = recipe, opened, folder, progress, writer
        self.step, self.mesh, self.owed = recipe.step, recipe.mesh, False
        axis = self.step.row_axis
        self.rank, self.ranks = (axis.index, axis.size) if axis is not None else (0, 1)
        self.skips = Skips(folder, opened, self.mesh, parts=self.ranks, limit=recipe.stop_after_skips, resume_at=progress.step)
        self.flops: ModelFlops = model_flops(self.step.model)
        self.peak = peak_flops(self.step.device, self.step.precision.compute or torch.float32)
        self.saver = StateSaver(self.step)
        self.saving: tuple[int, Path] | None = None  # the step that is saved meanwhile, and where

    def __call__(self, state: State, position: _Position) -> tuple[State, _Position, int]:
        """Returns the state, the position, and the signal that ended it, 0 for none."""
        schedule, progress = self.recipe.schedule, self.progress
        interrupt: Interrupt | None = None
        try:
            patience = 2.0 if self.mesh.size > 1 else 0.0
            with progress, deferred_interrupt(self._tell, patience=patience) as interrupt, self.saver:
                if position.done == 0:
                    position = self._evaluate(state, position, {})
                while position.done < schedule.steps:
                    # in the first step, which compiles for a while, there is nothing to save yet, and nothing waits
                    with interrupt.held() if position.done or self.mesh.size > 1 else nullcontext():
                        state, position = self._advance(state, position)
                        stopped = agree(self.mesh, interrupt.asked)
                        self.owed |= bool(schedule.save_every) and position.done % schedule.save_every == 0
                        if position.done < schedule.steps and (stopped or (self.owed and not self.skips.in_a_row)):
                            position = self._saved(position)
                            self.skips.check_sound(state.params, position.done, position.saved)
                            position, self.owed = self._save(state, position), False
                        if stopped and position.done < schedule.steps:
                            return state, self._saved(position), stopped
                        if self.skips.in_a_row:
                            position = self._saved(position)
                            self.skips.check(position.done, position.saved)
                with interrupt.held():
                    position = self._saved(position)
                    self.skips.check_sound(state.params, position.done, position.saved)  # what is not is no result
        except KeyboardInterrupt as error:
            number = interrupt.asked if interrupt is not None and interrupt.asked else signal.SIGINT
            saved = self.saving[0] if self.saving is not None and self.saving[1].is_dir() else position.saved
            raise Interrupted(self.folder, progress.step, schedule.steps, saved, number) from error
        return state, position, 0

    def _tell(self) -> None:
        self.progress.message(
            "stopping after this step, then saving; Ctrl-C again stops at once and loses the steps that are not saved yet"
        )

    def _advance(self, state: State, position: _Position) -> tuple[State, _Position]:
        """One step, its row of metrics, and an evaluation if one is due."""
        index, evaluation = position.done, self.recipe.evaluation
        began = time.perf_counter()
        batch = {name: value.to(self.step.device) for name, value in self.opened.batches(index, self.rank, self.ranks).items()}
        state, metrics = self.step(state, batch)
        loss, tokens = float(metrics["cross_entropy"]), int(metrics["tokens"])
        seconds = time.perf_counter() - began
        lengths = self.opened.batches.lengths(index, self.ranks)
        costs = [self.flops.step_flops(part.tolist()) for part in lengths]
        reached = sum(costs) / seconds / self.mesh.size
        self.peak = max(self.peak, reached)  # on a machine that was busy when the run began, too little was measured
        mfu = reached / self.peak
        memory = used_memory(self.step.device)
        self.progress.update(index + 1, loss=loss, tokens=tokens, mfu=mfu, memory=memory)
        if said := self.skips.note(index + 1, metrics, int(state.skipped)):
            self.progress.message(said)
        rows = -(-self.recipe.data.rows // self.ranks) * self.ranks
        extra: dict[str, Tensor | float | int] = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "mfu": mfu,
            "memory_bytes": memory,
            "padding": 1 - sum(int(part.sum()) for part in lengths) / (rows * self.recipe.data.seq),
            "imbalance": max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0,
            "epoch": self.opened.batches.epoch(index + 1),
        }
        extra |= {f"{name}/epoch": done for name, done in self.opened.batches.epochs(index + 1).items()}
        position = position._replace(done=index + 1)
        row = dict(metrics) | extra
        if "expert_load" in row and metrics["expert_load"].numel() > _LARGE and position.done % _SELDOM:
            del row["expert_load"]
        if position.done == self.recipe.schedule.steps or (evaluation.every and position.done % evaluation.every == 0):
            position = self._evaluate(state, position, row)
        else:
            self.writer.write(position.done, row)
        return state, position

    def _evaluate(self, state: State, position: _Position, row: dict[str, Tensor | float | int]) -> _Position:
        """Look at what is held out, write the row, and keep the parameters if they are the best so far."""
        self.progress.pause()
        loss = evaluate(self.step, state.params, self.opened.held_out(self.rank, self.ranks))
        if not math.isnan(loss):
            row["held_out_loss"] = loss
            position = position._replace(loss=loss)
            if loss < position.best:
                position = position._replace(best=loss)
                if position.done:
                    xtf.save(self.step, state, self.folder / BEST, tokenizer_from=self.recipe.files.tokenizer)
            self.progress.held_out(loss)
        if row:
            self.writer.write(position.done, row)
        self.progress.resume()
        return position

    def _save(self, state: State, position: _Position) -> _Position:
        """Begin to save; what was begun before is done."""
        self.progress.pause()
        schedule = self.recipe.schedule
        path = self.folder / CHECKPOINTS / f"step-{position.done:08d}"
        numbers = {name: value if math.isfinite(value) else None for name, value in (("loss", position.loss), ("best", position.best))}
        every = schedule.keep_every

        def tidy() -> None:
            prune(path.parent, keep_last=schedule.keep, keep=lambda step: every > 0 and step % every == 0)

        self.saver.save(state, path, extra=numbers, tokenizer_from=self.recipe.files.tokenizer, then=tidy)
        self.saving = position.done, path
        if schedule.wait_for_saves:
            position = self._saved(position)
        self.progress.resume()
        return position

    def _saved(self, position: _Position) -> _Position:
        """Wait for what is being saved."""
        self.saver.wait()
        saving, self.saving = self.saving, None
        return position if saving is None else position._replace(saved=saving[0])


def evaluate(step: TrainStep, params: Tree, held_out: Iterable[Mapping[str, Tensor]]) -> float:
    """Mean cross-entropy, in nats per unit of loss weight, over batches; auxiliary losses do not count. ``nan`` without any target."""
    total, weights = 0.0, 0.0
    for batch in held_out:
        found = step.evaluate(params, {name: value.to(step.device) for name, value in batch.items()})
        weight = float(found["weight"])
        total, weights = total + float(found["cross_entropy"]) * weight, weights + weight
    return total / weights if weights else math.nan


def _sample(recipe: Recipe, folder: Path) -> str:
    """What the written checkpoint adds to the recipe's prompt, kept in ``sample.txt``."""
    evaluation, prompt, written = recipe.evaluation, recipe.evaluation.prompt or "", StringIO()
    options = GenerateOptions(
        folder / LAST, prompt, chat=evaluation.chat, tokens=evaluation.tokens, temperature=0.8, top_p=0.95, seed=recipe.seed
    )
    generation.run(options, out=written, terminal=False)
    text = written.getvalue().removesuffix("\n")
    with write_atomically(folder / "sample.txt") as file:
        file.write((f"{prompt}\n\n{text}\n" if evaluation.chat else f"{prompt}{text}\n").encode())
    return text


def _summarize(console: Console, recipe: Recipe, folder: Path, opened: Opened, position: _Position, text: str | None) -> None:
    entropy = opened.about.get("unigram_entropy")
    line = Text.assemble("\nheld-out loss ", (f"{position.loss:.3f}", "bold cyan"), " nats per token")
    if entropy is not None:
        worth = (
            f"context is worth {entropy - position.loss:.2f} nats" if position.loss < entropy else "context is not used yet: train longer"
        )
        line.append(f"; unigram entropy is {entropy:.3f}: {worth}")
    elif position.best < position.loss:
        before = "" if (folder / BEST).exists() else ", before the first step: no parameters were better than those it started with"
        line.append(f"; the lowest was {position.best:.3f}{before}")
    console.print(line)
    if text is not None:
        between = "\n" if recipe.evaluation.chat else ""
        console.print(Text.assemble("\n", (recipe.evaluation.prompt or "", "bold"), between, (text, "italic")))
    elif recipe.evaluation.prompt is not None:
        console.print(
            f"\nwhat it writes: xtf generate {folder} {recipe.evaluation.prompt!r}", markup=False, highlight=False, soft_wrap=True
        )
    console.print()
    about = {
        "metrics.jsonl": "a row per step",
        "loss.png": "the losses over the steps; more plots beside it",
        LAST: "Hugging Face layout, with tokenizer",
        BEST: "the same, where the held-out loss was lowest",
        CHECKPOINTS: "whole states, to go on from",
        "sample.txt": "the text above",
        "run.json": "recipe, model, data, versions",
    }
    for name, what in about.items():
        if (folder / name).exists():
            console.print(Text.assemble(f"  {folder / name}", (f"  {what}", "dim")), soft_wrap=True)
