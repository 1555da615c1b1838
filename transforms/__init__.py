"""Transforms: functions from a `xtf.TrainStep` to a `xtf.TrainStep`, one file each. `xtf.compose` puts them together."""

from xtf.transforms.accumulate import accumulate
from xtf.transforms.balance_batch import balance_batch
from xtf.transforms.chunk_loss import chunk_loss
from xtf.transforms.context_parallel import context_parallel
from xtf.transforms.expert_parallel import expert_parallel
from xtf.transforms.float8 import float8
from xtf.transforms.precision import precision
from xtf.transforms.remat import remat
from xtf.transforms.shard import shard
from xtf.transforms.swap_activations import swap_activations
from xtf.transforms.swap_optimizer import swap_optimizer

__all__ = [
    "accumulate",
    "balance_batch",
    "chunk_loss",
    "context_parallel",
    "expert_parallel",
    "float8",
    "precision",
    "remat",
    "shard",
    "swap_activations",
    "swap_optimizer",
]
