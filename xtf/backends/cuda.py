"""NVIDIA GPUs. **Never run on hardware.**

Inductor has no options of ours. ``max_autotune`` tries Triton templates against cuBLAS for each product: minutes of compile time for
products that cuBLAS serves well. CUDA graphs need fixed addresses, and stages are handed tensors that the walk made, moved or fetched.
"""

from __future__ import annotations

from xtf.backends import DEVICE_MEMORY, Backend
from xtf.ops import partial_cuda
from xtf.ops.cuda import CUDA

BACKEND = Backend(
    "cuda",
    ops=CUDA,
    partial=partial_cuda.KERNELS,
    collectives="nccl",
    pinned=True,
    streams=True,
    fused_adamw=True,
    memory=DEVICE_MEMORY,
)
