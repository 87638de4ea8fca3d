"""Initial values of scalar tables that favour near patches. Both are sums over the axes, so that separable tables hold
them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def alibi(dh: Tensor, dw: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """ALiBi on two axes: ``-m (|Δh| + |Δw|)`` with ``m = 2^(-8 n / H)`` for head n = 1 .. H.

    Press et al., arXiv 2108.12409; there in one dimension, with slopes that are not trained.

    Args:
        dh: Row offsets, (rows,).
        dw: Column offsets, (columns,).
        heads: H.

    Returns:
        (H, rows) and (H, columns).
    """
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    return -slopes[:, None] * dh.abs(), -slopes[:, None] * dw.abs()


def gaussian(dh: Tensor, dw: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """A window of its own for every head, as of a convolution: ``-|Δ - c|^2``, after the softmax a Gaussian around c.

    The centres c are those of a square kernel of k x k patches with k^2 >= H, row by row: 2 x 2 at ±1/2 for four heads.
    ConViT's initial heads, d'Ascoli et al., arXiv 2103.10697, with locality strength 1.

    Args and returns as :func:`alibi`.
    """
    side = math.isqrt(heads - 1) + 1
    n = torch.arange(heads)
    rows, cols = (
        -((delta.double() - (place - (side - 1) / 2)[:, None]) ** 2)
        for delta, place in ((dh, n // side), (dw, n % side))
    )
    return rows, cols


WINDOWS: dict[str, Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]] = {"alibi": alibi, "gaussian": gaussian}
"""Initial windows by name."""
