"""The folder of a run: made once, explaining itself, and found again by a run that goes on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from xtf.files import parse_json, write_atomically
from xtf.mesh import Mesh
from xtf.run.ranks import agree, together
from xtf.run.recipe import Recipe, RecipeFn, load_recipe, plain, read_value, resolve, settings_of

RUN, RECIPE, CHECKPOINTS, BEST, LAST = "run.json", "recipe.py", "checkpoints", "best", "checkpoint"
"""What a run's folder holds: what it is, its recipe, the whole states, and the best and the last parameters."""

LAYOUT = ("mesh", "transforms", "backend", "deterministic", "stop_after_skips", "save_every", "keep", "keep_every", "wait_for_saves")
"""Settings of the built-in recipe that say how a run is spread, lowered and watched, not what it computes: they may change when it goes
on."""


@dataclass(frozen=True)
class Launch:
    """How a run was asked for.

    Args:
        recipe: the recipe.
        settings: every setting of it.
        file: the recipe's file; ``None`` for the built-in one.
        out: the folder of the run; ``None`` for ``runs/`` and the time.
        resume: whether a run that stands in ``out`` goes on.
        command: the command line.
        tensorboard: whether TensorBoard files are written.
        timeout: seconds that ranks wait in a step for one that does not come.
    """

    recipe: RecipeFn
    settings: Mapping[str, Any]
    file: Path | None = None
    out: Path | None = None
    resume: bool = False
    command: Sequence[str] = ()
    tensorboard: bool = False
    timeout: float = 600.0

    def source(self) -> str:
        """The text of the recipe's file; of the built-in recipe, a file that calls it with the same settings."""
        if self.file is not None:
            return self.file.read_text(encoding="utf-8")
        return (
            '"""The recipe of this run: `xtf train recipe.py` does the same again."""\n\n'
            "from pathlib import Path\n\nfrom xtf.run import Recipe, standard\n\n\n"
            "def recipe() -> Recipe:\n    return standard(\n"
            + "".join(f"        {name}={_code(value)},\n" for name, value in self.settings.items())
            + "    )\n"
        )


def stored_launch(folder: Path, given: Mapping[str, Any], file: Path | None, **launch: Any) -> Launch:
    """How the run in ``folder`` goes on.

    Args:
        folder: holds a run.
        given: settings that were given again; each must be the run's, but for those of `LAYOUT`.
        file: a recipe's file that was given again; it must be the run's.
        launch: further fields of the `Launch`.

    Raises:
        ValueError: if what is given differs from the run's; it names what.
    """
    about = read_run(folder)
    recipe: RecipeFn
    if about["recipe"] == "built-in":
        from xtf.run.standard import standard as recipe
    else:
        recipe = load_recipe(folder / RECIPE)
    own: Mapping[str, Any] = about["settings"]
    free = LAYOUT if about["recipe"] == "built-in" else ()
    differing = [
        f"{name} is {own.get(name)!r} there and {plain(value)!r} here"
        for name, value in given.items()
        if name not in free and plain(value) != own.get(name)
    ]
    if (file is None) != (about["recipe"] == "built-in") and (file is not None or given):
        differing.append(f"its recipe is {about['recipe']}, the one given is {file or 'built-in'}")
    elif file is not None and file.read_text(encoding="utf-8") != (folder / RECIPE).read_text(encoding="utf-8"):
        differing.append(f"the recipe {file} is not the one that was copied to {folder / RECIPE}")
    if differing:
        raise ValueError(
            f"{folder} holds a run of another recipe: {'; '.join(differing)}. Give another --out, or go on with "
            f"`xtf train --out {folder} --resume` alone"
        )
    known = settings_of(recipe)
    settings = {name: _typed(known[name].annotation, value, name) for name, value in own.items() if name in known}
    settings |= {name: value for name, value in given.items() if name in free}
    kept = folder / RECIPE if about["recipe"] != "built-in" else None
    return Launch(recipe, resolve(recipe, settings), kept, folder, True, **launch)


def holds_run(folder: Path) -> bool:
    """Whether a run stands in this folder."""
    return (folder / RUN).is_file()


