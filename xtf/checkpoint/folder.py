"""What reading and writing share: the files of a Hugging Face checkpoint folder, and what a model says about its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Protocol, cast

from xtf import tree
from xtf.checkpoint_map import Source, shapes
from xtf.files import parse_json
from xtf.spec import ParamSpec
from xtf.tree import Path, Tree

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""Files that travel with a tokenizer (how to generate with it included)."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, does not fit the model, or must not be overwritten.

    Args:
        message: what is wrong, all of it, and what to do.
        missing: names of tensors that the model needs and the checkpoint lacks.
        extra: names of tensors that the checkpoint has and the model does not know.
        misshapen: names of tensors whose shape or kind of dtype is not the model's.
    """

    def __init__(self, message: str, *, missing: Sequence[str] = (), extra: Sequence[str] = (), misshapen: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing, self.extra, self.misshapen = tuple(missing), tuple(extra), tuple(misshapen)


class Unfit(CheckpointError):
    """A checkpoint that is sound, but of another model, optimizer or dtype."""


class Described(Protocol):
    """What reading and writing need of a model; every `xtf.model.Model` has it."""

    @property
    def specs(self) -> Tree:
        """A tree of `ParamSpec`."""
        ...

    @property
    def sources(self) -> Mapping[Path, Source]:
        """Where each leaf is found in a checkpoint."""
        ...

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """The fields of the ``config.json``."""
        ...


@dataclass(frozen=True)
class Resolved:
    """A model as a checkpoint has it, or as a step stores it: see `Described`."""

    specs: Tree
    sources: Mapping[Path, Source]
    hf_config: Mapping[str, Any]


def leaf_specs(model: Described) -> dict[Path, ParamSpec]:
    """The model's leaves in order.

    Raises:
        ValueError: if leaves and sources do not match one to one; it names those that do not.
    """
    specs: dict[Path, ParamSpec] = tree.items(model.specs)
    without, unknown = sorted(set(specs) - set(model.sources)), sorted(set(model.sources) - set(specs))
    if without or unknown:
        raise ValueError(f"model.sources must name each leaf of model.specs: leaves without a source {without}, unknown paths {unknown}")
    return specs


def tensor_shapes(model: Described) -> dict[Path, dict[str, tuple[int, ...]]]:
    """The named tensors of each leaf, with their shapes.

    Raises:
        ValueError: if a source cannot give its leaf's shape, or two leaves use the same tensor.
    """
    found, user = dict[Path, dict[str, tuple[int, ...]]](), dict[str, Path]()
    for path, spec in leaf_specs(model).items():
        try:
            found[path] = shapes(model.sources[path], spec.shape)
        except ValueError as error:
            raise ValueError(f"source of the leaf {path!r}: {error}") from None
        for name in found[path]:
            if name in user:
                raise ValueError(f"the leaves {user[name]!r} and {path!r} both use the tensor {name!r}: each belongs to one leaf")
            user[name] = path
    return found


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``config.json`` of a checkpoint folder.

    Raises:
        CheckpointError: if the folder or the file is missing, or the file is not a JSON object.
    """
    return read_json(existing_folder(path) / CONFIG, "is not a Hugging Face checkpoint folder without it")


def existing_folder(path: str | os.PathLike[str]) -> FilePath:
    """``path``, known to be a folder."""
    folder = FilePath(path)
    if not folder.exists():
        raise CheckpointError(f"no checkpoint folder at {folder}: xtf reads local folders; download the checkpoint first and give its path")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, expected a checkpoint folder ({CONFIG} and *.safetensors)")
    return folder


def read_json(file: FilePath, why: str) -> dict[str, Any]:
    """The JSON object in a file, or a `CheckpointError` that names the file."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: {file.parent} {why}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}): copy it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(found).__name__}")
    return cast("dict[str, Any]", found)
