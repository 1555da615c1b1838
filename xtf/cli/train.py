"""``xtf train``: a recipe by flags or by a file, shown, run, or gone on with."""

from __future__ import annotations

import dataclasses
import traceback
import typing
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xtf.allocator import keep_freed_memory
from xtf.run.fit import fitted, micro_batches_of, rows_of_rank
from xtf.run.folder import Launch, holds_run, stored_launch
from xtf.run.lost import watched
from xtf.run.memory import estimate
from xtf.run.recipe import Recipe, RecipeFn, load_recipe, parse_settings, plain, resolve, settings_of
from xtf.run.standard import filled_in, standard
from xtf.run.train import run


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What is asked of a run, whatever its recipe."""

    recipe: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[RECIPE.py]", help_behavior_hint="")] = None
    """A Python file with a function `recipe`; without it, the flags below make the recipe."""
    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """A setting of the recipe file: an argument of its function. May be given several times."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="RUN_DIR", help_behavior_hint="")] = None
    """Folder of the run, new or empty. By default runs/ and the time."""
    resume: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Go on with the run in --out from its last saved state; begin it where there is none."""
    print: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Show the recipe, the transforms, sizes and memory, and do nothing."""
    tensorboard: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Also write TensorBoard files."""
    fit: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Cut each rank's rows into the fewest micro-batches that fit the device's memory; the run's folder keeps their number."""
    budget: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None
    """With --fit, what a step may take, as 20GB (by default nine tenths of what the device has free)."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 600.0
    """Of several ranks, how long they wait in a step for one that does not come."""
    command: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """The command line, which the run's folder keeps."""


_METAVARS = {str: "TEXT", int: "INT", float: "FLOAT", Path: "PATH"}


def with_settings(made_name: str, base: type[Any], *paragraphs: str) -> type[Any]:
    """Options of a command: those of ``base``, and a flag for each setting of the built-in recipe, ``None`` where it is not given.

    Args:
        made_name: of the class.
        base: a frozen dataclass.
        paragraphs: of its help.
    """
    fields: list[tuple[str, Any, Any]] = []
    for name, setting in settings_of(standard).items():
        default = setting.default
        open_or_off = default is None or default is False or default == ()
        said = setting.help if open_or_off else f"{setting.help.rstrip('.')} (default: {default})."
        kinds = [kind for kind in (setting.annotation, *typing.get_args(setting.annotation)) if kind in _METAVARS]
        choices = [str(value) for value in typing.get_args(setting.annotation) if isinstance(value, str)]
        several = typing.get_origin(setting.annotation) is tuple
        item = typing.get_args(setting.annotation)[0] if several else None
        named = "|".join(typing.get_args(item)) if typing.get_args(item) else "FILE" if item is Path else "NUMBER"
        one = "{" + ",".join(choices) + "}" if choices else _METAVARS[kinds[0]] if kinds else None
        shown = f"{named} [{named} ...]" if several else one
        flag = setting.annotation is bool
        about = tyro.conf.arg(help=said, help_behavior_hint="", metavar=None if flag else shown)
        annotation = Annotated[bool if flag else setting.annotation | None, about]
        fields.append((name, annotation, dataclasses.field(default=False if flag else None)))
    made = dataclasses.make_dataclass(made_name, fields, bases=(base,), frozen=True)
    made.__doc__ = "\n\n".join(paragraphs)
    return tyro.conf.configure(tyro.conf.FlagCreatePairsOff)(made)


TrainOptions = with_settings(
    "TrainOptions",
    RunOptions,
    "Train by a recipe file, or by flags alone; without any, a small mixture-of-experts model on the text that ships with xtf.",
    "  xtf train --model DIR --data chat.jsonl --steps 200 --lr 1e-4 --out RUN",
    "  xtf train --out RUN --resume",
    "  xtf train RECIPE.py --set lr=1e-4 --print",
    "  torchrun --nproc-per-node 8 -m xtf.cli train --model DIR --data chat.jsonl",
)


def main(options: Any) -> None:
    """Do what the options of ``xtf train`` say."""
    keep_freed_memory()
    launch = _launch(options)
    recipe = built(launch)
    if options.fit and not (options.resume and holds_run(options.out)):  # a run that goes on keeps its micro-batches
        launch = fitted(launch, recipe, options.budget)
        recipe = built(launch)
        tokens, number = micro_batches_of(recipe)
        if recipe.mesh.rank == 0:
            most = "" if number * tokens == rows_of_rank(recipe) * recipe.data.seq else "at most "
            said = f"fit: {number} × {most}{tokens:,} tokens for each update, on each rank"
            Console(stderr=True, highlight=False).print(said, soft_wrap=True)
    if options.print:
        if recipe.mesh.rank == 0:
            show(recipe, launch, Console())
    else:
        with watched(recipe.mesh):
            run(recipe, launch)


