"""``xtf bench``: how fast a training step is here, beside its peers."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console

from xtf.bench import report
from xtf.bench.contenders import LIBRARIES, Entry, check_entries
from xtf.bench.rounds import Results, run_rounds
from xtf.bench.workload import Workload, document_lengths, shape_config
from xtf.collectives.process_group import backend as device_backend
from xtf.files import write_atomically
from xtf.mesh import mesh
from xtf.ops.native.build import library
from xtf.run.data_source import wide_console
from xtf.run.standard import parse_transforms


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Time a training step (forward, backward, AdamW) in several forms and beside other libraries: each in a process of its own, a step
    of each in turn, on the same weights and tokens. Ratios are medians of what two took side by side.

    Examples:
      xtf bench --against transformers
      xtf bench --model medium-moe --tokens 2048 --documents mixed --against transformers
      xtf bench --model DIR --tokens 1024 --transforms chunk_loss remat=nothing,chunk_loss
    """

    model: str = "small-moe"
    """A shape (small-moe, medium-moe), a preset, a checkpoint folder, or a config.json."""
    tokens: int = 512
    """Tokens of a step."""
    documents: str = "one"
    """How tokens are laid into documents: one, mixed (log-normal lengths), or the tokens of each."""
    backend: tuple[str, ...] = ("eager", "inductor")
    """Of xtf; inductor:step compiles the step as one graph, which takes longer with every layer."""
    transforms: tuple[str, ...] = ("remat=nothing,chunk_loss",)
    """Of xtf, one set or several, each as in xtf train --transforms; an empty text for none."""
    against: tuple[str, ...] = ()
    """Other libraries, in each of their forms: transformers, torchtitan, jax. With a colon, one form: transformers:eager."""
    rounds: int = 7
    """Steps of each that are timed."""
    warmup: int = 2
    """Steps of each after its first that are not."""
    dtype: str = "float32"
    """Of parameters and computation."""
    threads: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: one for each processor)")] = None
    """Of a CPU."""
    seed: int = 0
    """Of weights and tokens."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Also write all figures as JSON; - writes them to standard output, and nothing else."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png", help_behavior_hint="")] = None
    """Also draw them."""
    hidden: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Of the shape: hidden size."""
    layers: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Of the shape: layers."""
    heads: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Of the shape: query heads."""
    kv_heads: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Of the shape: key and value heads."""
    head_dim: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Of the shape: size of a head."""
    experts: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Of the shape: experts of a layer."""
    top_k: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Of the shape: experts of a token."""
    expert_width: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Of the shape: inner size of an expert."""
    vocab: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Of the shape: vocabulary."""


_SHAPE = ("hidden", "layers", "heads", "kv_heads", "head_dim", "experts", "top_k", "expert_width", "vocab")


def entries_of(options: BenchOptions) -> list[Entry]:
    """The contenders that options ask for, xtf's first.

    Raises:
        ValueError: for a transform, library or backend that there is not.
    """
    found: list[Entry] = []
    for transforms in options.transforms:
        parse_transforms(transforms, mesh())
        for backend in options.backend:
            said = f" {transforms}" if len(options.transforms) > 1 else ""
            found.append(Entry(f"xtf {backend}{said}", "xtf", backend, transforms))
    for one in options.against:
        library, _, backend = one.partition(":")
        known = LIBRARIES.get(library)
        backends = (backend,) if backend or known is None else known.backends
        found += [Entry(f"{library} {form}", library, form) for form in backends]
    return check_entries(found)


def run(options: BenchOptions, *, console: Console | None = None) -> Results:
    """Time, print, write.

    Raises:
        ValueError: for options that are not possible; before anything runs.
        OSError: if a file cannot be written.
    """
    if options.out is not None and options.out.suffix.lower() != ".png":
        raise ValueError(f"--out {options.out}: expected a file name that ends in .png")
    if not isinstance(getattr(torch, options.dtype, None), torch.dtype):
        raise ValueError(f"--dtype {options.dtype}: expected a dtype of torch, as float32 or bfloat16")
    threads = torch.get_num_threads() if options.threads is None else options.threads
    if threads < 1:
        raise ValueError(f"--threads is {threads}, expected at least 1")
    entries = entries_of(options)
    workload = Workload(
        shape_config(options.model, {name: getattr(options, name) for name in _SHAPE}),
        document_lengths(options.documents, options.tokens, options.seed),
        options.dtype,
        device_backend()[1].type,
        threads,
        options.seed,
        options.model if Path(options.model).is_dir() else None,
    )
    workload.model()  # a config that is not possible fails here
    if workload.device == "cpu":
        library()  # compiled, or said why not, before anything is timed
    errors = Console(stderr=True)
    with errors.status("starting") as status:
        found = run_rounds(workload, entries, rounds=options.rounds, warmup=options.warmup, tell=status.update)
    if options.json is not None and str(options.json) == "-":
        sys.stdout.write(json.dumps(report.as_json(found)) + "\n")
    else:
        if options.json is not None:
            with write_atomically(options.json) as file:
                file.write((json.dumps(report.as_json(found), indent=1) + "\n").encode())
        shown = console or wide_console()
        shown.print(report.title(found) + "\n", markup=False, highlight=False, soft_wrap=True)
        shown.print(report.table(found), highlight=False)
    if options.out is not None:
        report.draw(found, options.out)
    return found
