"""The command ``xtf``."""

from __future__ import annotations

import difflib
import logging
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
    from xtf.run.train import TrainOptions, run

    return {"train": Command(TrainOptions, run)}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 2: the input is wrong, or memory was not enough; one message on standard error says what and what to do. 130: stopped
    by Ctrl-C; the message says what was saved where.

    Args:
        args: without the program's name; by default those of the process.
    """
    given = list(sys.argv[1:] if args is None else args)
    if given in (["--version"], ["-V"]):
        print(f"xtf {import_module('xtf').__version__}")
        return 0
    # torch looks for a CUDA compiler when it generates code, and warns in the midst of the progress line where it finds half of one
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
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
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()
        said = f": {reason[0]}" if reason else ""
        errors.print(f"xtf: out of memory{said}; try a smaller --batch, --seq or --preset", markup=False)
        return 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch says so only in the words of a `RuntimeError`.

    Example:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
        True
    """
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(part in str(error) for part in words)


def _dispatch(args: list[str]) -> int:
    known = commands()
    if args and not args[0].startswith("-") and args[0] not in known:
        near = difflib.get_close_matches(args[0].lower(), known)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}."
        raise ValueError(f"no command {args[0]!r}; {hint} See xtf --help")
    if args[:1] and args[0] in known:  # a parser of its own, so that its errors point to the command's own help
        options = tyro.cli(known[args[0]].options, prog=f"xtf {args[0]}", args=args[1:])
    else:
        options = tyro.extras.subcommand_cli_from_dict({name: command.options for name, command in known.items()}, prog="xtf", args=args)
    next(command.run for command in known.values() if command.options is type(options))(options)
    return 0


def _interrupted(error: KeyboardInterrupt) -> str:
    from xtf.run.interrupt import Interrupted

    if not isinstance(error, Interrupted):
        return "xtf: stopped"
    if error.folder is None:
        return f"xtf: {error}"
    saved = sorted(path.name + ("/" if path.is_dir() else "") for path in error.folder.iterdir())
    lost = "" if not error.step or "checkpoint/" in saved else "; the trained parameters were not saved"
    return f"xtf: {error}; saved in {error.folder}: {', '.join(saved)}{lost}"
