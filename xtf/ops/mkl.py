"""Many matrix products of different sizes in one call: the batched product of Intel's MKL, where torch is built with it.

torch offers batches of equal sizes only. MKL's ``?gemm_batch`` takes each product with its own sizes and spreads all of them over the
threads, so that small products neither wait for each other nor share a matrix. torch's wheels for x86 carry MKL inside ``libtorch_cpu``;
the entry point with 64-bit sizes (``_64``, MKL's documented suffix) means the same in every build of it. Where it is not found
(`available`), the callers run one product after another.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NAMES = {torch.float32: ("sgemm_batch_64_", ctypes.c_float), torch.float64: ("dgemm_batch_64_", ctypes.c_double)}


class Product(NamedTuple):
    """``out = a @ b`` of matrices whose rows or columns are contiguous. ``out`` is overwritten; its rows are contiguous."""

    a: Tensor
    b: Tensor
    out: Tensor


def available(dtype: torch.dtype) -> bool:
    """Whether products of this dtype can be batched here."""
    return _entry(dtype) is not None


def products(todo: Sequence[Product]) -> None:
    """All products, of one dtype for which there is `available`. None of the outputs may overlap.

    Example:
        >>> a, b, out = torch.ones(2, 3), torch.ones(3, 4), torch.empty(2, 4)
        >>> if available(torch.float32):
        ...     products([Product(a, b, out)])
        ... else:
        ...     _ = torch.mm(a, b, out=out)
        >>> out[0].tolist()
        [3.0, 3.0, 3.0, 3.0]
    """
    found = _entry(todo[0].out.dtype) if todo else None
    if found is None:
        return
    gemm, scalar = found
    n = len(todo)
    sizes, pointers, scalars = ctypes.c_int64 * n, ctypes.c_void_p * n, scalar * n
    # MKL's columns are our rows: the transposed product, with the factors exchanged.
    first, second = [_laid(p.b) for p in todo], [_laid(p.a) for p in todo]
    gemm(
        b"".join(flag for flag, _ in first),
        b"".join(flag for flag, _ in second),
        sizes(*(p.b.shape[1] for p in todo)),
        sizes(*(p.a.shape[0] for p in todo)),
        sizes(*(p.a.shape[1] for p in todo)),
        scalars(*[1.0] * n),
        pointers(*(p.b.data_ptr() for p in todo)),
        sizes(*(lead for _, lead in first)),
        pointers(*(p.a.data_ptr() for p in todo)),
        sizes(*(lead for _, lead in second)),
        scalars(*[0.0] * n),
        pointers(*(p.out.data_ptr() for p in todo)),
        sizes(*(max(1, p.out.stride(0)) for p in todo)),
        ctypes.byref(ctypes.c_int64(n)),
        sizes(*[1] * n),
    )


def _laid(matrix: Tensor) -> tuple[bytes, int]:
    """How MKL is told of a factor: as it is or transposed, and how far its rows, or columns, are apart."""
    rows, columns = matrix.stride()
    if columns == 1 or matrix.shape[1] == 1:
        return b"N", max(1, rows, matrix.shape[1])
    assert rows == 1 or matrix.shape[0] == 1
    return b"T", max(1, columns, matrix.shape[0])


@functools.cache
def _entry(dtype: torch.dtype) -> tuple[Any, Any] | None:
    """MKL's function for a dtype, and the type of its scalars."""
    if dtype not in _NAMES or not torch.backends.mkl.is_available():
        return None
    name, scalar = _NAMES[dtype]
    folder = Path(torch.__file__).parent / "lib"
    for file in sorted(folder.glob("*torch_cpu.*")):
        try:
            gemm = getattr(ctypes.CDLL(str(file)), name)
        except (OSError, AttributeError):
            continue
        gemm.restype = None
        return gemm, scalar
    return None
