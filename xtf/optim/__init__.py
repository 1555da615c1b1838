"""Optimizers: pure functions over trees, in place where the engine donates their memory.

`adamw`, `sgd`, `muon` and `muon_adamw` are ready to use; `chain` and `partition` make others of the blocks. Learning rates are
numbers or schedules.
"""

from xtf.optim.adamw import adamw
from xtf.optim.blocks import (
    AdamKernel,
    AdamState,
    ClipState,
    ScheduleState,
    adam_kernel,
    add_decayed_weights,
    clip_by_global_norm,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_schedule,
)
from xtf.optim.core import JudgeFn, Optimizer, advance, apply_updates, chain, partition
from xtf.optim.leaves import Mask, no_decay_1d
from xtf.optim.muon import MuonState, hidden_matrix, muon, muon_adamw, orthogonalize
from xtf.optim.placement import UNPLACED, Placement, Unplaced, vector_norm
from xtf.optim.schedules import Schedule, constant, warmup_constant, warmup_cosine, warmup_linear
from xtf.optim.sgd import SgdState, sgd
from xtf.optim.spikes import SpikeState, skip_spikes

__all__ = [
    "UNPLACED",
    "AdamKernel",
    "AdamState",
    "ClipState",
    "JudgeFn",
    "Mask",
    "MuonState",
    "Optimizer",
    "Placement",
    "Schedule",
    "ScheduleState",
    "SgdState",
    "SpikeState",
    "Unplaced",
    "adam_kernel",
    "adamw",
    "add_decayed_weights",
    "advance",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "hidden_matrix",
    "muon",
    "muon_adamw",
    "no_decay_1d",
    "orthogonalize",
    "partition",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "sgd",
    "skip_spikes",
    "vector_norm",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
]
