"""The fold: separable tables as extra columns of q, k and v in one plain fused attention call.

With per-axis tables the position part of the score of query i and key j depends on (i, row of j) plus (i, column of j):

    Q' = [ s*(q+u) | rows_i | cols_i | onehot(y_i) | onehot(x_i) | prefix ]
    K' = [ k       | onehot(y_j) | onehot(x_j) | rows_j | cols_j | prefix ]
    V' = [ v       | onehot(y_j) | onehot(x_j) ]

where ``rows_i`` and ``cols_i`` are the profiles of the terms bias, query and v over key rows and key columns, and
``rows_j`` and ``cols_j`` those of the key term over query rows and query columns. ``Q' K'^T`` is the sum of all terms,
so nothing of size Lq * Lk is built; the extra columns of the output are the weight on each key row and column, which
the value tables multiply. (FlashBias, arXiv 2505.12044, folds scalar biases that do not depend on the input.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Where, offsets
from vitrel.lookup import Axes
from vitrel.masks import mask_scores
from vitrel.position import Position
from vitrel.profiles import content_inputs, gather_scores, scatter_values, table_queries


def folded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position,
    q_grid: Where,
    k_grid: Where,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Fused attention on widened q, k and v; the arguments are those of ``attend.dense``. Returns (B, H, Lq, d).

    The columns are padded to a multiple of 8 and to one width for q, k and v, which the fused kernels want.
    """
    wide = _widened(q, k, v, position, q_grid, k_grid)
    even = -(-max(t.shape[-1] for t in wide) // 8) * 8
    wide_q, wide_k, wide_v = (F.pad(t, (0, even - t.shape[-1])) for t in wide)
    visible = None
    if attn_mask is not None:
        attn_mask, visible = mask_scores(wide_q.new_zeros(attn_mask.shape), attn_mask)
    out = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, attn_mask, dropout_p=dropout_p, scale=1.0)
    if visible is not None:
        out = out.masked_fill(~visible, 0)
    return _narrowed(out, v.shape[-1], position, q_grid, k_grid)


def _widened(
    q: Tensor, k: Tensor, v: Tensor, position: Position, q_grid: Where, k_grid: Where
) -> tuple[Tensor, Tensor, Tensor]:
    """Q', K' and V' of the fold, scaled."""
    q_prefix, k_prefix = q.shape[2] - q_grid.patches, k.shape[2] - k_grid.patches
    q_parts, k_parts, v_parts = [], [], [v]
    for q_column, k_column in _score_columns(q[:, :, q_prefix:], k[:, :, k_prefix:], position, q_grid, k_grid):
        q_parts.append(F.pad(q_column, (0, 0, q_prefix, 0)))
        k_parts.append(F.pad(k_column, (0, 0, k_prefix, 0)))
    if "value" in position.terms:
        v_parts += [F.pad(column, (0, 0, k_prefix, 0)) for column in one_hot_lines(k_grid, v.device, v.dtype)]
    if position.prefix is not None:
        q_column, k_column = _prefix_columns(position.prefix, q_prefix, k_prefix, q.shape[2], k.shape[2])
        q_parts.append(q_column)
        k_parts.append(k_column)
    q, k = content_inputs(q, k, position, q_grid, k_grid)
    return _joined([position.scales["content"] * q, *q_parts]), _joined([k, *k_parts]), _joined(v_parts)


def _narrowed(out: Tensor, width: int, position: Position, q_grid: Where, k_grid: Where) -> Tensor:
    """The output (B, H, Lq, d) from that of the fold, with the value term."""
    if "value" not in position.terms:
        return out[..., :width]
    q_prefix, box = out.shape[2] - q_grid.patches, k_grid.box
    on_rows, on_cols = out[:, :, q_prefix:, width : width + box.rows + box.cols].split([box.rows, box.cols], -1)
    by_line = zip(
        (on_rows, on_cols),
        position.tables["value"],
        line_entries(position.axes, q_grid, k_grid, out.device),
        strict=True,
    )
    by_row, by_col = (scatter_values(mass, table, entry[:, None]) for mass, table, entry in by_line)
    return out[..., :width] + F.pad(by_row + by_col, (0, 0, q_prefix, 0)).to(out.dtype)


