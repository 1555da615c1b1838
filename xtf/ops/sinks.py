"""Attention sinks for kernels that know none: a learned score per head that joins the softmax and brings no value.

Attention with a sink s is attention without it, times exp(lse) / (exp(lse) + exp(s)), where lse is the logarithm of the softmax's
sum (Xiao et al. 2023, "Efficient streaming language models with attention sinks"; learned per head: gpt-oss, OpenAI 2025). A flash
backward makes the weights anew from lse and needs of the output only its product with the output's gradient: given the joined lse
and the scaled output, it computes the gradients of attention with the sink. No score is computed twice, and no buffer is wider
than the output.

Dims: T tokens, Dv value head size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def join(
    out: Float[Tensor, "T heads Dv"], logsumexp: Float[Tensor, "T heads"], sinks: Float[Tensor, " heads"]
) -> tuple[Float[Tensor, "T heads Dv"], Float[Tensor, "T heads"]]:
    """The output, and the logarithm of the softmax's sum, with sinks, from those without.

    Args:
        out: (T, heads, value head size).
        logsumexp: (T, heads), at least float32.
        sinks: (heads,), any floating dtype.

    Returns:
        Both in the dtypes in which they came.

    Example:
        >>> out, lse = join(torch.ones(1, 1, 1), torch.zeros(1, 1), torch.zeros(1))  # a sink as strong as all tokens together
        >>> out.item(), round(lse.exp().item(), 6)
        (0.5, 2.0)
    """
    score = sinks.to(logsumexp.dtype)
    kept = torch.sigmoid(logsumexp - score).unsqueeze(-1)
    return (out.to(logsumexp.dtype) * kept).to(out.dtype), torch.logaddexp(logsumexp, score.expand_as(logsumexp))


def gradient(
    dout: Float[Tensor, "T heads Dv"],
    out: Float[Tensor, "T heads Dv"],
    logsumexp: Float[Tensor, "T heads"],
    sinks: Float[Tensor, " heads"],
) -> Float[Tensor, " heads"]:
    """The gradient of the sinks, from what `join` returned.

    Args:
        dout: (T, heads, value head size), the gradient of the output.
        out: (T, heads, value head size), with sinks.
        logsumexp: (T, heads), with sinks.
        sinks: (heads,).

    Returns:
        (heads,), in the dtype of ``sinks``.
    """
    dtype = logsumexp.dtype
    weights = (sinks.to(dtype) - logsumexp).exp()  # what the sink takes of each token's softmax; its value is 0
    return -(weights * (dout.to(dtype) * out.to(dtype)).sum(-1)).sum(0).to(sinks.dtype)
