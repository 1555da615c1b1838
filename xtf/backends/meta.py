"""Tensors without values. They stand for those of a CPU, but for the ops: the reference shows how a step is computed."""

from __future__ import annotations

import dataclasses

from xtf.backends import cpu
from xtf.ops.reference import REFERENCE

BACKEND = dataclasses.replace(cpu.BACKEND, device="meta", ops=REFERENCE)
