"""What was seen, as a table, as JSON, and as a picture."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from xtf.bench.contenders import Entry
from xtf.bench.rounds import Result, Results
from xtf.run.figure import BLUE, INK, LINE, ORANGE, new_figure, style, write_png


def table(found: Results, against: Result | None = None) -> Table:
    """A row for each contender, and one for the floor; below it, what the columns mean.

    Args:
        found: what was seen.
        against: whose speed is 1; by default that of the fastest other library, or the first.
    """
    one = reference(found) if against is None else against
    rows = Table(box=None, padding=(0, 1), pad_edge=False)
    rows.add_column("", no_wrap=True)
    for name in ("tokens/s", "±", "ratio", "MFU", "-upd.", "ms", "GB", "first, s"):
        rows.add_column(name, justify="right", no_wrap=True)
    for result in found.results:
        rows.add_row(
            result.entry.name,
            f"{found.tokens_per_second(result):,.0f}",
            f"{100 * result.spread:.0f} %",
            f"{found.times_as_fast(result, one):.2f}",
            f"{100 * found.mfu(result):.0f} %",
            f"{100 * found.mfu(result, update=False):.0f} %",
            f"{1e3 * result.median:,.1f}",
            f"{result.peak_bytes / 1e9:.2f}",
            f"{result.first_seconds:.1f}",
        )
    tokens = found.workload.tokens
    rows.add_row(
        "floor", f"{tokens / found.floor:,.0f}", "", f"{one.median / found.floor:.2f}",
        f"{100 * found.flops / found.floor / found.machine.flops:.0f} %", "100 %", f"{1e3 * found.floor:,.1f}",
    )  # fmt: skip
    rows.caption = (
        f"ratio: times as fast as {one.entry.name}, side by side. MFU: of the FLOPs of matrix products above; -upd.: without the part "
        "after the gradients. GB: the most memory of the process, libraries and all. first: with compilation. floor: all FLOPs at that "
        "rate, and the update's bytes at that of memory."
    )
    rows.caption_justify = "left"
    return rows


def reference(found: Results) -> Result:
    """The fastest contender of another library; without one, the first."""
    others = [result for result in found.results if result.entry.library != "xtf"]
    return min(others, key=lambda result: result.median) if others else found.results[0]


def title(found: Results) -> str:
    """What was computed, on what."""
    work, machine = found.workload, found.machine
    kind = work.config.get("model_type", "model")
    experts = next((work.config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if work.config.get(name)), None)
    sparse = f", {experts} experts top-{work.config.get('num_experts_per_tok')}" if experts else ""
    documents = "1 document" if len(work.lengths) == 1 else f"{len(work.lengths)} documents"
    return (
        f"{kind}, hidden {work.config['hidden_size']}, {work.config['num_hidden_layers']} layers{sparse}, vocabulary "
        f"{work.config['vocab_size']}; {work.tokens:,} tokens in {documents}, {work.dtype}, AdamW\n"
        f"{machine.name}: {machine.flops / 1e9:,.0f} GFLOP/s of matrix products, {machine.bandwidth / 1e9:,.0f} GB/s of memory"
    )


def as_json(found: Results) -> dict[str, Any]:
    """Everything, as JSON values."""
    one = reference(found)
    return {
        "workload": found.workload.json() | {"weights": None},
        "machine": found.machine._asdict() | {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "flops": found.flops,
        "update_bytes": found.update_bytes,
        "floor_seconds": found.floor,
        "reference": one.entry.name,
        "results": [
            {
                "name": result.entry.name,
                "library": result.entry.library,
                "backend": result.entry.backend,
                "transforms": result.entry.transforms,
                "tokens_per_second": found.tokens_per_second(result),
                "spread": result.spread,
                "times_as_fast": found.times_as_fast(result, one),
                "mfu": found.mfu(result),
                "mfu_without_update": found.mfu(result, update=False),
                "seconds": list(result.seconds),
                "update_seconds": list(result.update_seconds),
                "first_seconds": result.first_seconds,
                "first_loss": result.loss,
                "peak_bytes": result.peak_bytes,
                "bytes_before_first_step": result.open_bytes,
            }
            for result in found.results
        ],
    }


def draw(found: Results, path: str | Path) -> Path:
    """Bars of tokens per second, with the range of all rounds, and the floor as a line."""
    figure = new_figure(8.0, 1.4 + 0.5 * len(found.results))
    axes = figure.subplots()
    style(axes)
    tokens = found.workload.tokens
    names = [result.entry.name for result in found.results]
    medians = [found.tokens_per_second(result) for result in found.results]
    ends = [(tokens / max(result.seconds), tokens / min(result.seconds)) for result in found.results]
    errors = [[m - low for m, (low, _) in zip(medians, ends, strict=True)], [high - m for m, (_, high) in zip(medians, ends, strict=True)]]
    colors = [BLUE if result.entry.library == "xtf" else ORANGE for result in found.results]
    axes.barh(names, medians, xerr=errors, color=colors, height=0.6, error_kw={"ecolor": INK, "elinewidth": 0.8, "capsize": 2})
    axes.axvline(tokens / found.floor, color=LINE, linewidth=1.0, linestyle="--")
    axes.text(tokens / found.floor, 0.97, "floor ", ha="right", va="top", color=LINE, fontsize=9, transform=axes.get_xaxis_transform())
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * max(tokens / found.floor, *(high for _, high in ends)))
    axes.set_xlabel("tokens per second: median, least and most of all rounds", color=INK, fontsize=9)
    axes.grid(axis="y", visible=False)
    axes.set_title(title(found).partition("\n")[0].replace("; ", ";\n"), loc="left", color=INK, fontsize=9)
    return write_png(figure, path)


__all__ = ["Entry", "as_json", "draw", "reference", "table", "title"]