def _joined(parts: list[Tensor]) -> Tensor:
    """Columns side by side, in the type and with the batch and heads of the first."""
    first = parts[0]
    return torch.cat([first, *(p.to(first.dtype).expand(*first.shape[:3], -1) for p in parts[1:])], -1)


def _score_columns(
    q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where
) -> list[tuple[Tensor, Tensor]]:
    """Columns of q and of k whose products sum to the terms that read tables, between patches."""
    columns: list[tuple[Tensor, Tensor]] = []
    if {"bias", "query"} & set(position.terms):
        columns += zip(
            _query_columns(q, position, q_grid, k_grid), one_hot_lines(k_grid, k.device, k.dtype), strict=True
        )
    if "key" in position.terms:
        entries = line_entries(position.axes, k_grid, q_grid, k.device, sign=-1)
        tables = zip(position.tables["key"], entries, strict=True)
        profiles = [gather_scores(position.scales["key"] * k, table, entry[:, None]) for table, entry in tables]
        columns += zip(one_hot_lines(q_grid, q.device, q.dtype), profiles, strict=True)
    return columns


def _query_columns(q: Tensor, position: Position, q_grid: Where, k_grid: Where) -> list[Tensor]:
    """(B or 1, H, Lq, key rows) and (B or 1, H, Lq, key columns)."""
    columns = []
    x = table_queries(q, position) if "query" in position.terms else None
    for axis, entry in enumerate(line_entries(position.axes, q_grid, k_grid, q.device)):
        bias = position.tables["bias"][axis][:, None] if "bias" in position.terms else None
        if x is not None:
            columns.append(gather_scores(x, position.tables["query"][axis], entry[:, None], bias))
        elif bias is not None:
            columns.append(bias[:, 0, entry].transpose(0, 1))
    return columns


def line_entries(axes: Axes, grid: Where, lines: Where, device: torch.device, sign: int = 1) -> tuple[Tensor, Tensor]:
    """Table entry of each patch towards each row, and each column, of the other grid: (B or 1, L, rows or columns).

    ``sign`` is -1 where the patches are the keys: Δ is query minus key.
    """
    at, box = grid.coords(device), lines.box
    rows, cols = offsets(at[..., 0], box.row_coords(device)), offsets(at[..., 1], box.col_coords(device))
    return axes[0].index(sign * rows), axes[1].index(sign * cols)


def one_hot_lines(where: Where, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One-hot row and one-hot column of each patch, (B or 1, 1, L, rows) and (B or 1, 1, L, columns)."""
    box, at = where.box, where.coords(device)
    rows, cols = at[..., :1] == box.row_coords(device), at[..., 1:] == box.col_coords(device)
    return rows[:, None].to(dtype), cols[:, None].to(dtype)


def _prefix_columns(
    scalars: Tensor, q_prefix: int, k_prefix: int, q_length: int, k_length: int
) -> tuple[Tensor, Tensor]:
    """(1, 1, Lq, 2) and (1, H, Lk, 2): is a prefix token, is a patch; what each kind of query adds to each key."""
    to_patch, from_patch, among = scalars[:, :, None].unbind(1)
    is_prefix = (torch.arange(q_length, device=scalars.device) < q_prefix).to(scalars.dtype)
    prefix_key = torch.stack([among, from_patch], -1).expand(-1, k_prefix, -1)
    patch_key = F.pad(to_patch[..., None], (0, 1)).expand(-1, k_length - k_prefix, -1)
    return torch.stack([is_prefix, 1 - is_prefix], -1)[None, None], torch.cat([prefix_key, patch_key], 1)[None]
