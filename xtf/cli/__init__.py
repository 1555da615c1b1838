"""The command ``xtf``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import tyro
from rich.console import Console


class Command(NamedTuple):
    """A subcommand: its options as a dataclass, and the function that takes them."""

    options: type[Any]
    run: Callable[[Any], object]


def commands() -> dict[str, Command]:
    """Every subcommand by name."""
    from xtf.run.train import TrainOptions, run  # here, so that `xtf --version` does not wait for it

    return {"train": Command(TrainOptions, run)}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 2: the input is wrong; one message on standard error says what and what to do. 130: stopped by Ctrl-C; the message
    says what was saved where.

    Args:
        args: without the program's name; by default those of the process.
    """
    given = list(sys.argv[1:] if args is None else args)
    if given in (["--version"], ["-V"]):
        print(f"xtf {import_module('xtf').__version__}")
        return 0
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        return _dispatch(given)
    except KeyboardInterrupt as error:
        errors.print(_interrupted(error), markup=False)
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as `xtf train --help | head` does: nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        errors.print(f"xtf: {error}", markup=False)
        return 2


def _dispatch(args: list[str]) -> int:
    known = commands()
    options = tyro.extras.subcommand_cli_from_dict({name: command.options for name, command in known.items()}, prog="xtf", args=args)
    next(command.run for command in known.values() if command.options is type(options))(options)
    return 0


def _interrupted(error: KeyboardInterrupt) -> str:
    from xtf.run.interrupt import Interrupted

    if not isinstance(error, Interrupted):
        return "xtf: stopped"
    saved = sorted(path.name + ("/" if path.is_dir() else "") for path in error.folder.iterdir())
    return f"xtf: {error}; saved in {error.folder}: {', '.join(saved)}"
