"""What position tables meet: the pieces that the forms of attention are made of.

Arguments as in ``attend``: ``q`` (B, H, Lq, d), ``k`` (B, H, Lk, d), a ``Position``, and where queries and keys lie.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid, Where, offsets
from vitrel.lookup import Tables, axis_lookup
from vitrel.position import Position
from vitrel.rotary import angles, turn


def patch_offsets(q_grid: Where, k_grid: Where, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column offset of every query patch from every key patch, each (B or 1, Lq, Lk)."""
    q, k = q_grid.coords(device), k_grid.coords(device)
    return offsets(q[..., 0], k[..., 0]), offsets(q[..., 1], k[..., 1])


def content_inputs(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> tuple[Tensor, Tensor]:
    """The q and k whose product is the content term together with the rotary term and u.

    u meets the keys as they are; where a rotary term turns them, it takes a feature of its own.
    """
    turned = q, k
    if position.frequencies is not None:
        turned = turn(q, *_angles(position, q_grid, q.device)), turn(k, *_angles(position, k_grid, k.device))
    if "u" not in position.terms:
        return turned
    u = position.scales["u"] / position.scales["content"] * position.vectors["u"]
    if position.frequencies is None:
        return q + u.to(q.dtype)[:, None], k
    met = torch.einsum("hd,bhjd->bhj", u.to(k.dtype), k)[..., None].to(k.dtype)
    return F.pad(turned[0], (0, 8), value=1.0), torch.cat([turned[1], F.pad(met, (0, 7))], -1)


def _angles(position: Position, where: Where, device: torch.device) -> tuple[Tensor, Tensor]:
    assert position.frequencies is not None
    frequencies = position.frequencies
    if not isinstance(where, Grid):
        return angles(frequencies, where, device)
    return position.recall(("angles", where, device), lambda: angles(frequencies, where, device))


def axis_tables(term: str, position: Position, q_grid: Grid, k_grid: Grid) -> Tables:
    """A term's separable tables, scaled, as read by each pair of rows and of columns, see ``axis_lookup``."""

    def make() -> Tables:
        scale = position.scales[term]
        tables = tuple(t if scale == 1 else scale * t for t in position.tables[term])
        return axis_lookup(tables, position.axes, q_grid, k_grid)

    return position.recall(("axis tables", term, q_grid, k_grid), make)


def query_profiles(q: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> tuple[Tensor, Tensor]:
    """The score of each query patch towards every key row and every key column: terms bias, query and v.

    A separable table is read per axis, so that the score of query (y, x) and key (y', x') is
    ``rows[y, x, y'] + cols[y, x, x']``.

    Args:
        q: Patch queries, (B, H, q_grid.patches, d).

    Returns:
        (B, H, query rows, query columns, key rows) and (B, H, query rows, query columns, key columns). Where only the
        bias term is on, B, and the query columns of the first and the query rows of the second, are 1.
    """
    row_parts, col_parts = [], []
    if "query" in position.terms:
        rh, rw = axis_tables("query", position, q_grid, k_grid)
        grid = q.unflatten(2, (q_grid.rows, q_grid.cols))
        row_parts.append(torch.einsum("bhyxd,hykd->bhyxk", grid, rh))
        col_parts.append(torch.einsum("bhyxd,hxkd->bhyxk", grid, rw))
        if "v" in position.terms:
            v = position.scales["v"] / position.scales["query"] * position.vectors["v"]
            row_parts.append(torch.einsum("hd,hykd->hyk", v, rh)[None, :, :, None])
            col_parts.append(torch.einsum("hd,hxkd->hxk", v, rw)[None, :, None])
    if "bias" in position.terms:
        bh, bw = axis_tables("bias", position, q_grid, k_grid)
        row_parts.append(bh[None, :, :, None])
        col_parts.append(bw[None, :, None])
    return sum_of(row_parts), sum_of(col_parts)


def key_profiles(k: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> tuple[Tensor, Tensor]:
    """The score of each key patch towards every query row and every query column: the key term.

    Returns:
        (B, H, query rows, Lk) and (B, H, query columns, Lk).
    """
    ph, pw = axis_tables("key", position, q_grid, k_grid)
    grid = k.unflatten(2, (k_grid.rows, k_grid.cols))
    rows = torch.einsum("bhyxd,hkyd->bhkyx", grid, ph).flatten(3)
    cols = torch.einsum("bhyxd,hkxd->bhkyx", grid, pw).flatten(3)
    return rows, cols


def table_values(rows: Tensor, cols: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> Tensor:
    """The value term between patches, (B, H, Lq, d), from the weight that each query puts on key rows and columns.

    Args:
        rows: (B, H, Lq, key rows).
        cols: (B, H, Lq, key columns).
    """
    by_row, by_col = axis_tables("value", position, q_grid, k_grid)
    rows, cols = (mass.unflatten(2, (q_grid.rows, q_grid.cols)) for mass in (rows, cols))
    value = torch.einsum("bhyxk,hykd->bhyxd", rows, by_row) + torch.einsum("bhyxk,hxkd->bhyxd", cols, by_col)
    return value.flatten(2, 3)


def table_entries(
    term: str, position: Position, q_grid: Where, k_grid: Where, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Each table of a term as (H, entries, d), with the entry of every pair, (B or 1, 1, Lq, Lk)."""
    tables = position.tables[term]
    dh, dw = patch_offsets(q_grid, k_grid, device)
    rows, cols = position.axes[0].index(dh)[:, None], position.axes[1].index(dw)[:, None]
    if len(tables) == 2:
        return [(tables[0], rows), (tables[1], cols)]
    return [(tables[0].flatten(1, 2), rows * tables[0].shape[2] + cols)]


def gather_scores(x: Tensor, table: Tensor, entry: Tensor, bias: Tensor | None = None) -> Tensor:
    """x.table[entry] + bias[entry] from one product per table entry, in the shape of ``entry`` with all B and H.

    Args:
        x: (B, H, Lx, d).
        table: (H, entries, d).
        entry: (B or 1, 1, Lx, Ly).
        bias: (H, 1, entries), or None.
    """
    per_entry = x @ table.mT
    per_entry = per_entry if bias is None else per_entry + bias
    return per_entry.gather(-1, entry.expand(*x.shape[:2], -1, -1))


def scatter_values(weights: Tensor, table: Tensor, entry: Tensor) -> Tensor:
    """Sum of weights * table[entry] over the keys, (B, H, Lq, d): weights per entry first, then one product."""
    mass = weights.new_zeros(*weights.shape[:3], table.shape[1])
    mass = mass.scatter_add(-1, entry.expand(weights.shape), weights)
    return mass @ table


def table_queries(q: Tensor, position: Position) -> Tensor:
    """What meets the query term's table: scaled queries plus scaled v, (B, H, Lq, d)."""
    scaled = position.scales["query"] * q
    if "v" in position.terms:
        scaled = scaled + (position.scales["v"] * position.vectors["v"])[:, None]
    return scaled


def prefix_bias(scalars: Tensor, q_prefix: int, k_prefix: int, q_length: int, k_length: int) -> Tensor:
    """(1, H, Lq, Lk): ``scalars`` (H, 3) for prefix->patch, patch->prefix and prefix->prefix, 0 between patches."""
    to_patch, from_patch, among = scalars[:, :, None, None].unbind(1)
    q_patches, k_patches = q_length - q_prefix, k_length - k_prefix
    top = torch.cat([among.expand(-1, q_prefix, k_prefix), to_patch.expand(-1, q_prefix, k_patches)], -1)
    rest = F.pad(from_patch.expand(-1, q_patches, k_prefix), (0, k_patches))
    return torch.cat([top, rest], -2)[None]


def sum_of(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
