"""The cache of tokens: one folder for each file, tokenizer and template, whole or not there, read through memory maps.

A folder holds ``ids.bin`` (int32), ``weights.bin`` (float32; left out if all are 1), ``ends.bin`` (int64, where each document ends) and
``meta.json``. Its name is the SHA-256 of everything that its content depends on.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from xtf.data.codec import Encoded
from xtf.data.documents import Document, Documents
from xtf.files import folder_atomically, parse_json

FORMAT = 1
"""Goes up whenever the same input gives other tokens or other files."""

_LOCK = "lock"


@dataclass(frozen=True)
class Skipped:
    """A row that was left out.

    Args:
        path: the file.
        line: the number of the line, item or row, from 1.
        reason: what was wrong with it.
        unit: what ``line`` counts.
    """

    path: str
    line: int
    reason: str
    unit: str = "line"


@dataclass(frozen=True)
class Entry:
    """The tokens of one file.

    Args:
        documents: as they stand in the file.
        max_id: the highest token id.
        skipped: what was left out.
    """

    documents: Documents
    max_id: int
    skipped: tuple[Skipped, ...]


def digest(parts: Iterable[bytes | Path]) -> str:
    """The SHA-256 of texts and of the content of files, in this order; where one ends and the next begins counts too."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with open(part, "rb") as file:
                inner = hashlib.file_digest(file, "sha256").digest()
        else:
            inner = hashlib.sha256(part).digest()
        whole.update(inner)
    return whole.hexdigest()


def read_entry(folder: Path, path: str) -> Entry | None:
    """The entry of a folder; ``None`` if it is not there or not whole.

    Args:
        folder: of the entry.
        path: the file as the caller calls it, for what was skipped.
    """
    try:
        meta = cast(dict[str, Any], parse_json((folder / "meta.json").read_text(encoding="utf-8")))
        tokens, documents = int(meta["tokens"]), int(meta["documents"])
        ends = _mapped(folder / "ends.bin", np.dtype(np.int64), documents)
        ids = _mapped(folder / "ids.bin", np.dtype(np.int32), tokens)
        weights = _mapped(folder / "weights.bin", np.dtype(np.float32), tokens) if meta["weights"] else None
        skipped = tuple(Skipped(path, int(s["line"]), str(s["reason"]), str(s["unit"])) for s in meta["skipped"])
        max_id = int(meta["max_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    lengths = np.asarray(ends) - starts
    if meta.get("format") != FORMAT or int(ends[-1]) != tokens or int(lengths.min()) < 0:
        return None

    def one(index: int) -> Document:
        part = slice(int(starts[index]), int(ends[index]))
        heavy = np.ones(part.stop - part.start, np.float32) if weights is None else np.array(weights[part])
        return Document(ids[part].astype(np.int64), heavy)

    def fetch(indices: npt.NDArray[np.int64]) -> list[Document]:
        return [one(index) for index in indices.tolist()]

    return Entry(Documents(lengths, fetch), max_id, skipped)


def write_entry(folder: Path, batches: Iterable[Encoded], skipped: list[Skipped]) -> None:
    """Write an entry as its tokens come; it appears when all is written, and only then.

    Where another process has written the same entry in the meantime, that one stays.

    Args:
        folder: of the entry.
        batches: the documents in order.
        skipped: what was left out, complete when ``batches`` ends.

    Raises:
        OSError: naming the folder, if it cannot be written; nothing of it is left.
        EmptyError: if there is no document.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder.parent)
    try:
        with folder_atomically(folder) as new:
            with _alive(new):
                meta = _write(new, batches)
                meta |= {"skipped": [{**asdict(item), "path": Path(item.path).name} for item in skipped]}
                (new / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
            if read_entry(folder, "") is not None:
                raise _Present
    except _Present:
        pass


class EmptyError(ValueError):
    """There is no document to write."""


class _Present(Exception):
    """Another process was faster."""


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    if count < 1 or path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path} has not the size of {count} items")
    return np.memmap(path, dtype, "r", shape=(count,))


def _write(folder: Path, batches: Iterable[Encoded]) -> dict[str, Any]:
    tokens, documents, max_id, weighted = 0, 0, 0, False
    with open(folder / "ids.bin", "wb") as ids, open(folder / "ends.bin", "wb") as ends, open(folder / "weights.bin", "wb") as weights:
        for batch in batches:
            _put(ids, batch.ids)
            if not weighted and bool((batch.weights != 1).any()):
                weighted = True
                for begin in range(0, tokens, 1 << 20):  # the 1s that were not written so far
                    _put(weights, np.ones(min(1 << 20, tokens - begin), np.float32))
            if weighted:
                _put(weights, batch.weights)
            _put(ends, tokens + np.cumsum(batch.lengths))
            tokens, documents = tokens + len(batch.ids), documents + len(batch.lengths)
            max_id = max(max_id, int(batch.ids.max(initial=0)))
    if not weighted:
        (folder / "weights.bin").unlink()
    if not documents:
        raise EmptyError
    return {"format": FORMAT, "tokens": tokens, "documents": documents, "max_id": max_id, "weights": weighted}


def _put(file: BinaryIO, values: npt.NDArray[Any]) -> None:
    file.write(np.ascontiguousarray(values).data)


@contextmanager
def _alive(folder: Path) -> Generator[None, None, None]:
    """As long as the process lives and the block runs, others see that the folder is being written."""
    with open(folder / _LOCK, "wb") as file:
        _try_lock(file)
        yield
        (folder / _LOCK).unlink()


def _try_lock(file: BinaryIO) -> bool:
    """Whether the lock was free; always, on systems without such locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # a file system that knows no locks does not say that the folder is in use
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _remove_leftovers(cache: Path, age: float = 24 * 3600.0) -> None:
    """Remove what killed processes left half written: folders whose lock nobody holds, and old ones without a lock."""
    for folder in cache.glob(".*.tmp"):
        try:
            if (folder / _LOCK).exists():
                with open(folder / _LOCK, "rb") as file:
                    dead = _try_lock(file)
            else:
                dead = time.time() - folder.stat().st_mtime > age
        except OSError:
            continue  # finished or removed in the meantime
        if dead:
            shutil.rmtree(folder, ignore_errors=True)
