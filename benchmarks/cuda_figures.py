"""Every figure that needs a CUDA device, in one go of under 8 minutes: is each op right, how fast is the device, how fast is a step.

    python benchmarks/cuda_figures.py --json figures.json
    python benchmarks/cuda_figures.py --device cpu --tiny --together      # tries the script itself, its figures mean nothing

Each part runs in a process of its own with a time limit, so one that fails, hangs or runs out of memory loses itself only; what there
is no time for is said to be left out. Parts:

* ``ops``: attention (packed, grouped, windows, sinks), partial attention, grouped products, float8 products and the fused AdamW update,
  with their gradients, against the plain reference in float32;
* ``machine``: FLOPs of matrix products and bytes of memory, per second;
* ``step``: layers of Qwen3-30B-A3B's shape, as many as fit, in bfloat16 at 4k and 64k packed tokens: tokens/s, TFLOPS, model FLOPs
  utilisation, peak memory and that ÷ the rehearsed one, with each transform on and off, eager and compiled;
* ``peer``: transformers, and torchtitan where it is installed, on the same shape.

**Never run on hardware**: on a CPU CI runs it with ``--tiny``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import xtf
from xtf import tree
from xtf.backends import backend_of
from xtf.bench.clock import peak_bytes, reset_peak, seconds_now
from xtf.bench.contenders import Entry, open_contender
from xtf.bench.machine import measure_machine
from xtf.bench.workload import Workload, document_lengths, shape_config
from xtf.memory import rehearse
from xtf.ops import partial, reference
from xtf.ops.float8 import Recipe, float8_ops
from xtf.optim import advance
from xtf.run.flops import peak_flops, step_flops
from xtf.run.standard import parse_transforms
from xtf.state import State
from xtf.step import TrainStep
from xtf.zigzag import Block

Row = dict[str, Any]
Given = argparse.Namespace

SECONDS = 460
"""Of all parts together."""

LIMIT = 100
"""Seconds of one part."""

VARIANTS = (
    ("inductor", "chunk_loss"),
    ("inductor", "remat=nothing,chunk_loss"),
    ("inductor", "chunk_loss,float8"),
    ("inductor", "chunk_loss,swap_activations"),
    ("eager", "chunk_loss"),
    ("inductor", ""),
)
"""(backend, transforms), what says most first. Without ``remat=nothing`` stages are computed again in backward."""

WITHIN = {torch.bfloat16: 2.0**-5, torch.float32: 1e-4}
"""How far from the reference an op may be, relative to its largest value."""


# The parts ------------------------------------------------------------------------------------------------------------------------


def ops_part(given: Given) -> Iterator[Row]:
    """Each op and its gradients against the reference."""
    for name, check in checks(torch.device(given.device), given.tiny).items():
        yield guarded(name, check)


def machine_part(given: Given) -> Iterator[Row]:
    """The device's rates; float8 products count the FLOPs that they stand for."""
    device, size = torch.device(given.device), 256 if given.tiny else 8192
    dtype = torch.float32 if given.tiny else torch.bfloat16
    rates = measure_machine(given.device, str(dtype).removeprefix("torch."))
    yield {"name": "device", "device": rates.name, "peak_tflops": rates.flops / 1e12, "bandwidth_gb": rates.bandwidth / 1e9}
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    products = {"matrix product": lambda: a @ b.T, "float8 product": lambda: float8_ops(backend_of(device).ops, Recipe()).linear(a, b)}
    for name, run in products.items():
        yield guarded(name, lambda run=run: {"tflops": 2 * size**3 / repeated(run, given) / 1e12})


def step_part(given: Given) -> Iterator[Row]:
    """One variant of the step on one number of tokens."""
    step = make_step(given, given.layers)
    device, lengths = given.device, document_lengths(str(given.document), given.tokens, 0)
    batch = Workload({"vocab_size": step.model.vocab}, lengths, device=device).batch()
    state, began = initial(step), seconds_now(device)
    state, metrics = step(state, batch)
    first = seconds_now(device) - began
    reset_peak(device)
    times: list[float] = []
    for _ in range(given.rounds):
        began = seconds_now(device)
        state, metrics = step(state, batch)
        times.append(seconds_now(device) - began)
    found = speeds(given, statistics.median(times)) | {"first_seconds": first, "loss": float(metrics["loss"])}
    rehearsed = rehearse(make_step(given, given.layers), given.tokens).peak.peak
    yield found | {"rehearsed_gb": rehearsed / 1e9, "measured_by_rehearsed": peak_bytes(device) / rehearsed}


