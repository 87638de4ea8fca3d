"""How parameters of position begin: a normal or zeros, or scalar tables that favour near patches.

The latter are sums over the axes, so that separable tables hold them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn


def fill(parameter: Tensor, std: float) -> None:
    """Fill with a truncated normal, or with zeros for a standard deviation of 0."""
    if std:
        trunc_normal_(parameter, std=std)
    else:
        nn.init.zeros_(parameter)


def alibi(dh: Tensor, dw: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """ALiBi on two axes: ``-m (|Δh| + |Δw|)`` with ``m = 2^(-8 n / H)`` for head n = 1 .. H.

    Press et al., arXiv 2108.12409; there in one dimension, with slopes that are not trained.

    Args:
        dh: Row offsets, (rows,).
        dw: Column offsets, (columns,).
        heads: H.

    Returns:
        (H, rows) and (H, columns), float64.
    """
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64, device=dh.device) / heads)
    return -slopes[:, None] * dh.abs(), -slopes[:, None] * dw.abs()


def convit(dh: Tensor, dw: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Heads that begin as a convolution: ``-|Δ - c|^2``, with a centre c of its own for every head.

    The centres are the places of a kernel of k x k patches, ``k = floor(sqrt(H))``, row by row: 2 x 2 at ±1/2 for four
    heads. Heads beyond k^2 look at the patch itself, c = 0. d'Ascoli et al., arXiv 2103.10697, at locality strength 1;
    there the softmax of position is mixed with that of content by a gate, here they are summed before one softmax.

    Args and returns as :func:`alibi`.
    """
    side = math.isqrt(heads)
    n = torch.arange(heads, device=dh.device)
    inside = n < side * side
    rows, cols = (
        -((delta.double() - torch.where(inside, place - (side - 1) / 2, 0.0)[:, None]) ** 2)
        for delta, place in ((dh, n // side), (dw, n % side))
    )
    return rows, cols


LOCAL: dict[str, Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]] = {"alibi": alibi, "convit": convit}
"""Initial tables by name."""
