"""Reading a relative position table at offsets.

A table is a tuple of tensors, its axes the distance maps of rows and columns:

* separable: ``(rows, columns)``, (H, entries of Δh[, d]) and (H, entries of Δw[, d]), **summed** after the look-up;
* joint: ``(table,)``, (H, entries of Δh, entries of Δw[, d]).

``d`` is absent for scalar tables. With ``heads=1`` one table serves all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrel.grid import AxisDistance, Grid, offsets

Tables = tuple[Tensor, ...]
Axes = tuple[AxisDistance, AxisDistance]


def lookup(tables: Tables, axes: Axes, dh: Tensor, dw: Tensor) -> Tensor:
    """Read a table at offsets (query minus key).

    Args:
        tables: What a table module returns.
        axes: Its distance maps.
        dh: Row offsets, int64, shape (B, ...).
        dw: Column offsets, the same shape.

    Returns:
        (B, H, ...) for a scalar table, (B, H, ..., d) for a vector one.
    """
    ih, iw = axes[0].index(dh), axes[1].index(dw)
    read = tables[0][:, ih] + tables[1][:, iw] if len(tables) == 2 else tables[0][:, ih, iw]
    return read.transpose(0, 1)


def within(axes: Axes, dh: Tensor, dw: Tensor) -> Tensor:
    """Whether offsets lie within the table, boolean, of their shape: not where ``clamp`` repeats the last entry."""
    inside = torch.ones_like(dh, dtype=torch.bool)
    for offset, axis in zip((dh, dw), axes, strict=True):
        if axis.kind == "clamp":
            inside = inside & (offset.abs() <= axis.size)
    return inside


def axis_lookup(tables: Tables, axes: Axes, q_grid: Grid, k_grid: Grid) -> Tables:
    """Read separable tables once per pair of query row and key row, and of query column and key column.

    Returns:
        (H, query rows, key rows[, d]) and (H, query columns, key columns[, d]).
    """
    device = tables[0].device
    dh = offsets(q_grid.row_coords(device), k_grid.row_coords(device))
    dw = offsets(q_grid.col_coords(device), k_grid.col_coords(device))
    return tables[0][:, axes[0].index(dh)], tables[1][:, axes[1].index(dw)]
