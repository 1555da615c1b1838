"""Steps that were skipped: which documents they had, and when there were too many."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from xtf import tree
from xtf.mesh import Mesh
from xtf.run.metrics import mend
from xtf.run.ranks import agree
from xtf.run.recipe import Opened
from xtf.tree import Tree

SKIPPED = "skipped.jsonl"
"""The file of a run's folder that names the documents of skipped steps."""


class RunFailed(RuntimeError):
    """A run that cannot usefully go on. Ranks that have nothing to say raise it without a message.

    Args:
        message: what happened and what to do.
    """

    exit_code = 3


class Skips:
    """What a run does about skipped steps (`xtf.step.TrainStep`): each is a row of ``skipped.jsonl``, and too many in a row end it.

    A skipped step has changed nothing, so a state that is saved after one is sound. It is not saved all the same, unless a signal ends the
    run: if parameters were spoiled by a step that was still accepted, the states from before it must not be pruned for later ones.

    Args:
        folder: the run's folder.
        opened: the data, which know their documents.
        mesh: the ranks; the first one writes.
        parts: in how many parts a global batch is cut.
        limit: skipped steps in a row that end the run; 0 for never.
        resume_at: how many steps are done; rows of later ones, which are made again, are cut out.

    Attributes:
        in_a_row: skipped steps since the last that was made, in this process.
    """

    def __init__(self, folder: Path, opened: Opened, mesh: Mesh, *, parts: int, limit: int, resume_at: int) -> None:
        self.in_a_row = 0
        self._path, self._opened, self._mesh, self._parts, self._limit = folder / SKIPPED, opened, mesh, parts, limit
        if mesh.rank == 0 and self._path.exists():
            mend(self._path, resume_at)

    def note(self, step: int, metrics: Mapping[str, Tensor], total: int) -> str | None:
        """Take note of a step that is done.

        Args:
            step: its number, from 1.
            metrics: its metrics.
            total: ``state.skipped``.

        Returns:
            What the user is told; ``None`` if it was not skipped.

        Raises:
            OSError: if ``skipped.jsonl`` cannot be written.
        """
        if not int(metrics["skipped"]):
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        finite = math.isfinite(loss) and math.isfinite(norm)
        why = "the norm is far above that of the steps before" if finite else "are not both finite"
        if self._mesh.rank == 0:
            row = {"step": step, "loss": loss if math.isfinite(loss) else None, "grad_norm": norm if math.isfinite(norm) else None}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | {"in_a_row": self.in_a_row, "ranks": self._documents(step - 1)}) + "\n")
        return (
            f"step {step} skipped: loss {loss:g} and gradient norm {norm:g}{': ' if finite else ' '}{why}; nothing was changed, "
            f"skipped so far: {total}; its documents: {self._path}"
        )

    def _documents(self, index: int) -> list[dict[str, object]]:
        known = self._opened.documents
        if known is None:
            return []
        return [{"rank": rank, "documents": known(index, rank, self._parts)} for rank in range(self._parts)]

    def check(self, step: int, saved: int | None) -> None:
        """Raise `RunFailed` if too many steps in a row were skipped.

        Args:
            step: the number of steps done.
            saved: the last step whose state is saved.
        """
        if not self._limit or self.in_a_row < self._limit:
            return
        first = step - self.in_a_row + 1
        raise self._failed(
            f"{self.in_a_row} steps in a row were skipped, {first} to {step}: loss or gradient norm was not finite, or far above what it "
            f"had been. {_kept(saved)}. {self._path} names their documents; xtf data preview FILE --document N shows one. If they are "
            "sound, the model is not: begin anew from an earlier state or with a lower --lr. --resume alone makes the same steps again; "
            "with --stop-after-skips 0 it goes on past them"
        )

    def check_sound(self, params: Tree, step: int, saved: int | None) -> None:
        """Raise `RunFailed` on all ranks if a parameter of some rank is not finite; to be called before they are saved."""
        if not agree(self._mesh, int(not all_finite(params))):
            return
        raise self._failed(
            f"parameters are not finite after step {step}, so they are not saved. {_kept(saved)}. Begin anew from an earlier state or "
            "with a lower --lr"
        )

    def _failed(self, message: str) -> RunFailed:
        return RunFailed(message if self._mesh.rank == 0 else "")


def _kept(saved: int | None) -> str:
    return "No state was saved" if saved is None else f"The newest saved state is that of step {saved}"


def all_finite(params: Tree) -> bool:
    """Whether every number of every floating point leaf is finite; one wait for the device.

    Example:
        >>> all_finite({"w": torch.ones(2), "b": None}), all_finite({"w": torch.tensor([1.0, float("nan")])})
        (True, False)
    """
    finite: list[Tensor] = []
    for leaf in tree.leaves(params):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            low, high = torch.aminmax(leaf)  # a NaN is both; no tensor of the leaf's size is made
            finite.append(low.isfinite() & high.isfinite())
    return not finite or bool(torch.stack(finite).all())
