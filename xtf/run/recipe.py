"""A recipe: the small record that says what a run is, and how recipes are found and given settings.

A recipe is a function with keyword arguments (its settings) that returns a `Recipe`. ``xtf train`` without a file uses the built-in
one, `xtf.run.standard.standard`; ``xtf train RECIPE.py --set lr=1e-4`` uses the function ``recipe`` of a file.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import io
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import tyro
from docstring_parser import parse
from rich.console import Console
from torch import Tensor

from xtf.mesh import Mesh
from xtf.step import TrainStep


class Batches(Protocol):
    """Batches as a pure function of step and rank, as `xtf.data.PackedBatches` has them."""

    def __call__(self, step: int, rank: int = 0, ranks: int = 1) -> Mapping[str, Tensor]: ...

    def lengths(self, step: int, ranks: int = 1) -> Sequence[npt.NDArray[np.int64]]:
        """The lengths of the documents that each rank has in a step."""
        ...

    def epoch(self, step: int) -> float:
        """How many epochs are done before a step."""
        ...

    def epochs(self, step: int) -> Mapping[str, float]:
        """The same of each source, by name, where sources are drawn from with weights; else nothing."""
        ...


class Opened(NamedTuple):
    """Data that are ready to be read.

    Args:
        batches: what is trained on.
        held_out: ``held_out(rank, ranks)`` gives one rank's batches of what is never trained on, as many on each rank.
        max_id: the largest id.
        about: what ``config.json`` of the run says of them.
        documents: ``documents(step, rank, ranks)`` names the documents that one rank has in a step: for each file the numbers of its
            documents, from 0, as ``xtf data preview FILE --document N`` takes them. ``None`` where there are none to name.
    """

    batches: Batches
    held_out: Callable[[int, int], Iterable[Mapping[str, Tensor]]]
    max_id: int
    about: Mapping[str, Any]
    documents: Callable[[int, int, int], Mapping[str, Sequence[int]]] | None = None


class Data(Protocol):
    """Where batches come from; nothing is read before `open`."""

    @property
    def rows(self) -> int:
        """Of a global batch."""
        ...

    @property
    def seq(self) -> int:
        """Tokens of a row."""
        ...

    def open(self, mesh: Mesh, console: Console) -> Opened:
        """Read, tokenise, pack. Every rank calls it; the console is quiet on all but the first."""
        ...

    def describe(self) -> Mapping[str, str]:
        """What ``xtf train --print`` says, by name."""
        ...


@dataclass(frozen=True)
class Schedule:
    """How long, and what is saved on the way.

    Args:
        steps: updates to make.
        save_every: steps between two savings of the whole state; 0 saves only when the run is stopped.
        keep: how many of these are kept, the newest.
        keep_every: those of steps that are multiples of this are kept for good; a multiple of ``save_every``, or 0 for none.
        wait_for_saves: whether training waits while a state is written, instead of copying it first: a save then takes no memory.
    """

    steps: int
    save_every: int = 100
    keep: int = 2
    keep_every: int = 0
    wait_for_saves: bool = False

    def __post_init__(self) -> None:
        _check_least(self, steps=1, save_every=0, keep=1, keep_every=0)
        if self.keep_every and (not self.save_every or self.keep_every % self.save_every):
            raise ValueError(
                f"keep_every is {self.keep_every}, expected a multiple of save_every ({self.save_every}): only what is saved can be kept"
            )


@dataclass(frozen=True)
class Evaluation:
    """What is looked at on the way, and in the end.

    Args:
        every: steps between two evaluations on what is held out; 0 evaluates before the first and after the last step only.
        prompt: a text the trained model continues in the end; ``None`` for no sample.
        chat: whether the prompt is a user's message.
        tokens: of the sample.
    """

    every: int = 50
    prompt: str | None = None
    chat: bool = False
    tokens: int = 80

    def __post_init__(self) -> None:
        _check_least(self, every=0, tokens=0)


@dataclass(frozen=True)
class Files:
    """Files beside the data.

    Args:
        tokenizer: the folder whose tokenizer is used, and travels with every checkpoint.
        start: the checkpoint training starts from (Hugging Face layout); ``None`` starts from initial values.
        ignore: regular expressions; tensors of the checkpoint whose whole name matches one are not used.
    """

    tokenizer: Path
    start: Path | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """What a run is.

    Args:
        mesh: the ranks.
        step: the finished step: transforms applied, compiled.
        data: what is trained on.
        schedule: how long, and what is saved.
        evaluation: what is looked at.
        files: tokenizer and start.
        seed: of initial values and samples; the data have their own.
        title: what plots are called.
        stop_after_skips: skipped steps in a row that end the run; 0 for never.
    """

    mesh: Mesh
    step: TrainStep
    data: Data
    schedule: Schedule
    evaluation: Evaluation
    files: Files
    seed: int = 0
    title: str = "xtf"
    stop_after_skips: int = 10

    def __post_init__(self) -> None:
        _check_least(self, stop_after_skips=0)
        axes = {name for axis in self.step.token_axes for name in axis.names}
        alone = [name for name, size in self.mesh.sizes.items() if size > 1 and name not in axes]
        if alone:
            raise ValueError(
                f"{self.mesh.size} ranks, but no transform spreads the batch over the axis {', '.join(alone)}: every rank would do the "
                "same work. Add shard to the transforms, or start one process"
            )


class Setting(NamedTuple):
    """A keyword argument of a recipe."""

    annotation: Any
    default: Any
    help: str


RecipeFn = Callable[..., Recipe]


def load_recipe(path: Path) -> RecipeFn:
    """The function ``recipe`` of a Python file.

    Raises:
        ValueError: if there is no such file, it fails, or it has no such function.
    """
    if not path.is_file():
        raise ValueError(f"there is no recipe {path}: give a Python file with a function `recipe`, or flags alone (xtf train --help)")
    spec = importlib.util.spec_from_file_location(f"xtf_recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file: a recipe ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"the recipe {path} fails when it is read: {type(error).__name__}: {error}") from error
    found = getattr(module, "recipe", None)
    if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
        raise ValueError(f"the recipe {path} has an `async def recipe`: define an ordinary function, recipe(...) -> xtf.run.Recipe")
    if not callable(found):
        raise ValueError(f"the recipe {path} has no function `recipe`: define recipe(...) -> xtf.run.Recipe")
    return typing.cast(RecipeFn, found)


def settings_of(recipe: RecipeFn) -> dict[str, Setting]:
    """The keyword arguments of a recipe; their help is what the ``Args`` of its docstring say.

    Raises:
        ValueError: for an argument without a default: every setting needs one; for annotations that cannot be read.
    """
    try:
        hints, signature = typing.get_type_hints(recipe), inspect.signature(recipe)
    except Exception as error:  # an annotation may be any expression
        raise ValueError(f"the arguments of the recipe cannot be read: {type(error).__name__}: {error}") from error
    said = {p.arg_name: p.description or "" for p in parse(inspect.getdoc(recipe) or "").params}
    found: dict[str, Setting] = {}
    for name, parameter in signature.parameters.items():
        if parameter.default is parameter.empty:
            raise ValueError(f"the recipe's argument {name!r} has no default: every setting needs one")
        found[name] = Setting(hints.get(name, type(parameter.default)), parameter.default, " ".join(said.get(name, "").split()))
    return found


def resolve(recipe: RecipeFn, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a recipe: those given, and the defaults of the others.

    Raises:
        ValueError: for an unknown name; it shows the nearest.

    Example:
        >>> def recipe(*, lr: float = 1e-3, steps: int = 10): ...
        >>> resolve(recipe, {"steps": 5})
        {'lr': 0.001, 'steps': 5}
    """
    known = settings_of(recipe)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"the recipe has no setting {name!r}; {hint}")
    return {name: given.get(name, setting.default) for name, setting in known.items()}


