"""xtf trains very large sparse mixture-of-experts language models with plain functions and composable transforms."""

from xtf import data, models, optim, testing, transforms, tree
from xtf.allocator import keep_freed_memory
from xtf.checkpoint import CheckpointError, StateSaver, load, load_newest_state, load_params, load_state, save, save_params, save_state
from xtf.compile import compile
from xtf.joint import keep
from xtf.memory import fit_tokens
from xtf.mesh import Mesh, mesh, plan_mesh, simulate, split_batch
from xtf.model import Model
from xtf.record import Record
from xtf.spec import Init, ParamSpec
from xtf.stage import Exchange, Stage, Transfer
from xtf.state import State
from xtf.step import TrainStep, compose, train_step

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Exchange",
    "Init",
    "Mesh",
    "Model",
    "ParamSpec",
    "Record",
    "Stage",
    "State",
    "StateSaver",
    "TrainStep",
    "Transfer",
    "compile",
    "compose",
    "data",
    "fit_tokens",
    "keep",
    "keep_freed_memory",
    "load",
    "load_newest_state",
    "load_params",
    "load_state",
    "mesh",
    "models",
    "optim",
    "plan_mesh",
    "save",
    "save_params",
    "save_state",
    "simulate",
    "split_batch",
    "testing",
    "train_step",
    "transforms",
    "tree",
]
