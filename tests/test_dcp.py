"""torch.distributed.checkpoint reads a training checkpoint of xtf, whatever number of ranks wrote it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from tests import laws
from tests.test_training_checkpoint import of_kinds, spec
from tests.testing_state import bits_of, run
from xtf import optim, testing, tree
from xtf.checkpoint import save_state
from xtf.checkpoint.training_index import PARAMS, read_index
from xtf.mesh import Mesh, simulate, split_batch
from xtf.step import compose, train_step
from xtf.transforms import expert_parallel, shard


def saved(mesh: Mesh | None, model: str, path: Path) -> dict[str, Tensor]:
    """Train a step and save; the whole parameters, by their names in the checkpoint."""
    parts: list[Any] = []
    if mesh is not None:
        parts = [shard(*(mesh[name] for name in mesh))] + ([expert_parallel(mesh["expert"])] if "expert" in mesh.sizes else [])
    step = compose(*parts)(train_step(laws.model(model), testing.default_optimizer()))
    batch = testing.random_batch(61)
    state, _ = step(step.init(0), batch if mesh is None else split_batch(batch, mesh))
    save_state(step, state, path)
    return {PARAMS + name: leaf for name, leaf in tree.items(step.full(state.params)).items()}


LAYOUTS = [{}, {"data": 2}, {"data": 4}, {"expert": 2}, {"data": 2, "expert": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_is_read(tmp_path: Path, layout: Mapping[str, int]) -> None:
    params = run(layout, saved, "qwen3_moe", tmp_path / "a")[0]
    check_read(tmp_path / "a", params)


def test_leaves_of_which_some_ranks_have_nothing(tmp_path: Path) -> None:
    def save(mesh: Mesh) -> dict[str, Tensor]:
        step = of_kinds(mesh, optim.adamw(lr=0.1), {"w": spec(3, 4), "b": spec(2), "wide": spec(9, 2, dtype=torch.bfloat16)})
        state = step.init(0)
        save_state(step, state, tmp_path / "a")
        return {PARAMS + name: leaf for name, leaf in tree.items(step.full(state.params)).items()}

    params = simulate(save, data=4, copies=1)[0]
    held = list[set[str]]()
    for file in sorted((tmp_path / "a").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            held.append(set(opened.keys()))
    assert sorted("params.b" in names for names in held) == [False, False, True, True]
    check_read(tmp_path / "a", params)


def check_read(path: Path, params: Mapping[str, Tensor]) -> None:
    index = read_index(path)
    wanted = {name: torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype)) for name, leaf in index.leaves.items()}
    index.read({name: ([(0, n) for n in value.shape], value) for name, value in wanted.items()})
    assert all(torch.equal(wanted[name], value) for name, value in params.items())
    assert len(wanted) > 2 * len(params) and any(value.dim() == 0 for value in wanted.values())
    found = {name: (value.bool().logical_not() if value.dtype == torch.bool else value + 1) for name, value in wanted.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert bits_of(found) == bits_of(wanted)