def built(launch: Launch) -> Recipe:
    """The recipe of a launch.

    Raises:
        ValueError: if it fails, or is none.
    """
    try:
        recipe = launch.recipe(**launch.settings)
        if not isinstance(recipe, Recipe):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"the recipe {launch.file} returned a {type(recipe).__name__}, expected a xtf.run.Recipe")
        return recipe
    except (ValueError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if launch.file is None:
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(launch.file)]
        where = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"the recipe {launch.file}{where} fails: {type(error).__name__}: {error}") from error


def given_settings(options: Any) -> tuple[RecipeFn, dict[str, Any]]:
    """The recipe that is asked for, and what is given of its settings.

    Raises:
        ValueError: for ``--set`` without a file, or a flag with one.
    """
    flags = {name: value for name in settings_of(standard) if (value := getattr(options, name)) is not None and value is not False}
    if options.recipe is None and options.set:
        raise ValueError(
            f"--set {options.set[0]} is for a recipe file; of the built-in recipe give the flag --{options.set[0].split('=')[0]}"
        )
    if options.recipe is not None and flags:
        raise ValueError(f"--{next(iter(flags)).replace('_', '-')} is of the built-in recipe; with a recipe file use --set key=value")
    recipe = standard if options.recipe is None else load_recipe(options.recipe)
    return recipe, flags if options.recipe is None else parse_settings(recipe, options.set)


def _launch(options: Any) -> Launch:
    recipe, given = given_settings(options)
    if options.budget is not None and not options.fit:
        raise ValueError(f"--budget {options.budget} is for --fit: give both")
    if options.fit and options.recipe is not None:
        raise ValueError("--fit is of the built-in recipe; in a recipe file use accumulate and xtf.fit_tokens")
    if options.resume and options.out is None:
        raise ValueError("--resume needs --out: the folder of the run that goes on")
    if not 0 < options.timeout < 1e6:
        raise ValueError(f"--timeout is {options.timeout:g}, expected seconds above 0, as 600")
    common: dict[str, Any] = {"command": options.command, "tensorboard": options.tensorboard, "timeout": options.timeout}
    if options.resume and holds_run(options.out):
        return stored_launch(options.out, given, options.recipe, **common)
    settings = resolve(recipe, given)
    settings = filled_in(settings) if options.recipe is None else settings
    return Launch(recipe, settings, options.recipe, options.out, options.resume, **common)


def show(recipe: Recipe, launch: Launch, console: Console) -> None:
    """Print what a run would be: settings, transforms, sizes and memory. Nothing is loaded."""
    console.print(f"recipe {launch.file or 'built-in'}", style="bold", highlight=False)
    grid = Table.grid(padding=(0, 2))
    for name, value in launch.settings.items():
        grid.add_row(f"  {name}", _words(plain(value)))
    console.print(grid, highlight=False, markup=False)
    console.print(f"\n{recipe.step}", highlight=False, markup=False)
    facts = Table.grid(padding=(0, 2))
    rows, seq, schedule = recipe.data.rows, recipe.data.seq, recipe.schedule
    for name, value in recipe.data.describe().items():
        facts.add_row(f"  {name}", value)
    facts.add_row("  start", str(recipe.files.start or f"initial values of seed {recipe.seed}"))
    facts.add_row("  tokens per step", f"{rows * seq:,} ({rows} rows of {seq})")
    facts.add_row("  steps", f"{schedule.steps:,}: {schedule.steps * rows * seq:,} tokens")
    console.print("\ndata and schedule", style="bold")
    console.print(facts, highlight=False, markup=False)
    tokens, micro_batches = micro_batches_of(recipe)
    console.print("\nmemory of this rank, estimated; not all of it is there at once", style="bold")
    if tokens > _MANY_TOKENS:
        console.print(f"  not estimated for a micro-batch of {tokens:,} tokens: make it smaller", highlight=False)
        return
    table = Table.grid(padding=(0, 2))
    for name, size in estimate(recipe.step, tokens, micro_batches=micro_batches).items():
        table.add_row(f"  {name}", Text(f"{size / 1e6:,.1f} MB", justify="right"))
    console.print(table, highlight=False, markup=False)


_MANY_TOKENS = 1 << 22
"""The estimate makes a batch's positions and tables."""


def _words(value: Any) -> str:
    """A setting in one line."""
    if isinstance(value, list):
        return ", ".join(map(_words, typing.cast("list[Any]", value)))
    return "" if value is None else str(value)
