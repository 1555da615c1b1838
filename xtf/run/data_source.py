"""What the commands that look at data files share: which files, read with which tokenizer, for which model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from xtf.data.pipeline import Tokenized, tokenize_files
from xtf.files import default_cache_dir
from xtf.run.standard import filled_in
from xtf.run.training_data import tokenizing


@dataclass(frozen=True)
class DataOptions:
    """How files are read, with the names that ``xtf train`` has for it."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "tiny-moe"
    """A Hugging Face checkpoint folder or a preset, as for training: its tokenizer reads the files, its FLOPs are what a document costs."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder of the tokenizer. By default that of the model."""
    seq: Annotated[int, tyro.conf.arg(metavar="INT")] = 1024
    """Tokens of a row, into which documents are packed."""
    seed: Annotated[int, tyro.conf.arg(metavar="INT")] = 0
    """Of the order."""
    template: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """Chat template: a .jinja file or the name of one that ships with xtf. By default the tokenizer's own."""
    skip_bad_lines: bool = False
    """Skip lines that cannot be read; they are counted."""
    special_tokens_in_text: bool = False
    """Let texts that look like special tokens become these."""
    cache: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder where tokenised files are kept. By default in the user's cache folder."""

    def check(self) -> None:
        """Raise `ValueError` for options that are not possible."""
        if self.seq < 2:
            raise ValueError(f"--seq is {self.seq}, expected at least 2: the first token of a document is never a target")


def tokenizer_of(options: DataOptions, files: Sequence[Path]) -> Path:
    """The folder of the tokenizer that training with these options would take."""
    known = {"model": options.model, "init_from": None, "data": tuple(files), "seq": options.seq, "tokens_per_step": None, "lr": None}
    return filled_in(known | {"tokenizer": options.tokenizer, "prompt": None})["tokenizer"]


def read(options: DataOptions, files: Sequence[Path]) -> Tokenized:
    """The documents of files, from the cache where they are there.

    Raises:
        ValueError: for no file, and files or a tokenizer that cannot be used.
    """
    if not files:
        raise ValueError("there is no FILE to look at: give JSONL, JSON or Parquet files")
    with tokenizing(Console(stderr=True)) as progress:
        return tokenize_files(
            files,
            tokenizer_of(options, files),
            cache_dir=options.cache or default_cache_dir(),
            template=options.template,
            skip_bad_lines=options.skip_bad_lines,
            special_tokens_in_text=options.special_tokens_in_text,
            progress=progress,
        )


def wide_console() -> Console:
    """Where tables are printed: as wide as the terminal, or, where there is none and nobody says, as tables need."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)


_WIDE = 120
