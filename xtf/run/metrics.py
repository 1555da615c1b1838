"""Metrics of a run: written as JSON lines while it goes on, and read back for plots."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Union, cast

from torch import Tensor

Value = Union[float, int, None, "list[Value]"]
"""A number, ``null`` where it is not finite, or nested lists of them."""

Row = dict[str, Value]
"""What one step left, by name; ``"step"`` among it."""


class MetricsWriter:
    """Appends one JSON object per step to ``metrics.jsonl``, flushed, so that what was reached stands there whatever ends the run.

    Numbers that are not finite are written as ``null``: JSON has no other way that every reader takes.

    Args:
        folder: the run's folder, which must exist.
        tensorboard: also write single numbers as TensorBoard event files there (needs the package ``tensorboard``).
        active: ``False`` writes nothing: for all ranks but the first.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with MetricsWriter(folder) as writer:
        ...     row = writer.write(1, {"loss": float("nan"), "tokens": 8})
        >>> (folder / "metrics.jsonl").read_text()
        '{"step": 1, "loss": null, "tokens": 8}\\n'
    """

    def __init__(self, folder: str | Path, *, tensorboard: bool = False, active: bool = True) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self._file = self.path.open("a", encoding="utf-8") if active else None
        self._board: Any = _summary_writer(self.path.parent) if active and tensorboard else None

    def write(self, step: int, metrics: Mapping[str, Tensor | float | int]) -> Row:
        """Write the numbers of one step and return them as they were written. A tensor with dims becomes nested lists.

        Raises:
            ValueError: if a metric is neither a tensor nor a number.
        """
        row: Row = {"step": step} | {name: _value(name, value) for name, value in metrics.items() if name != "step"}
        if self._file is not None:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(name, value, step)
        return row

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_metrics(folder: str | Path) -> list[Row]:
    """The rows of a run's ``metrics.jsonl``, in order of steps; of a step written twice (a resumed run) the later one counts.

    A last line without its end, which a killed run can leave, is passed over.

    Raises:
        ValueError: if the file is missing or a line is wrong; it names file, line and reason.
    """
    path = Path(folder) / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; give the folder of a run") from error
    rows: dict[int, Row] = {}
    for number, line in enumerate(lines[:-1], 1):
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error.msg}") from error
        if not isinstance(row, dict) or not isinstance(cast(Any, row).get("step"), int):
            raise ValueError(f'{path}, line {number}: expected an object with an integer "step"')
        rows[row["step"]] = cast(Row, row)
    return [rows[step] for step in sorted(rows)]


def _value(name: str, value: object) -> Value:
    if isinstance(value, Tensor):
        return _finite(cast(Any, value).tolist())
    if not isinstance(value, (int, float)):
        raise ValueError(f"metric {name!r} is a {type(value).__name__}, expected a tensor or a number")
    return _finite(value)


def _finite(value: object) -> Value:
    if isinstance(value, list):
        return [_finite(item) for item in cast("list[object]", value)]
    number = cast("float | int", value)
    return number if math.isfinite(number) else None


def _summary_writer(folder: Path) -> Any:
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
    except ImportError as error:
        raise ValueError("TensorBoard files were asked for, but tensorboard is not installed: pip install tensorboard") from error
