"""Files and folders that are either the old ones or the complete new ones, never something between.

What is written goes to a temporary sibling (the same file system), is flushed to the disk, and takes its place by a rename. After
any failure, a full disk or a keyboard interrupt included, what stood there before still stands and the sibling is gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text, of which nobody knows where it comes from.

    Raises:
        ValueError: if it is none, or nested thousands deep.

    Example:
        >>> parse_json('{"a": [1]}')
        {'a': [1]}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/xtf``, or ``~/.cache/xtf`` without that variable."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "xtf"


@contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Generator[BinaryIO, None, None]:
    """A binary file that takes the place of ``path`` when the block ends without an exception.

    Missing parent folders are made. A symbolic link stays, and what it points to is replaced.

    Raises:
        OSError: naming the path, if it cannot be written (no space, no permission, a folder stands there).

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with write_atomically(folder / "a.txt") as file:
        ...     _ = file.write(b"hello")
        >>> [p.name for p in folder.iterdir()], (folder / "a.txt").read_bytes()
        (['a.txt'], b'hello')
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = _sibling(target)
    try:
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise naming(error, target) from error
        raise
    _fsync(target.parent)


@contextmanager
def folder_atomically(path: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """An empty folder to write into, that takes the place of ``path`` when the block ends without an exception.

    A folder that stands at ``path`` is replaced as a whole: the caller has made sure that it may be. Where the system can
    exchange two names (Linux), there is no moment without a folder at ``path``; elsewhere there are two renames.
    Missing parent folders are made. A symbolic link stays, and what it points to is replaced.

    Raises:
        OSError: naming the path, if it cannot be written (no space, no permission, a file stands there).

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with folder_atomically(folder / "run") as new:
        ...     _ = (new / "a.txt").write_text("hello")
        >>> [p.name for p in folder.iterdir()], [p.name for p in (folder / "run").iterdir()]
        (['run'], ['a.txt'])
    """
    target = Path(os.path.realpath(path))
    beside: Path | None = None
    try:
        beside = folder_beside(target)
        yield beside
        put_in_place(beside, target)
    except OSError as error:
        raise naming(error, target) from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)  # what was not finished, or what was replaced


def folder_beside(target: Path) -> Path:
    """An empty hidden folder beside ``target``, to be filled and given to `put_in_place` or `drop_folder`.

    Raises:
        OSError: if it cannot be made, or a file stands at ``target``.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file: a folder is to be written there; give another path or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = _sibling(target)
    beside.mkdir()
    return beside


def put_in_place(beside: Path, target: Path) -> None:
    """Flush a folder to the disk and give it the name ``target``; what stood there is called ``beside`` afterwards."""
    for folder, _, files in os.walk(beside):
        for name in files:
            _fsync(Path(folder, name))
        _fsync(Path(folder))
    _put_in_place(beside, target)
    _fsync(target.parent)


def drop_folder(beside: Path, target: Path) -> None:
    """Remove a folder that `folder_beside` made. Others may still write into it: it is renamed first, so that they open no more files."""
    gone = _sibling(target)
    with suppress(OSError):
        os.rename(beside, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _put_in_place(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``; a folder that stood there is called ``new`` afterwards."""
    if not target.exists():
        os.rename(new, target)
    elif not _exchange(new, target):
        old = _sibling(target)
        os.rename(target, old)
        try:
            os.rename(new, target)
        except BaseException:
            os.rename(old, target)
            raise
        os.rename(old, new)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step (Linux ``renameat2`` with ``RENAME_EXCHANGE``); ``False`` where that cannot be done."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    at_cwd, exchange = -100, 2
    return rename is not None and rename(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0


def _sibling(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def naming(error: OSError, target: Path) -> OSError:
    """The same error, saying which target could not be written and that it is as it was."""
    if error.errno is None or error.filename == str(target):
        return error
    where = f" ({error.filename})" if error.filename else ""
    return OSError(error.errno, f"{error.strerror}{where} while writing; what stood there before is unchanged", str(target))
