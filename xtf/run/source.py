"""Where a checkpoint is found: a Hugging Face folder, a training checkpoint, or the folder of a run, which holds several."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rich.console import Console

from xtf.checkpoint.folder import CONFIG, TOKENIZER, CheckpointError, existing_folder
from xtf.files import parse_json

if TYPE_CHECKING:
    import torch

    from xtf.model import Model
    from xtf.tree import Tree

BEST, LAST, STEPS = "best", "checkpoint", "checkpoints"
"""The folders of a run: the best checkpoint, the one written at the end, and those of steps."""

_STEP = re.compile(r"step-(\d+)")

Prefer = Literal["best", "last"]
DtypeName = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Loaded:
    """A model and its parameters.

    Args:
        folder: the checkpoint they came from.
        model: the model.
        params: whole parameters.
    """

    folder: Path
    model: Model
    params: Tree


def find(path: str | Path, prefer: Prefer = "best") -> Path:
    """The checkpoint folder that ``path`` means.

    A folder whose ``config.json`` describes a model is a checkpoint itself. Of a run's folder it is, in this order,

    * ``best/`` (held-out loss was lowest), ``checkpoint/`` (written at the end), the last of ``checkpoints/step-*`` for ``"best"``;
    * ``checkpoint/``, the last of ``checkpoints/step-*``, for ``"last"``.

    Args:
        path: a Hugging Face folder, a training checkpoint, or a run's folder.
        prefer: which checkpoint of a run.

    Raises:
        CheckpointError: if there is no such folder, or no checkpoint in it.
    """
    if prefer not in ("best", "last"):
        raise ValueError(f"prefer is {prefer!r}, expected 'best' or 'last'")
    if not Path(path).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise CheckpointError(
            f"no folder at {path}; if it is the name of a model on the Hugging Face hub: xtf downloads nothing. "
            f"Download it (`hf download {path} --local-dir DIR`) and give the folder"
        )
    folder = existing_folder(path)
    if is_checkpoint(folder):
        return folder
    best = [folder / BEST] if prefer == "best" else []
    for candidate in (*best, folder / LAST, *_steps(folder / STEPS), *_steps(folder)):
        if is_checkpoint(candidate):
            return candidate
    raise CheckpointError(
        f"no checkpoint in {folder}: it has neither a {CONFIG} that describes a model, nor a checkpoint in {BEST}/, {LAST}/ or "
        f"{STEPS}/step-*; give a Hugging Face folder, or the folder of a run that has saved one"
    )


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder's ``config.json`` describes a model; a run's own does not."""
    try:
        config: object = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return False
    except ValueError:
        return any(folder.glob("*.safetensors"))  # a broken one: reading it says so
    return isinstance(config, dict) and "model_type" in config


def _steps(folder: Path) -> list[Path]:
    """The training checkpoints in a folder, the last first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer's files are in the folder."""
    return any(
        (folder / name).is_file() for name in TOKENIZER if name.startswith(("tokenizer.json", "tokenizer.model", "vocab.", "spiece."))
    )


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a checkpoint, by transformers.

    Raises:
        CheckpointError: if there is none, or transformers cannot read it.
    """
    if not has_tokenizer(folder):
        raise CheckpointError(f"{folder} has no tokenizer: copy the model's tokenizer.json and tokenizer_config.json there")
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(folder, local_files_only=True)
        list(tokenizer("a")["input_ids"])  # some damage shows only when it is used
    except Exception as error:  # whatever transformers and tokenizers raise for a broken file
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}") from error
    return tokenizer


def load_checkpoint(folder: Path, *, dtype: DtypeName | None = None, device: str | None = None) -> Loaded:
    """The model of a checkpoint folder and its parameters.

    Args:
        folder: as `find` gives it.
        dtype: of the parameters; by default float32 on a CPU, elsewhere that of the checkpoint.
        device: by default a GPU where there is one.

    Raises:
        CheckpointError: as `xtf.load_params`.
        ValueError: for a device that is not there.
    """
    import torch

    import xtf

    target = _device(device)
    kind = dtype or ("float32" if target.type == "cpu" else stored_dtype(folder))
    model = xtf.models.from_hf(folder, dtype=getattr(torch, kind))
    return Loaded(folder, model, xtf.load_params(model, folder, device=target))


def stored_dtype(folder: Path) -> DtypeName:
    """The dtype that a checkpoint's ``config.json`` states; float32 where it states none that is known."""
    from xtf.checkpoint.folder import read_config

    config = read_config(folder)
    stated = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return cast(DtypeName, stated) if stated in DtypeName.__args__ else "float32"


def end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text: ``eos_token_id`` of ``generation_config.json``, of ``config.json`` and of the tokenizer together."""
    found: set[int] = set()
    for name in ("generation_config.json", CONFIG):
        try:
            config: object = parse_json((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise CheckpointError(f"{folder / name} is not valid JSON ({error}): copy it again, or remove it") from None
        stated = cast("dict[str, object]", config).get("eos_token_id") if isinstance(config, dict) else None
        several = cast("list[object]", stated) if isinstance(stated, list) else [stated]
        found.update(token for token in several if isinstance(token, int) and not isinstance(token, bool))
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(found | ({own} if isinstance(own, int) else set()))


def note(text: str) -> None:
    """One line on standard error, beside the results."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"xtf: {text}", style="dim", markup=False)


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"--device {name} is not here: {reason}; use cpu, or leave it out") from None
    return device
