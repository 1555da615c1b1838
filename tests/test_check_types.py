"""The checker of value types: no alarm on anything that is right, and each way to forget a sum is caught where it is first used."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import laws
from tests.data.test_balance import documents
from xtf import testing
from xtf.batch import normalizer as one_over
from xtf.check_types import check_types
from xtf.collectives import Axis
from xtf.placement import reduce_transfer
from xtf.stage import Exchange, Program, Stage, Transfer
from xtf.step import TrainStep, compose
from xtf.step_loss import StepLoss
from xtf.transforms import accumulate, chunk_loss, context_parallel, expert_parallel, remat, shard, swap_activations
from xtf.value_types import Operation, ValueTypeError

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from new_layout import tensor_parallel
