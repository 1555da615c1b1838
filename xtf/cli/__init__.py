"""The command ``xtf``."""

from __future__ import annotations

import dataclasses
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


class _Known(NamedTuple):
    """Where a subcommand stands, imported when it is asked for: ``xtf --help`` needs no torch."""

    about: str
    module: str
    options: str
    run: str = "run"


COMMANDS: dict[str, _Known] = {
    "train": _Known("Train by flags or by a recipe file; go on where a run stopped.", "xtf.cli.train", "TrainOptions", "main"),
    "generate": _Known("Continue a text, or talk to a trained model.", "xtf.run.generation", "GenerateOptions"),
    "eval": _Known("Loss, perplexity and log-probabilities of a file.", "xtf.run.evaluate", "EvalOptions"),
    "export": _Known("Write a checkpoint in Hugging Face layout.", "xtf.run.export", "ExportOptions"),
    "upcycle": _Known("Make a mixture of experts of a dense checkpoint.", "xtf.run.upcycle", "UpcycleOptions"),
    "memory": _Known("What a training step holds on its device, over time, before it runs.", "xtf.cli.memory", "MemoryOptions"),
    "bench": _Known("How fast a training step is here, in several forms and beside other libraries.", "xtf.cli.bench", "BenchOptions"),
    "data": _Known("Look at data: what packing will do; a packed sequence with its loss mask.", "xtf.cli.data", "DataCommand", "main"),
    "plot": _Known("Draw the curves of one run, or of several over each other.", "xtf.run.compare", "PlotOptions"),
}


def load(name: str) -> Command:
    """A subcommand by name."""
    known = COMMANDS[name]
    module = import_module(known.module)
    return Command(getattr(module, known.options), getattr(module, known.run))


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 2: the input is wrong, or memory was not enough; one message on standard error says what and what to do. 3: too many steps in
    a row were skipped, or parameters are not finite. 75: a rank was lost, the same command goes on from what was saved. 128 and the
    signal's number (130, 138, 143): stopped by Ctrl-C, SIGUSR1 or SIGTERM; the message says what was saved where.

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
        errors.print(f"xtf: {error}" if str(error) else "xtf: stopped", markup=False)
        return 128 + getattr(error, "signal", 2)
    except BrokenPipeError:  # whoever read our output has gone, as `xtf train --help | head` does: nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        errors.print(f"xtf: {error}", markup=False)
        return 2
    except (MemoryError, RuntimeError) as error:
        if (code := getattr(error, "exit_code", None)) is not None:  # of a run; of several ranks one says what happened
            if str(error):
                errors.print(f"xtf: {error}", markup=False)
            return code
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()
        said = f": {reason[0]}" if reason else ""
        errors.print(f"xtf: out of memory{said}; try a smaller --tokens-per-step, --seq or --model", markup=False)
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
    if not args or args[0] in ("--help", "-h"):
        Console(stderr=not args, highlight=False).print(_overview(), markup=False, soft_wrap=True)
        return 0 if args else 2
    name, *rest = args
    if name not in COMMANDS:
        near = difflib.get_close_matches(name.lower(), COMMANDS)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(COMMANDS)}."
        raise ValueError(f"no command {name!r}; {hint} See xtf --help")
    command = load(name)
    options = tyro.cli(command.options, prog=f"xtf {name}", args=rest)
    if name == "train":
        options = dataclasses.replace(options, command=("xtf", *args))
    command.run(options)
    return 0


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{known.about}" for name, known in COMMANDS.items()]
    return "\n".join(["usage: xtf COMMAND [OPTIONS]", "", *lines, "", "xtf COMMAND --help says more. xtf --version prints the version."])