def peer_part(given: Given) -> Iterator[Row]:
    """Another library on the same shape, with initial values of its own."""
    if importlib.util.find_spec(given.library) is None:
        yield {"left_out": f"{given.library} is not installed"}
        return
    run = transformers_step(given) if given.library == "transformers" else titan_step(given)
    run()
    reset_peak(given.device)
    yield speeds(given, repeated(run, given))


PARTS: dict[str, Callable[[Given], Iterator[Row]]] = {"ops": ops_part, "machine": machine_part, "step": step_part, "peer": peer_part}


# Ops ------------------------------------------------------------------------------------------------------------------------------


def checks(device: torch.device, tiny: bool) -> dict[str, Callable[[], Row]]:
    """What is compared, by name."""
    ops, dtype = backend_of(device).ops, torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, size, lengths = 4, 2, 64, (37, 1, 90) if tiny else (700, 1, 347, 1000)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    tokens = sum(lengths)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, k, v, sinks = random(tokens, heads, size), random(tokens, kv_heads, size), random(tokens, kv_heads, size), random(heads)

    def attention(window: int | None, with_sinks: bool) -> Row:
        def run(op: Any) -> Callable[..., Tensor]:
            return lambda q, k, v, *s: op(q, k, v, bounds, scale=size**-0.5, window=window, sinks=s[0] if s else None)

        return compared(run(ops.attention), run(reference.attention), q, k, v, *([sinks] if with_sinks else []))

    def part() -> Row:
        """The first document, its second half once by itself and once against the first."""
        whole, half = lengths[0], lengths[0] // 2
        first, second = slice(0, half), slice(half, whole)
        queries, keys, values = q[:whole], k[:whole], v[:whole]
        seen = reference.attention(queries.float(), keys.float(), values.float(), bounds[:2], scale=size**-0.5)
        out, logsumexp = partial.blank(queries, values)
        for own, blocks in (
            (first, [Block(first, first, 0), Block(second, first, None)]),
            (second, [Block(second, slice(0, whole - half), 0)]),
        ):
            partial.attend(out, logsumexp, queries, keys[own], values[own], blocks, scale=size**-0.5)
        return {"error": (error := relative(out, seen)), "right": error < WITHIN[dtype]}

    ends = torch.tensor([0, tokens // 3, tokens // 3, tokens], device=device, dtype=torch.int32)
    x, w = random(tokens, 256), random(4, 384, 256) / 16
    emulated = float8_ops(reference.REFERENCE, Recipe())

    def adamw() -> Row:
        optimizer = xtf.optim.adamw(lr=1e-2, weight_decay=0.1)
        params, grads = {"w": random(300, 40)}, {"w": random(300, 40)}
        got, _ = advance(optimizer, grads, optimizer.init(params), params)
        wide = [{"w": one["w"].float()} for one in (params, grads)]
        want = xtf.optim.apply_updates(wide[0], optimizer.update(wide[1], optimizer.init(wide[0]), wide[0])[0])
        return {"error": (error := relative(got["w"], want["w"])), "right": error < WITHIN[dtype]}

    return {
        "attention": lambda: attention(None, False),
        "attention, window": lambda: attention(33, False),
        "attention, sinks": lambda: attention(None, True),
        "attention, window and sinks": lambda: attention(33, True),
        "partial attention": part,
        "grouped product": lambda: compared(lambda x, w: ops.grouped_mm(x, w, ends), lambda x, w: reference.grouped_mm(x, w, ends), x, w),
        "float8 product": lambda: compared(float8_ops(ops, Recipe()).linear, emulated.linear, x, w[0]),
        "float8 grouped product": lambda: compared(
            lambda x, w: float8_ops(ops, Recipe()).grouped_mm(x, w, ends), lambda x, w: emulated.grouped_mm(x, w, ends), x, w
        ),
        "fused AdamW": adamw,
    }


def compared(op: Callable[..., Tensor], plain: Callable[..., Tensor], *args: Tensor) -> Row:
    """The largest errors of the output and of every gradient."""
    out, back, *_ = torch.func.vjp(op, *args)
    want, want_back, *_ = torch.func.vjp(plain, *(arg.float() for arg in args))
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    errors = [relative(a, b) for a, b in zip((out, *back(cotangent)), (want, *want_back(cotangent.float())), strict=True)]
    return {"error": max(errors), "right": max(errors) < WITHIN[out.dtype]}


def relative(got: Tensor, want: Tensor) -> float:
    """max|Δ| ÷ max|reference|."""
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


# Steps ----------------------------------------------------------------------------------------------------------------------------


def shape(given: Given, layers: int) -> dict[str, Any]:
    """The config: that of the preset with so many layers; small in every size for ``--tiny``."""
    if given.tiny:
        return shape_config("small-moe", {"layers": layers, "hidden": 64, "vocab": 256, "expert_width": 32})
    return shape_config("qwen3-30b-a3b", {"layers": layers})


def make_step(given: Given, layers: int) -> TrainStep:
    """The finished step."""
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    model = xtf.models.from_hf(shape(given, layers), dtype=dtype)
    step = xtf.train_step(model, xtf.optim.adamw(lr=1e-5), device=given.device)
    step = xtf.compose(*parse_transforms(given.transforms, xtf.mesh()))(step)
    return xtf.compile(step, backend=given.backend, donate=True)


def initial(step: TrainStep) -> State:
    """A state with random parameters made on the device, which takes no minutes."""
    device = step.device
    leaves = {
        path: torch.ones(spec.shape, dtype=spec.dtype, device=device)
        if len(spec.shape) == 1
        else torch.empty(spec.shape, dtype=spec.dtype, device=device).normal_(std=0.02)
        for path, spec in step.specs.items()
    }
    return step.state(tree.from_items(step.model.specs, leaves), handed_over=True)


def layers_that_fit(given: Given) -> int:
    """As many as the device holds with 64k tokens by the rehearsal, at most ``--layers``."""
    if given.device == "cpu":
        return min(2, given.layers)
    free = 0.85 * torch.cuda.mem_get_info()[0]
    asked = argparse.Namespace(**{**vars(given), "transforms": "chunk_loss", "backend": "eager"})
    one, two = (rehearse(make_step(asked, n), max(given.sizes)).peak.peak for n in (1, 2))
    return max(1, min(given.layers, int((free - one) // max(1, two - one)) + 1))


def transformers_step(given: Given) -> Callable[[], Any]:
    """A step of transformers' model in its fastest form, its fused AdamW."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(**shape(given, given.layers))
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    with torch.device(given.device):
        options = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm", "dtype": dtype}
        model = transformers.AutoModelForCausalLM.from_config(config, **options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    lengths = document_lengths(str(given.document), given.tokens, 0)
    batch = Workload({"vocab_size": config.vocab_size}, lengths, device=given.device).batch()
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(given.device)

    def run() -> None:
        model(input_ids=batch["input_ids"], labels=batch["labels"], position_ids=positions, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def titan_step(given: Given) -> Callable[[], Any]:
    """A step of torchtitan's model, as ``xtf bench --against torchtitan`` makes it."""
    lengths = document_lengths(str(given.document), given.tokens, 0)
    dtype = "float32" if given.device == "cpu" else "bfloat16"
    workload = Workload(shape(given, given.layers), lengths, dtype=dtype, device=given.device)
    return open_contender(workload, Entry("torchtitan", "torchtitan", "inductor"))


def repeated(run: Callable[[], Any], given: Given) -> float:
    """Seconds of one call, the median of several."""
    run()
    times: list[float] = []
    for _ in range(given.rounds):
        began = seconds_now(given.device)
        run()
        times.append(seconds_now(given.device) - began)
    return statistics.median(times)


def speeds(given: Given, seconds: float) -> Row:
    """What a step's time says."""
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    model = xtf.models.from_hf(shape(given, given.layers), dtype=dtype)
    rate = step_flops(model, document_lengths(str(given.document), given.tokens, 0)) / seconds
    mfu = rate / peak_flops(given.device, dtype)
    return {
        "seconds": seconds,
        "tokens_s": given.tokens / seconds,
        "tflops": rate / 1e12,
        "mfu": mfu,
        "peak_gb": peak_bytes(given.device) / 1e9,
    }


# The run --------------------------------------------------------------------------------------------------------------------------


def guarded(name: str, run: Callable[[], Row]) -> Row:
    """What it found, or how it failed."""
    try:
        return {"name": name} | run()
    except Exception as error:
        return {"name": name, "failed": f"{type(error).__name__}: {str(error)[:300]}", "where": traceback.format_exc()[-800:]}


def one_part(part: str, given: Given) -> list[Row]:
    """All rows of a part; the last says how it failed, if it did."""
    rows: list[Row] = []

    def rest() -> Row:
        rows.extend(PARTS[part](given))
        return {}

    ended = guarded(part, rest)
    return rows + ([ended] if "failed" in ended else [])


def in_process(part: str, given: Given, seconds: float) -> list[Row]:
    """A part in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        asked = json.dumps({"part": part, "out": str(out), "given": {k: v for k, v in vars(given).items() if k != "json"}})
        try:
            ran = subprocess.run([sys.executable, __file__, "--one", asked], timeout=seconds, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return [{"name": part, "failed": f"not done after {seconds:.0f} s"}]
        if out.exists():
            return json.loads(out.read_text(encoding="utf-8"))
        return [{"name": part, "failed": f"died with {ran.returncode}", "where": ran.stderr[-800:]}]


def plan(given: Given) -> list[tuple[str, str, Given]]:
    """(name, part, arguments) of everything that is run, in order."""

    def other(**values: Any) -> Given:
        return argparse.Namespace(**{**vars(given), **values})

    found: list[tuple[str, str, Given]] = [("", "ops", given), ("", "machine", given)]
    for tokens in given.sizes:
        for backend, transforms in VARIANTS[: 2 if given.tiny else None]:
            name = f"xtf {backend} {transforms}".strip() + f", {tokens:,} tokens"
            found.append((name, "step", other(tokens=tokens, backend=backend if not given.tiny else "eager", transforms=transforms)))
        for library in ("transformers", "torchtitan"):
            found.append((f"{library}, {tokens:,} tokens", "peer", other(tokens=tokens, library=library)))
    return found


def text(row: Row) -> str:
    """A row as a line."""
    if "failed" in row or "left_out" in row:
        return f"{row['name']:60} {'FAILED: ' + row['failed'] if 'failed' in row else 'left out: ' + row['left_out']}"
    values = (f"{key} {value:,.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items() if key != "name")
    return f"{row['name']:60} {', '.join(values)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the module says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying the script")
    parser.add_argument("--together", action="store_true", help="all parts in this process")
    parser.add_argument("--layers", type=int, default=12, help="at most")
    parser.add_argument("--document", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all parts together")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        asked = json.loads(given.one)
        rows = one_part(asked["part"], argparse.Namespace(**asked["given"]))
        Path(asked["out"]).write_text(json.dumps(rows), encoding="utf-8")
        return 0
    if given.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --tiny tries the script")
    began = time.monotonic()
    given.sizes = (256,) if given.tiny else (4096, 65_536)
    given.document = min(given.document, max(given.sizes) // 2)
    given.rounds = 1 if given.tiny else given.rounds
    fitting = guarded("layers", lambda: {"layers": layers_that_fit(given)})
    given.layers = fitting.get("layers", 1)
    figures: list[Row] = [fitting]
    print(text(fitting))
    for name, part, own in plan(given):
        left = given.seconds - (time.monotonic() - began)
        if left < 10:
            rows: list[Row] = [{"name": name or part, "left_out": "no time left"}]
        else:
            rows = one_part(part, own) if given.together else in_process(part, own, min(LIMIT, left))
        for row in rows:
            row["name"] = name or row.get("name", part)
            print(text(row), flush=True)
        figures += [row | {"part": part} for row in rows]
        if given.json is not None:
            given.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s; {sum('failed' in row for row in figures)} failed")
    return int(any("failed" in row or row.get("right") is False for row in figures))


if __name__ == "__main__":
    sys.exit(main())
