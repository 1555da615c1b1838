"""Rows of data files: JSON lines, JSON lists and Parquet, one row after another, each with the place it stands at."""

from __future__ import annotations

import codecs
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

SUFFIXES = (".jsonl", ".json", ".parquet")

KEYS = ("messages", "conversations", "content", "text", "tools", "system")
"""What a row may hold that is of use; other columns of a Parquet file are not read."""


class RowError(ValueError):
    """A file, or one row of it, that cannot be used.

    Args:
        path: the file.
        line: the number of the line, of the item of a JSON list, or of the row of a Parquet file, from 1; ``None`` if the file
            as a whole is meant.
        reason: what is wrong, and what was expected.
        unit: what ``line`` counts.
    """

    def __init__(self, path: Path, line: int | None, reason: str, unit: str = "line") -> None:
        super().__init__(f"{path}{'' if line is None else f', {unit} {line}'}: {reason}")
        self.path, self.line, self.reason, self.unit = path, line, reason, unit


class Row(NamedTuple):
    """One row.

    Args:
        line: its number from 1, as in `RowError`.
        value: what it holds, usually a dict.
        done: bytes of the file read so far, this row included; of a Parquet file in proportion.
        unit: what ``line`` counts.
    """

    line: int
    value: object
    done: int
    unit: str = "line"


def read_rows(path: str | Path, *, on_error: Callable[[RowError], None] | None = None) -> Iterator[Row]:
    """The rows of a ``.jsonl``, ``.json`` or ``.parquet`` file, read as they are asked for.

    JSON lines and Parquet are streamed; a ``.json`` file may be one list, which is held in memory as text, or hold one object per
    line. Empty lines are passed over. Parquet has no absent fields: its nulls are taken for such, at every depth.

    Args:
        path: the file, UTF-8 if it is text.
        on_error: called with the error of a broken line instead of raising it; the line is then left out. A file
            that cannot be read any further (not there, a folder, a list that breaks off) raises in any case.

    Raises:
        RowError: naming file, line and reason.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "a.jsonl")
        >>> _ = file.write_text('{"text": "Hello"}\\n\\n{"text": "World"}\\n')
        >>> [(row.line, row.value) for row in read_rows(file)]
        [(1, {'text': 'Hello'}), (3, {'text': 'World'})]
    """
    path = Path(path)
    kind = check_file(path)
    report = _raise if on_error is None else on_error
    try:
        if kind == ".parquet":
            yield from _parquet(path)
            return
        with open(path, "rb") as file:
            yield from _array(path, file) if kind == ".json" and _begins_list(file) else _lines(path, file, report)
    except OSError as error:
        raise RowError(path, None, f"cannot be read: {error.strerror or error}") from error


def check_file(path: Path) -> str:
    """The suffix of a file that is there and can be read as rows; a `RowError` for any other."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise RowError(path, None, f"cannot be read: {error.strerror}") from error
    if path.is_dir():
        raise RowError(path, None, "is a folder: name the files in it")
    if path.suffix.lower() not in SUFFIXES:
        raise RowError(path, None, f"has the suffix {path.suffix!r}, expected one of {', '.join(SUFFIXES)}")
    if not size:
        raise RowError(path, None, "is empty")
    return path.suffix.lower()


def _raise(error: RowError) -> None:
    raise error


def _begins_list(file: BinaryIO) -> bool:
    begin = b""
    while not begin and (chunk := file.read(4096)):
        begin = chunk.removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    return begin.startswith(b"[")


def _lines(path: Path, file: BinaryIO, report: Callable[[RowError], None]) -> Iterator[Row]:
    done = 0
    for number, raw in enumerate(file, 1):
        done += len(raw)
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if raw.isspace() or not raw:
            continue
        try:
            value = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            report(RowError(path, number, f"is not UTF-8 text (byte {error.start} of the line): save the file as UTF-8"))
        except json.JSONDecodeError as error:
            report(RowError(path, number, f"not JSON: {error.msg} at column {error.colno}"))
        except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested thousands deep
            report(RowError(path, number, f"not JSON: {error}"))
        else:
            yield Row(number, value, done)


def _array(path: Path, file: BinaryIO) -> Iterator[Row]:
    """Item after item of one list. Where an item breaks off, nothing after it can be found: that raises in any case."""
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RowError(path, None, f"is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    scale, decode, number = path.stat().st_size / len(text), json.JSONDecoder().raw_decode, 0
    at = _after_space(text, text.index("[") + 1)
    more = not text.startswith("]", at)
    while more:
        number += 1
        try:
            value, at = decode(text, at)
        except json.JSONDecodeError as error:
            raise RowError(path, number, f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}", "item") from error
        except (ValueError, RecursionError) as error:
            raise RowError(path, number, f"not JSON: {error}", "item") from error
        yield Row(number, value, int(at * scale), "item")
        at = _after_space(text, at)
        more = text.startswith(",", at)
        if more:
            at = _after_space(text, at + 1)
        elif not text.startswith("]", at):
            raise RowError(path, number, "not JSON: the list breaks off after this item, expected ',' or ']'", "item")
    if text[at + 1 :].strip():
        raise RowError(path, None, "not JSON: more text follows the end of the list")


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _parquet(path: Path) -> Iterator[Row]:
    parquet = cast(Any, importlib.import_module("pyarrow.parquet"))  # a second of import that only these files need
    try:
        with parquet.ParquetFile(path) as file:
            names: list[str] = list(file.schema_arrow.names)
            columns = [name for name in names if name in KEYS]
            if not columns:
                raise RowError(path, None, f"has the columns {', '.join(names)}; expected messages, conversations, content or text")
            size, total, number = path.stat().st_size, max(1, int(file.metadata.num_rows)), 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(number, _without_nulls(value), size * number // total, "row")
    except (RowError, MemoryError):
        raise
    except Exception as error:  # pyarrow's own, and those of texts that are not UTF-8 or times that no calendar has
        raise RowError(path, None, f"cannot be read as Parquet: {error}") from error


def _without_nulls(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in cast(Mapping[str, object], value).items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast(list[object], value)]
    return value
