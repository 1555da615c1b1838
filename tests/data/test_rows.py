"""Rows of JSON lines, JSON lists and Parquet, and what is said of broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xtf.data import RowError, read_rows

ROWS = [{"text": "one"}, {"text": "zwei é 日本"}, {"text": "3\nlines\n"}]


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_lists_and_lines_are_the_same(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row) for row in ROWS)
    files = [
        written(tmp_path, "a.jsonl", lines),
        written(tmp_path, "b.jsonl", "\ufeff" + lines + "\n\n \r\n"),
        written(tmp_path, "c.json", lines),
        written(tmp_path, "d.json", json.dumps(ROWS)),
        written(tmp_path, "e.json", " \n" + json.dumps(ROWS, indent=2, ensure_ascii=False) + "\n"),
        written(tmp_path, "f.json", "\ufeff" + json.dumps(ROWS)),
    ]
    for file in files:
        assert [row.value for row in read_rows(file)] == ROWS, file
        assert [row.line for row in read_rows(file)] == [1, 2, 3]
        done = [row.done for row in read_rows(file)]
        assert done == sorted(done) and done[0] > 0 and done[-1] <= file.stat().st_size


def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", '\n{"text": "a"}\n\n{"text": "b"}')
    assert [row.line for row in read_rows(file)] == [2, 4]


def test_json_lines_are_not_read_ahead(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", '{"text": "a"}\n' + "broken\n")
    rows = read_rows(file)
    assert next(rows).value == {"text": "a"}
    with pytest.raises(RowError, match="line 2"):
        next(rows)


def test_parquet_is_the_same(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "loss_weight": 0.5}]},
        {"text": "plain"},
        {"messages": [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": ""}]},
    ]
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"picture": b"\0" * 9, **row} for row in rows], _schema()), file)
    assert [row.value for row in read_rows(file)] == rows
    assert [(row.line, row.unit) for row in read_rows(file)] == [(1, "row"), (2, "row"), (3, "row")]
    assert list(read_rows(file))[-1].done == file.stat().st_size


def _schema() -> Any:
    import pyarrow as pa

    message = pa.struct({"role": pa.string(), "content": pa.string(), "loss_weight": pa.float64()})
    return pa.schema({"picture": pa.binary(), "messages": pa.list_(message), "text": pa.string()})


@pytest.mark.parametrize(
    ("name", "content", "line", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', 2, r"a\.jsonl, line 2: not JSON: Expecting value at column 10"),
        ("a.jsonl", b'{"text": "a"}\n\xff\xfe\n', 2, "line 2: is not UTF-8"),
        ("a.jsonl", b"[" * 100_000 + b"\n", 1, "line 1: not JSON"),
        ("a.jsonl", b"1" * 5000 + b"\n", 1, "line 1: not JSON"),
        ("a.json", b'[{"text": "a"}, {"text": }]', 2, "item 2: not JSON: Expecting value at line 1"),
        ("a.json", b'[{"text": "a"},]', 2, "item 2: not JSON"),
        ("a.json", b'[{"text": "a"}', 1, "item 1: not JSON: the list breaks off"),
        ("a.json", b'[{"text": "a"}] []', None, "more text follows"),
        ("a.json", b'[{"text": "\xff"}]', None, "is not UTF-8"),
        ("a.json", b'{"text": "a",\n"b": 1}', 1, "line 1: not JSON"),
        ("a.jsonl", b"", None, "is empty"),
        ("a.parquet", b"PAR2", None, "cannot be read as Parquet"),
        ("a.csv", b"a,b", None, r"suffix '\.csv', expected one of \.jsonl, \.json, \.parquet"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, line: int | None, message: str) -> None:
    file = written(tmp_path, name, content)
    with pytest.raises(RowError, match=message) as raised:
        list(read_rows(file))
    assert (raised.value.path, raised.value.line) == (file, line)
    assert str(file) in str(raised.value) and raised.value.reason in str(raised.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RowError, match=r"none\.jsonl: cannot be read: No such file"):
        list(read_rows(tmp_path / "none.jsonl"))
    with pytest.raises(RowError, match="is a folder"):
        list(read_rows(tmp_path))


def test_parquet_without_a_column_of_use(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(RowError, match="has the columns prompt; expected messages"):
        list(read_rows(tmp_path / "a.parquet"))


def test_broken_lines_can_be_left_out(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", b'{"text": "a"}\nbroken\n{"text": "b"}\n\xff\n')
    errors: list[RowError] = []
    assert [row.line for row in read_rows(file, on_error=errors.append)] == [1, 3]
    assert [error.line for error in errors] == [2, 4]


def test_a_list_that_breaks_off_is_never_left_out(tmp_path: Path) -> None:
    file = written(tmp_path, "a.json", '[{"text": "a"}, {"text": }, {"text": "c"}]')
    with pytest.raises(RowError, match="item 2"):
        list(read_rows(file, on_error=lambda error: None))
