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

from vitrel.attend import (
    content_inputs,
    gather_scores,
    key_profiles,
    mask_scores,
    query_profiles,
    scatter_values,
    table_queries,
    table_values,
)
from vitrel.grid import Grid, Where, offsets
from vitrel.position import Position


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
    q_prefix, k_prefix, width = q.shape[2] - q_grid.patches, k.shape[2] - k_grid.patches, v.shape[-1]
    q_parts, k_parts, v_parts = [], [], [v]
    for q_column, k_column in _score_columns(q[:, :, q_prefix:], k[:, :, k_prefix:], position, q_grid, k_grid):
        q_parts.append(F.pad(q_column, (0, 0, q_prefix, 0)))
        k_parts.append(F.pad(k_column, (0, 0, k_prefix, 0)))
    if "value" in position.terms:
        v_parts += [F.pad(column, (0, 0, k_prefix, 0)) for column in _places(k_grid, v)]
    if position.prefix is not None:
        q_column, k_column = _prefix_columns(position.prefix, q_prefix, k_prefix, q.shape[2], k.shape[2])
        q_parts.append(q_column)
        k_parts.append(k_column)
    q, k = content_inputs(q, k, position, q_grid, k_grid)
    wide_q, wide_k = _joined([position.scales["content"] * q, *q_parts]), _joined([k, *k_parts])
    wide_v = _joined(v_parts)
    even = -(-max(wide_q.shape[-1], wide_v.shape[-1]) // 8) * 8
    wide_q, wide_k, wide_v = (F.pad(t, (0, even - t.shape[-1])) for t in (wide_q, wide_k, wide_v))
    visible = None
    if attn_mask is not None:
        attn_mask, visible = mask_scores(wide_q.new_zeros(attn_mask.shape), attn_mask)
    out = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, attn_mask, dropout_p=dropout_p, scale=1.0)
    if visible is not None:
        out = out.masked_fill(~visible, 0)
    if "value" not in position.terms:
        return out[..., :width]
    on_rows, on_cols = (part.shape[-1] for part in v_parts[1:])
    out, rows, cols, _ = out.split([width, on_rows, on_cols, even - width - on_rows - on_cols], -1)
    value = _values(rows[:, :, q_prefix:], cols[:, :, q_prefix:], position, q_grid, k_grid)
    return out + F.pad(value, (0, 0, q_prefix, 0)).to(out.dtype)


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
        columns += zip(_query_columns(q, position, q_grid, k_grid), _places(k_grid, k), strict=True)
    if "key" in position.terms:
        columns += zip(_places(q_grid, q), _key_columns(k, position, q_grid, k_grid), strict=True)
    return columns


def _query_columns(q: Tensor, position: Position, q_grid: Where, k_grid: Where) -> list[Tensor]:
    """(B or 1, H, Lq, key rows) and (B or 1, H, Lq, key columns)."""
    if isinstance(q_grid, Grid) and isinstance(k_grid, Grid):
        profiles = query_profiles(q, position, q_grid, k_grid)
        return [p.expand(-1, -1, q_grid.rows, q_grid.cols, -1).flatten(2, 3) for p in profiles]
    columns = []
    for axis, entry in enumerate(_entries(position, q_grid, k_grid, q.device)):
        total = torch.zeros((), dtype=q.dtype, device=q.device)
        if "query" in position.terms:
            total = total + gather_scores(table_queries(q, position), position.tables["query"][axis], entry[:, None])
        if "bias" in position.terms:
            total = total + position.tables["bias"][axis][:, entry].transpose(0, 1)
        columns.append(total)
    return columns


def _key_columns(k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> list[Tensor]:
    """(B, H, Lk, query rows) and (B, H, Lk, query columns)."""
    if isinstance(q_grid, Grid) and isinstance(k_grid, Grid):
        return [p.mT for p in key_profiles(k, position, q_grid, k_grid)]
    box, at = q_grid.box, k_grid.coords(k.device)
    lines = (box.row_coords(k.device), box.col_coords(k.device))
    return [
        gather_scores(
            position.scales["key"] * k,
            position.tables["key"][axis],
            position.axes[axis].index(offsets(lines[axis], at[..., axis])).mT[:, None],
        )
        for axis in (0, 1)
    ]


def _values(rows: Tensor, cols: Tensor, position: Position, q_grid: Where, k_grid: Where) -> Tensor:
    """The value term, (B, H, Lq, d), from the weight on each key row and column."""
    if isinstance(q_grid, Grid) and isinstance(k_grid, Grid):
        return table_values(rows, cols, position, q_grid, k_grid)
    entries = _entries(position, q_grid, k_grid, rows.device)
    by_row, by_col = (
        scatter_values(mass, table, entry[:, None])
        for mass, table, entry in zip((rows, cols), position.tables["value"], entries, strict=True)
    )
    return by_row + by_col


def _entries(position: Position, q_grid: Where, k_grid: Where, device: torch.device) -> tuple[Tensor, Tensor]:
    """Table entry of each query patch towards each key row, and each key column: (B or 1, Lq, rows or columns)."""
    at, box = q_grid.coords(device), k_grid.box
    rows, cols = offsets(at[..., 0], box.row_coords(device)), offsets(at[..., 1], box.col_coords(device))
    return position.axes[0].index(rows), position.axes[1].index(cols)


def _places(where: Where, like: Tensor) -> tuple[Tensor, Tensor]:
    """One-hot row and one-hot column of each patch, (B or 1, 1, L, rows) and (B or 1, 1, L, columns)."""
    box, at = where.box, where.coords(like.device)
    rows = at[..., :1] == box.row_coords(like.device)
    cols = at[..., 1:] == box.col_coords(like.device)
    return rows[:, None].to(like.dtype), cols[:, None].to(like.dtype)


def _prefix_columns(
    scalars: Tensor, q_prefix: int, k_prefix: int, q_length: int, k_length: int
) -> tuple[Tensor, Tensor]:
    """(1, 1, Lq, 2) and (1, H, Lk, 2): is a prefix token, is a patch; what each kind of query adds to each key."""
    to_patch, from_patch, among = scalars[:, :, None].unbind(1)
    is_prefix = (torch.arange(q_length, device=scalars.device) < q_prefix).to(scalars.dtype)
    prefix_key = torch.stack([among, from_patch], -1).expand(-1, k_prefix, -1)
    patch_key = F.pad(to_patch[..., None], (0, 1)).expand(-1, k_length - k_prefix, -1)
    return torch.stack([is_prefix, 1 - is_prefix], -1)[None, None], torch.cat([prefix_key, patch_key], 1)[None]
