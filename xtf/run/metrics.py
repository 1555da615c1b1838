"""Metrics of a run: written as JSON lines while it goes on, and read back for plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Union, cast

import numpy as np
from torch import Tensor

from xtf.files import parse_json, write_atomically

Value = Union[float, int, None, "list[Value]"]
"""A number, ``null`` where it is not finite, or nested lists of them."""

Row = dict[str, Value]
"""What one step left, by name; ``"step"`` among it."""


class MetricsWriter:
    """Appends one JSON object per step to ``metrics.jsonl``, flushed, so that what was reached stands there whatever ends the run.

    Numbers that are not finite are written as ``null``: JSON has no other way that every reader takes. A last line that a killed
    run has left without its end is cut off before anything is appended.

    Args:
        folder: the run's folder, which must exist.
        tensorboard: also write TensorBoard event files there (needs the package ``tensorboard``): numbers in groups
            (``loss/…``, ``optim/…``, ``router/…``, ``speed/…``), vectors of one number per layer as one curve for each layer,
            matrices (``expert_load``) as a histogram for each row, ever more seldom as the run goes on.
        active: ``False`` writes nothing: for all ranks but the first.
        resume_at: how many steps a resumed run begins with. Rows of later steps, which it will make again, are cut out of the
            file (with 0, all rows), and each step stands there once and in order. The old file is whole until the new one takes
            its place.

    Raises:
        ValueError: for a negative ``resume_at``, or a ``metrics.jsonl`` that is not one.
        OSError: if the file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with MetricsWriter(folder) as writer:
        ...     row = writer.write(1, {"loss": float("nan"), "tokens": 8})
        >>> (folder / "metrics.jsonl").read_text()
        '{"step": 1, "loss": null, "tokens": 8}\\n'
    """

    def __init__(self, folder: str | Path, *, tensorboard: bool = False, active: bool = True, resume_at: int | None = None) -> None:
        if resume_at is not None and resume_at < 0:
            raise ValueError(f"resume_at is {resume_at}, expected the number of steps that are done")
        self.path = Path(folder) / "metrics.jsonl"
        if active and self.path.exists():
            mend(self.path, resume_at)
        self._file = self.path.open("a", encoding="utf-8") if active else None
        self._board: Any = _summary_writer(self.path.parent, resume_at) if active and tensorboard else None
        self._histograms_from = 0

    def write(self, step: int, metrics: Mapping[str, Tensor | float | int]) -> Row:
        """Write the numbers of one step and return them as they were written.

        A tensor with dims becomes nested lists, of numbers of 7 figures: it is most of what a run of many experts writes.

        Raises:
            ValueError: if a metric is neither a tensor nor a number.
        """
        row: Row = {"step": step} | {name: _value(name, value) for name, value in metrics.items() if name != "step"}
        if self._file is not None:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        if self._board is not None:
            self._show(step, row)
        return row

    def _show(self, step: int, row: Row) -> None:
        due = step >= self._histograms_from
        if due:  # some twenty for each time the run grows by e, however long it is
            self._histograms_from = step + max(1, step // 20)
        for name, value in row.items():
            if name == "step":
                continue
            for tag, one in _parts(_tag(name), value):
                if isinstance(one, (int, float)):
                    self._board.add_scalar(tag, one, step)
                elif due and (numbers := [float(n) for n in one if isinstance(n, (int, float))]):
                    self._board.add_histogram(tag, np.asarray(numbers), step, bins=min(30, len(numbers)))

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
    rows = {step: row for step, _, row in _lines(Path(folder) / "metrics.jsonl")}
    return [rows[step] for step in sorted(rows)]


def _lines(path: Path) -> Iterator[tuple[int, bytes, Row]]:
    """Step, line and row of each line that has its end."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    row: Any = parse_json(line)
                except ValueError as error:  # not JSON, or not even UTF-8
                    raise ValueError(f"{path}, line {number}: not JSON: {getattr(error, 'msg', error)}") from error
                if not isinstance(row, dict) or not isinstance(cast(Any, row).get("step"), int):
                    raise ValueError(f'{path}, line {number}: expected an object with an integer "step"')
                yield row["step"], line, cast(Row, row)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; give the folder of a run") from error


def mend(path: Path, resume_at: int | None) -> None:
    """Cut a broken last line off rows; of a resumed run also the steps that it makes again and all but the last row of each step."""
    if resume_at is None:
        with path.open("rb+") as file:
            file.truncate(_end_of_lines(file))
        return
    places: dict[int, tuple[int, int]] = {}  # of each step's last row, where it begins and its bytes
    begin = 0
    for step, line, _ in _lines(path):
        if 0 < resume_at >= step:  # a run that begins anew looks at its first parameters again: row 0 is not kept
            places[step] = begin, len(line)
        begin += len(line)
    if begin == path.stat().st_size and sum(size for _, size in places.values()) == begin and list(places) == sorted(places):
        return
    with path.open("rb") as old, write_atomically(path) as new:
        for step in sorted(places):
            begin, size = places[step]
            old.seek(begin)
            new.write(old.read(size))


def _end_of_lines(file: BinaryIO) -> int:
    """The position after the last line that has its end."""
    at = file.seek(0, 2)
    while at > 0:
        begin = max(0, at - (1 << 16))
        file.seek(begin)
        found = file.read(at - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        at = begin
    return 0


# TensorBoard --------------------------------------------------------------------------------------------------------------------

_GROUPS = {
    "loss": ("loss", "cross_entropy", "held_out_loss", "aux_loss"),
    "optim": ("lr", "grad_norm"),
    "router": (
        "router_balance",
        "router_sequence_balance",
        "router_z",
        "router_entropy",
        "expert_load",
        "load_violation",
        "dropped_tokens",
    ),
    "speed": ("tokens_per_second", "mfu", "memory_bytes", "seconds", "imbalance"),
    "data": ("tokens", "weight", "padding", "epoch"),
}


def _tag(name: str) -> str:
    """A metric's name in its group; of a group of optimizers (``"muon/lr"``) the last part says which group.

    Example:
        >>> _tag("loss"), _tag("muon/lr"), _tag("mine")
        ('loss/loss', 'optim/muon/lr', 'other/mine')
    """
    last = name.rpartition("/")[2]
    return f"{next((group for group, names in _GROUPS.items() if last in names), 'other')}/{name}"


def _parts(tag: str, value: Value) -> Iterator[tuple[str, float | int | list[Value]]]:
    """What is shown of a metric: itself, one number for each entry of a vector, or one list for each row of a matrix."""
    if isinstance(value, (int, float)):
        yield tag, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if item is not None:
                yield f"{tag}/layer {i:02}", item


def _value(name: str, value: object) -> Value:
    if isinstance(value, Tensor):
        return _finite(cast(Any, value).tolist())
    if not isinstance(value, (int, float)):
        raise ValueError(f"metric {name!r} is a {type(value).__name__}, expected a tensor or a number")
    return _finite(value)


def _finite(value: object) -> Value:
    if isinstance(value, list):
        return [_rounded(item) for item in map(_finite, cast("list[object]", value))]
    number = cast("float | int", value)
    return number if math.isfinite(number) else None


def _rounded(value: Value) -> Value:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _summary_writer(folder: Path, resume_at: int | None) -> Any:
    purge = resume_at + 1 if resume_at else resume_at
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=purge)
    except ImportError as error:
        raise ValueError("TensorBoard files were asked for, but tensorboard is not installed: pip install tensorboard") from error
