"""Lengths of documents on which planners are measured."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xtf.data import Cost

ATTENTION = Cost.attention()
QWEN3_30B = Cost(linear=18251120640.0, quadratic=1179648.0)
"""`document_cost` of Qwen3-30B-A3B, as `tests/data/test_cost.py` checks."""


def log_normal(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Median 600 tokens, sigma 1, cut at 8192."""
    drawn = 600 * np.exp(np.random.default_rng(seed).standard_normal(count))
    return np.clip(np.rint(drawn), 1, 8192).astype(np.int64)


def pareto(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """A heavy tail, from 100 tokens, cut at 8192."""
    return np.minimum(100 * (1 + np.random.default_rng(seed).pareto(1.2, count)), 8192).astype(np.int64)
