"""The folder of a run's training checkpoints: which is the newest, which go, and what killed saves left."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from xtf.checkpoint.folder import CheckpointError
from xtf.checkpoint.training_index import STATE, read_index
from xtf.files import write_atomically

LATEST = "latest"

_LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")  # how xtf.files names what is not finished


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete training checkpoint of a folder; ``None`` if there is none.

    That is the one which the file ``latest`` in the folder names. Where that file is missing, or what it names is not complete,
    it is the complete one of the highest step. Complete means: the index is sound, and every file is there and of its size.
    Checksums are verified when it is loaded.

    Warns:
        RuntimeWarning: if a checkpoint is passed over, naming it and saying why.

    Example:
        >>> import tempfile
        >>> print(latest(tempfile.mkdtemp()))
        None
    """
    return next(usable(Path(folder), lambda reason: warnings.warn(reason, RuntimeWarning, stacklevel=4)), None)


def usable(folder: Path, tell: Callable[[str], None]) -> Iterator[Path]:
    """The complete training checkpoints of a folder, in the order in which `latest` prefers them. ``tell`` is given the reason for each
    that is passed over, before the next is yielded."""
    name = _pointed(folder)
    if name is not None:
        try:
            _step(folder / name)
            yield folder / name
        except CheckpointError as error:
            tell(f"{folder / LATEST} names {name}, which cannot be used: {error}")
    for step, path in reversed(_indexed(folder, tell, but=name)):
        if path.name != name:
            try:
                _step(path)
                yield path
            except CheckpointError as error:
                tell(f"the checkpoint of step {step} is passed over: {error}")


def point_latest(path: Path) -> None:
    """Make ``latest``, in the folder that ``path`` stands in, name it."""
    with write_atomically(path.parent / LATEST) as file:
        file.write(f"{path.name}\n".encode())


def prune(folder: str | os.PathLike[str], *, keep_last: int, keep: Callable[[int], bool] | None = None) -> list[Path]:
    """Remove old training checkpoints of a folder, and what killed saves left. One rank calls it, while no save is under way there.

    The one that `latest` gives is never removed, nor is one whose index cannot be read: what it is, a person must say. Each is
    renamed before it is removed, so that a kill never leaves half of one under its name.

    Args:
        folder: the folder that holds the checkpoints.
        keep_last: how many of the highest steps are kept, at least 1.
        keep: steps that are kept beside them, as in ``lambda step: step % 1000 == 0``.

    Returns:
        The checkpoints that were removed.

    Raises:
        ValueError: if ``keep_last`` is less than 1.
        OSError: if one cannot be removed.
    """
    if not isinstance(keep_last, int) or keep_last < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"keep_last is {keep_last!r}, expected a whole number of at least 1: how many of the newest checkpoints are kept")
    folder = Path(folder)
    remove_leftovers(folder)
    protected, removed = latest(folder), list[Path]()
    for step, path in _indexed(folder, lambda reason: warnings.warn(reason, RuntimeWarning, stacklevel=4))[:-keep_last]:
        if path != protected and not (keep is not None and keep(step)):
            gone = path.with_name(f".{path.name}.{0:08x}.tmp")
            os.rename(path, gone)
            shutil.rmtree(gone)
            removed.append(path)
    return removed


def remove_leftovers(folder: str | os.PathLike[str], name: str | None = None, *, but: Path | None = None) -> list[Path]:
    """Remove what killed saves (and removals) left in a folder, or those of the checkpoint ``name`` only. One rank calls it, while no
    save of them is under way, but for one into the folder ``but``. Returns what was removed."""
    removed: list[Path] = []
    for path in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []:
        found = _LEFTOVER.fullmatch(path.name)
        if found and name in (None, found[1]) and path != but:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path)
    return removed


def _pointed(folder: Path) -> str | None:
    """The name in ``latest``; ``None`` where there is none, or none that could be a folder's."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return name if name and Path(name).name == name else None


def _indexed(folder: Path, tell: Callable[[str], None], *, but: str | None = None) -> list[tuple[int, Path]]:
    """The training checkpoints of a folder whose index can be read, by step. ``tell`` is given why others cannot, of all ``but`` one."""
    found: list[tuple[int, Path]] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if ((path / STATE).is_file() or any(path.glob("rank-*.safetensors"))) and not _LEFTOVER.fullmatch(path.name):
            try:
                found.append((read_index(path).step, path))
            except CheckpointError as error:
                if path.name != but:
                    tell(f"a checkpoint is passed over: {error}")
    return sorted(found)


def _step(path: Path) -> int:
    """The step of a checkpoint, known to be complete."""
    index = read_index(path)
    index.check_files()
    return index.step
