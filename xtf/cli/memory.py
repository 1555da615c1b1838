"""``xtf memory``: what a training step holds on its device, counted before anything runs, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xtf.backends import backend_of
from xtf.cli.train import built, given_settings, with_settings
from xtf.files import write_atomically
from xtf.memory import HOST, KINDS, Timeline, measure, rehearse
from xtf.run.fit import micro_batches_of, rows_of_rank
from xtf.run.folder import Launch
from xtf.run.memory_picture import SHADES, draw_memory, unit_of
from xtf.run.recipe import Recipe, RecipeFn, resolve
from xtf.run.standard import PLAN, filled_in, standard
from xtf.testing import random_batch


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """What is asked of the memory of a step, whatever its recipe."""

    recipe: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[RECIPE.py]", help_behavior_hint="")] = None
    """A Python file with a function `recipe`; without it, the flags below make the recipe."""
    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """A setting of the recipe file: an argument of its function. May be given several times."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png", help_behavior_hint="(default: memory.png)")] = Path("memory.png")
    """The picture."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Also write every moment as JSON; - writes it to standard output, and nothing else."""
    count: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Count also where a GPU could run the step and be measured."""


MemoryOptions = with_settings(
    "MemoryOptions",
    ReportOptions,
    "What one training step holds on its device: a table of its peak, and a picture of its memory over time. Nothing is loaded or "
    "allocated; --mesh may name any number of ranks, which need not be there.",
    "  xtf memory --model DIR --seq 4096 --tokens-per-step 65536",
    "  xtf memory --mesh data=8,expert=8 --transforms shard,expert_parallel,chunk_loss --tokens-per-step 524288",
)


def run(options: Any, *, console: Console | None = None) -> Path:
    """Count, print and draw.

    Args:
        options: what is asked.
        console: where the table is printed.

    Returns:
        The path of the picture.

    Raises:
        ValueError: for settings that are not possible; before anything is written.
    """
    if options.out.suffix.lower() != ".png":
        raise ValueError(f"--out {options.out}: expected a file name that ends in .png")
    recipe = _recipe(options)
    for note in _notes(recipe):
        Console(stderr=True).print(note, markup=False, highlight=False, soft_wrap=True)
    line = timeline_of(recipe, count=options.count)
    if options.json is not None and str(options.json) == "-":
        sys.stdout.write(json.dumps(line.json()) + "\n")
    else:
        if options.json is not None:
            with write_atomically(options.json) as file:
                file.write((json.dumps(line.json(), indent=1) + "\n").encode())
        show(line, recipe, console or Console())
    path = draw_memory(line, options.out, title=_title(line, recipe))
    if str(options.json) != "-":
        (console or Console()).print(str(path), markup=False, highlight=False, soft_wrap=True)
    return path


def _recipe(options: Any) -> Recipe:
    recipe, given = given_settings(options)
    settings = resolve(recipe, given)
    if recipe is standard:
        settings = filled_in(settings)
        mesh: str = settings["mesh"]
        alone = all(part.partition("=")[2].strip() in ("1", "-1") for part in mesh.split(","))
        if not alone and not mesh.startswith(PLAN):
            return _planned(recipe, settings, mesh)
    return built(Launch(recipe, settings, options.recipe))


def _planned(recipe: RecipeFn, settings: dict[str, Any], mesh: str) -> Recipe:
    """On ranks that are not there; messages name what was given for them."""
    taken = {part.partition("=")[0].strip() for part in mesh.split(",")} & {"rank", "routing"}
    if taken:
        raise ValueError(f"--mesh {mesh}: an axis of ranks that are not there cannot have the name {taken.pop()}: take another")
    try:
        return built(Launch(recipe, {**settings, "mesh": PLAN + mesh}))
    except ValueError as error:
        raise ValueError(str(error).replace(f"--mesh {PLAN}", "--mesh ").replace("plan_mesh: ", f"--mesh {mesh}: ")) from None


def _notes(recipe: Recipe) -> list[str]:
    """What is to be known before the table: rows of padding that ranks count, and that many ranks take a while."""
    found: list[str] = []
    axis, rows, each, seq = recipe.step.row_axis, recipe.data.rows, rows_of_rank(recipe), recipe.data.seq
    ranks = 1 if axis is None else axis.size
    if each * ranks > rows:
        found.append(
            f"a step has {rows} rows of {seq} for {ranks} ranks: as in xtf train, each takes {each}, filled up with padding "
            f"({each * ranks * seq:,} tokens together, of which {rows * seq:,} are of the step); {each * ranks} rows fill them"
        )
    if recipe.mesh.size > _MANY_RANKS:
        found.append(f"counting one of {recipe.mesh.size:,} ranks: the parts of every one are gone through, which takes a while")
    return found


_MANY_RANKS = 1024


def timeline_of(recipe: Recipe, *, count: bool = False) -> Timeline:
    """The timeline of a recipe's step: counted; where a GPU runs it on one rank, measured in its second step, unless ``count``.

    The measuring was never run on hardware.
    """
    tokens, micro_batches = micro_batches_of(recipe)
    step = recipe.step
    if count or backend_of(step.device).memory is None or recipe.mesh.size > 1:
        return rehearse(step, tokens, micro_batches=micro_batches)
    rows = rows_of_rank(recipe)
    batch = {k: v.to(step.device) for k, v in random_batch(step.model.vocab, rows=rows, seq=recipe.data.seq).items() if k != "loss_weights"}
    _, state = measure(step, step.init(recipe.seed), batch)  # the first step compiles
    return measure(step, state, batch)[0]


def show(line: Timeline, recipe: Recipe, console: Console) -> None:
    """Print the table: of each kind, bytes at the peak and the most at any time."""
    divisor, unit = unit_of(line.peak.peak)
    console.print(Text(_title(line, recipe), style="bold"), highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("")
    for name in (f"at the peak, {unit}", "", f"most, {unit}"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        size = line.peak.most[kind]
        share = "" if not line.most[kind] else f"{100 * size / line.peak.peak:.0f} %"
        table.add_row(Text.assemble(("■ ", SHADES[kind]), kind), f"{size / divisor:,.2f}", share, f"{line.most[kind] / divisor:,.2f}")
    table.add_row(Text("  together", style="bold"), f"{line.peak.peak / divisor:,.2f}", "", "", end_section=True)
    if line.most[HOST]:
        table.add_row("  in host memory", f"{line.peak.host / divisor:,.2f}", "", f"{line.most[HOST] / divisor:,.2f}")
    console.print(table, highlight=False)
    console.print(f"\nthe peak is in {line.peak}: {line.peak.peak:,} bytes, {'measured' if line.measured else 'counted'}", highlight=False)


def _title(line: Timeline, recipe: Recipe) -> str:
    times = f"{line.micro_batches} × " if line.micro_batches > 1 else ""
    ranks = f", one of {recipe.mesh.size} ranks" if recipe.mesh.size > 1 else ""
    return f"{recipe.title.partition(' on ')[0]}: {times}{line.tokens:,} tokens{ranks}"
