"""Coordinates on a patch grid, offsets between them, and the distance map from an offset to a table entry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """A full grid of patches, row-major: token ``i = y * cols + x``.

    Attributes:
        rows: Number of patch rows.
        cols: Number of patch columns.
        top: Row coordinate of the first row; keys above the queries have a smaller one.
        left: Column coordinate of the first column.
    """

    rows: int
    cols: int
    top: int = 0
    left: int = 0

    def __len__(self) -> int:
        return self.rows * self.cols

    def row_coords(self, device: torch.device | None = None) -> Tensor:
        """Row coordinate of each patch row, int64, shape (rows,)."""
        return torch.arange(self.top, self.top + self.rows, device=device)

    def col_coords(self, device: torch.device | None = None) -> Tensor:
        """Column coordinate of each patch column, int64, shape (cols,)."""
        return torch.arange(self.left, self.left + self.cols, device=device)

    def coords(self, device: torch.device | None = None) -> Tensor:
        """(row, column) of each patch, int64, shape (rows * cols, 2)."""
        return torch.cartesian_prod(self.row_coords(device), self.col_coords(device))


def offsets(q: Tensor, k: Tensor) -> Tensor:
    """Offset of every query from every key, **query minus key**.

    Args:
        q: Query coordinates along one axis, shape (Lq,).
        k: Key coordinates along the same axis, shape (Lk,).

    Returns:
        Shape (Lq, Lk).
    """
    return q[:, None] - k[None, :]


def clamp_index(offset: Tensor, max_distance: int) -> Tensor:
    """Table entry of an offset: ``clamp(offset, -K, K) + K``, in ``[0, 2K]``.

    Offsets beyond K share the entry of K, as Shaw et al. (arXiv 1803.02155) and Transformer-XL's ``clamp_len`` do.
    """
    return offset.clamp(-max_distance, max_distance) + max_distance
