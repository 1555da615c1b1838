"""Transforms: functions from a `xtf.TrainStep` to a `xtf.TrainStep`, one file each. `xtf.compose` puts them together."""

from xtf.transforms.accumulate import accumulate
from xtf.transforms.balance_batch import balance_batch
from xtf.transforms.chunk_loss import chunk_loss
from xtf.transforms.expert_parallel import expert_parallel
from xtf.transforms.precision import precision
from xtf.transforms.shard import shard
from xtf.transforms.swap_activations import swap_activations

__all__ = ["accumulate", "balance_batch", "chunk_loss", "expert_parallel", "precision", "shard", "swap_activations"]