def read_run(folder: Path) -> dict[str, Any]:
    """The ``run.json`` of a run's folder.

    Raises:
        ValueError: if it is missing or damaged.
    """
    try:
        found: Any = parse_json((folder / RUN).read_text(encoding="utf-8"))
        about = typing.cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        if isinstance(about.get("recipe"), str) and isinstance(about.get("settings"), dict):
            return about
        raise ValueError("it has no recipe and settings")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not the folder of a run: {RUN} cannot be read ({error})") from None


def check_free(path: Path) -> None:
    """Refuse a folder that is taken.

    Raises:
        ValueError: if something stands there.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"--out {path} is a file: give a folder that is new or empty")
    if holds_run(path):
        raise ValueError(f"--out {path} holds a run: go on with it by --resume, or give another folder")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"--out {path} is not empty: give a folder that is new or empty, so that no earlier run is lost")


def make_folder(mesh: Mesh, launch: Launch) -> Path:
    """The run's folder, made by the first rank, the same path on all.

    Raises:
        ValueError: if it is taken.
        OSError: if it cannot be made.
    """
    if launch.out is not None:
        path = launch.out
    else:
        stamp = agree(mesh, int(datetime.now().strftime("%Y%m%d%H%M%S")) if mesh.rank == 0 else 0)
        name = datetime.strptime(str(stamp), "%Y%m%d%H%M%S").strftime("%Y-%m-%d-%H%M%S")
        taken = next(i for i in range(1, 1000) if not _numbered(name, i).exists())
        path = _numbered(name, agree(mesh, taken if mesh.rank == 0 else 0))

    def make() -> None:
        check_free(path)
        path.mkdir(parents=True, exist_ok=True)

    together(mesh, make, ranks=lambda rank: rank == 0)
    return path


def write_description(folder: Path, recipe: Recipe, launch: Launch, data: Mapping[str, Any]) -> None:
    """``run.json`` and ``recipe.py``: what this run is, and what it ran with."""
    with write_atomically(folder / RECIPE) as file:
        file.write(launch.source().encode())
    model = recipe.step.model
    total, active = model.param_count()
    about = {
        "command": shlex.join(launch.command),
        "working_directory": str(Path.cwd()),
        "recipe": "built-in" if launch.file is None else launch.file.name,
        "settings": {name: plain(value) for name, value in launch.settings.items()},
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": {"family": model.family, "parameters": total, "active_parameters_per_token": active, "config": dict(model.hf_config)},
        "transforms": list(recipe.step.stack),
        "backend": recipe.step.compilation.backend,
        "mesh": recipe.mesh.sizes,
        "tokens_per_step": recipe.data.rows * recipe.data.seq,
        "steps": recipe.schedule.steps,
        "title": recipe.title,
        "data": dict(data),
        "versions": {"python": platform.python_version(), "torch": torch.__version__} | {name: _version(name) for name in _PACKAGES},
        "git": git_state(),
        "machine": {"system": platform.platform(), "threads": torch.get_num_threads(), "device": str(recipe.step.device)},
    }
    with write_atomically(folder / RUN) as file:
        file.write((json.dumps(about, indent=2, default=str) + "\n").encode())


_PACKAGES = ("xtf", "transformers", "tokenizers", "safetensors", "numpy")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_state() -> dict[str, Any] | None:
    """Commit and cleanliness of the git repository of the working directory; ``None`` where there is none, or no git."""
    if shutil.which("git") is None:
        return None

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if commit is None else {"commit": commit, "changed_files": [line[3:] for line in (changed or "").splitlines()]}


def _numbered(name: str, number: int) -> Path:
    return Path("runs") / (name if number == 1 else f"{name}-{number}")


def _code(value: Any) -> str:
    """A setting as Python source."""
    if isinstance(value, os.PathLike):
        return f"Path({str(typing.cast('os.PathLike[str]', value))!r})"
    if isinstance(value, (tuple, list)):
        items = [_code(item) for item in typing.cast("Sequence[Any]", value)]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return repr(value)


def _typed(annotation: Any, value: Any, name: str) -> Any:
    """A setting from what `plain` made of it."""
    if isinstance(value, (str, list)):
        return read_value(annotation, typing.cast("str | list[str]", value), name)
    return value
