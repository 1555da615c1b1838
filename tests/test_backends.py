"""The registry of backends, and training on a device that torch knows nothing of but its name."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import xtf
from xtf import backends
from xtf.backends import Backend, backend_of, register
from xtf.ops import Ops
from xtf.ops.cpu import CPU
from xtf.ops.cuda import CUDA
from xtf.ops.reference import REFERENCE, attention, grouped_mm

ROOT = Path(__file__).parent.parent


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_REGISTERED", {})


def test_what_is_shipped() -> None:
    assert backend_of(torch.device("cpu")).ops is CPU and backend_of("cuda:1").ops is CUDA
    assert backend_of(torch.device("meta")).ops is REFERENCE
    assert [backend_of(kind).collectives for kind in ("cpu", "cuda", "npu")] == ["gloo", "nccl", "hccl"]
    assert [backend_of(kind).device for kind in ("cpu", "cuda", "npu", "meta")] == ["cpu", "cuda", "npu", "meta"]
    assert backend_of("cpu") is backend_of(torch.device("cpu", 0))


def test_an_unknown_device_runs_plain_operations() -> None:
    unknown = backend_of(torch.device("xpu", 2))
    assert unknown == Backend("xpu") and unknown.ops is REFERENCE and not (unknown.streams or unknown.pinned or unknown.fused_adamw)
    assert unknown.collectives is unknown.partial is unknown.memory is None and unknown.name(torch.device("meta")) == "meta"


def test_modules_are_imported_only_where_used() -> None:
    code = "import sys, xtf; assert not any(f'xtf.{m}' in sys.modules for m in ('backends.cuda', 'ops.cuda', 'backends.npu', 'ops.npu'))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=_environment())


def test_ones_own_ops_replace_those_of_a_device(registry: None) -> None:
    seen = list[str]()

    def counted(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **rest: Any) -> Tensor:
        seen.append("attention")
        return attention(q, k, v, cu_seqlens, **rest)

    register(dataclasses.replace(backend_of("cpu"), ops=Ops("mine", counted, grouped_mm)))
    model = xtf.models.preset("tiny-moe")
    step, ids = xtf.train_step(model, xtf.optim.adamw(lr=1e-3)), torch.arange(12)[None]
    batch = {"input_ids": ids, "labels": ids}
    params = model.init(0)
    loss = step.loss(params, batch)
    assert seen and torch.allclose(loss, model.loss(params, batch))


def test_inductor_gets_the_options_of_the_device(registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[Any]()

    def compiled(fn: Any, **options: Any) -> Any:
        given.append((options["backend"], options["options"]))
        return fn

    monkeypatch.setattr(torch, "compile", compiled)
    step, ids = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3)), torch.arange(12)[None]
    params = step.init(0).params
    for backend in ("inductor", "aot_eager"):
        register(dataclasses.replace(backend_of("cpu"), inductor={"max_autotune": True, "why": backend}))
        xtf.compile(step, backend=backend).value_and_grad(params, {"input_ids": ids, "labels": ids})
    assert ("inductor", {"max_autotune": True, "why": "inductor"}) in given and ("aot_eager", None) in given
    assert all(options is None for backend, options in given if backend != "inductor")


@pytest.mark.parametrize("kind", ["", "cuda:0", "a device", torch.device("cpu")])
def test_a_device_is_a_kind(kind: Any) -> None:
    with pytest.raises(ValueError, match="expected a kind of device without a number"):
        Backend(kind)


def test_bad_records_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected xtf\.ops\.Ops"):
        Backend("cuda", ops=attention)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="expected a Backend"):
        register("cuda")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("kind", "kernels"), [("npu", ["attention", "attention_grad", "grouped_matmul 0", "grouped_matmul 2"]), ("stand_in", [])]
)
def test_training_on_a_stand_in(kind: str, kernels: list[str]) -> None:
    """PrivateUse1 called npu, with a stand-in for torch_npu; and as a device that has nothing but torch's operations."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stand_in", kind], capture_output=True, text=True, cwd=ROOT, env=_environment(), timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"trained {kernels}\n"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
