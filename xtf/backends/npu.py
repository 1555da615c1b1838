"""Ascend NPUs, through ``torch_npu``. **Never run on hardware**: written from its documentation, see `xtf.ops.npu`.

``torch_npu`` brings inductor's lowering for NPUs, the collectives (HCCL) and what ``torch.accelerator`` asks a device for. Its own fused
AdamW has another signature than torch's kernel, so the update runs as plain operations, and so does attention over a part of the keys.
"""

from __future__ import annotations

from xtf.backends import DEVICE_MEMORY, Backend
from xtf.ops.npu import NPU

BACKEND = Backend("npu", ops=NPU, collectives="hccl", pinned=True, streams=True, memory=DEVICE_MEMORY)
