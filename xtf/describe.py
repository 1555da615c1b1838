"""A readable account of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from xtf.stage import Stage

if TYPE_CHECKING:
    from xtf.step import TrainStep


def describe(step: TrainStep) -> str:
    """A readable account of the step: transforms, and what each seam now is."""
    total, active = step.model.param_count()
    kept = sum(torch.Size(p.shape()).numel() for p in step.placements.values())
    kinds = [node.kind if isinstance(node, Stage) else "exchange" for node in step.program]
    precision = ", ".join(
        f"{f.name} {getattr(step.precision, f.name)}" for f in dataclasses.fields(step.precision) if getattr(step.precision, f.name)
    )
    rows = [
        ("model", f"{step.model.family}, {total:,} parameters, {active:,} active per token"),
        ("transforms", " · ".join(reversed(step.stack)) or "none"),
        ("tokens over", ", ".join(f"{a.name} ({a.size})" for a in step.token_axes) or "one rank"),
        ("parameters", f"{kept:,} on this rank" + "".join(f", {name} over {axis.name}" for name, axis in step.owned.items())),
        ("precision", precision or str(next(iter(step.specs.values())).dtype)),
        ("program", f"{len(kinds)} stages: {fold(kinds)}" + (f"; in {step.parts} parts that take turns" if step.parts > 1 else "")),
        (
            "transfers",
            fold([name for name in ("gather", "reduce", "store", "fetch") for n in step.program if getattr(n, name, None)]) or "none",
        ),
        (
            "backend",
            step.compilation.backend
            + (", donating" if step.compilation.donate else "")
            + (", deterministic" if step.compilation.deterministic else ""),
        ),
    ]
    return "TrainStep\n" + "\n".join(f"  {name:<12}{text}" for name, text in rows)


def fold(names: Sequence[str]) -> str:
    """A sequence of names with its repetitions counted.

    Example:
        >>> fold(["embed", "attention", "mlp", "attention", "mlp", "loss"])
        'embed, 2 × (attention, mlp), loss'
    """
    out: list[str] = []
    at = 0
    while at < len(names):
        best_width, best_count = 1, 1
        for width in range(1, (len(names) - at) // 2 + 1):
            unit, count = names[at : at + width], 1
            while list(names[at + count * width : at + (count + 1) * width]) == list(unit):
                count += 1
            if count > 1 and width * count > best_width * best_count:
                best_width, best_count = width, count
        unit = ", ".join(names[at : at + best_width])
        out.append(unit if best_count == 1 else f"{best_count} × ({unit})" if best_width > 1 else f"{best_count} × {unit}")
        at += best_width * best_count
    return ", ".join(out)