def parse_settings(recipe: RecipeFn, pairs: Iterable[str]) -> dict[str, Any]:
    """Settings from texts ``key=value``, each value read as its annotation says; the items of a tuple are separated by commas.

    Raises:
        ValueError: for what is no pair, an unknown key (it shows the nearest), a repeated one, or a value of another type.

    Example:
        >>> def recipe(*, lr: float = 1e-3, data: tuple[str, ...] = ()): ...
        >>> parse_settings(recipe, ["lr=2e-4", "data=a,b"])
        {'lr': 0.0002, 'data': ('a', 'b')}
    """
    known, found = settings_of(recipe), dict[str, Any]()
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ValueError(f"--set {pair}: expected key=value, as --set lr=1e-4")
        if name in found:
            raise ValueError(f"--set {name} is given twice: give it once")
        resolve(recipe, {name: None})
        found[name] = read_value(known[name].annotation, text, f"--set {name}")
    return found


def read_value(annotation: Any, text: str | Sequence[str], name: str) -> Any:
    """A value of a type from its text; of a tuple, from its items or a text in which commas separate them.

    Raises:
        ValueError: if the text is no such value.
    """
    several = typing.get_origin(annotation) in (tuple, list)
    parts: Sequence[Any] = [text] if not several else [part for part in text.split(",") if part] if isinstance(text, str) else text
    items = [str(part) for part in parts]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # what is wrong is said below, in one line
            return tyro.cli(tyro.conf.Positional[annotation], args=items, console_outputs=False)
    except SystemExit:
        raise ValueError(f"{name}={text}: expected a value of the type {_type_name(annotation)}") from None


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def plain(value: Any) -> Any:
    """A setting as JSON has it.

    Example:
        >>> plain((Path("a"), 1))
        ['a', 1]
    """
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in typing.cast("Sequence[Any]", value)]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _check_least(record: Any, **least: int) -> None:
    for name, bound in least.items():
        if getattr(record, name) < bound:
            raise ValueError(f"{name} is {getattr(record, name)}, expected at least {bound}")
