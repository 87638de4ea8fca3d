"""Attention with relative position: the readable reference, the dense form, and the pieces that faster forms share.

All forms take ``q`` (B, H, Lq, d), ``k`` and ``v`` (B, H, Lk, d), a ``Position``, and where queries and keys lie: a
``Grid``, or ``Points`` per sample. Tokens before the patches are prefix tokens: Lq - q_grid.patches among the queries,
Lk - k_grid.patches among the keys. A mask is boolean (True = attend) or additive, broadcastable to (B, H, Lq, Lk), and
comes after the sum of all terms; a hidden key has weight exactly 0, and a row without a visible key gives 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid, Where, offsets
from vitrel.position import Position
from vitrel.relpos import CONTENT, TERMS
from vitrel.rotary import angles, rotate, turn
from vitrel.tables import Tables, axis_lookup, lookup


def patch_offsets(q_grid: Where, k_grid: Where, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column offset of every query patch from every key patch, each (B or 1, Lq, Lk)."""
    q, k = q_grid.coords(device), k_grid.coords(device)
    return offsets(q[..., 0], k[..., 0]), offsets(q[..., 1], k[..., 1])


def reference_terms(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> dict[str, Tensor]:
    """Each term's summand of the scores, straight from its formula.

    Builds R(Δ) for every pair, of size H * Lq * Lk * d: made to be read and to test against, not to be fast.

    Returns:
        Term name (``content`` first, ``prefix`` last) to (B, H, Lq, Lk); 0 where a term does not reach prefix tokens.
        ``value`` acts on the output and is left out.
    """
    q_prefix, k_prefix = q.shape[2] - q_grid.patches, k.shape[2] - k_grid.patches
    dh, dw = patch_offsets(q_grid, k_grid, q.device)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    nothing = q.new_empty(0)
    content = CONTENT.formula(q, k, nothing, nothing)
    terms = {"content": position.scales["content"] * content}
    for name in position.terms:
        term = TERMS[name]
        if name == "value":
            continue
        if position.frequencies is not None and term.table in ("axial", "mixed"):
            turned = rotate(q, position.frequencies, q_grid), rotate(k, position.frequencies, k_grid)
            summand = term.formula(*turned, nothing, nothing) - content
        else:
            table = lookup(position.tables[term.reads], position.axes, dh, dw) if term.reads else nothing
            vector = position.vectors.get(name, nothing)
            if term.everywhere:
                summand = term.formula(q, k, vector, table)
            else:
                summand = term.formula(q[:, :, q_prefix:], k[:, :, k_prefix:], vector, table)
                summand = F.pad(summand, (k_prefix, 0, q_prefix, 0))
        terms[name] = (position.scales[name] * summand).expand(shape)
    if position.prefix is not None:
        terms["prefix"] = prefix_bias(position.prefix, q_prefix, k_prefix, shape[2], shape[3]).expand(shape)
    return terms


def reference_scores(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> Tensor:
    """Scores before mask and softmax, (B, H, Lq, Lk): the sum of ``reference_terms``."""
    return torch.stack(list(reference_terms(q, k, position, q_grid, k_grid).values())).sum(0)


def masked_softmax(scores: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Softmax over keys after the mask; rows without a visible key are 0."""
    if attn_mask is None:
        return scores.softmax(-1)
    scores, visible = mask_scores(scores, attn_mask)
    return scores.softmax(-1).masked_fill(~visible, 0)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position,
    q_grid: Where,
    k_grid: Where,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The formulas as written: scores, mask, softmax, weighted sum of v + V(Δ). Returns (B, H, Lq, d)."""
    weights = masked_softmax(reference_scores(q, k, position, q_grid, k_grid), attn_mask)
    weights = F.dropout(weights, dropout_p)
    out = weights @ v
    if "value" in position.terms:
        q_prefix, k_prefix = q.shape[2] - q_grid.patches, k.shape[2] - k_grid.patches
        table = lookup(position.tables["value"], position.axes, *patch_offsets(q_grid, k_grid, q.device))
        between = weights[:, :, q_prefix:, k_prefix:]
        out = out + F.pad(TERMS["value"].formula(between, k, v, table), (0, 0, q_prefix, 0))
    return out


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position,
    q_grid: Where,
    k_grid: Where,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Fused attention with the position terms as one additive bias (B or 1, H, Lq, Lk). Returns (B, H, Lq, d).

    A value term needs the weights, so that its softmax is written out.
    """
    bias = dense_bias(q, k, position, q_grid, k_grid)
    q, k = content_inputs(q, k, position, q_grid, k_grid)
    if "value" in position.terms:
        scores = (position.scales["content"] * q) @ k.mT
        weights = masked_softmax(scores if bias is None else scores + bias, attn_mask)
        return weigh(F.dropout(weights, dropout_p), v, position, q_grid, k_grid)
    return biased_attention(q, k, v, bias, position.scales["content"], attn_mask, dropout_p)


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """``softmax(scale * q k^T + bias) v`` under a mask."""
    visible = None
    if attn_mask is not None:
        shape = attn_mask.shape if bias is None else (*q.shape[:3], k.shape[2])
        bias = q.new_zeros(()) if bias is None else bias
        bias, visible = mask_scores(bias.expand(shape), attn_mask)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)
    return out if visible is None else out.masked_fill(~visible, 0)


def dense_scores(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> Tensor:
    """Scores before mask and softmax, (B, H, Lq, Lk), without a tensor of size Lq * Lk * d."""
    bias = dense_bias(q, k, position, q_grid, k_grid)
    q, k = content_inputs(q, k, position, q_grid, k_grid)
    scores = position.scales["content"] * (q @ k.mT)
    return scores if bias is None else scores + bias


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


def dense_bias(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> Tensor | None:
    """Sum of all terms that are not in ``content_inputs``, (B or 1, H, Lq, Lk) in q's type; None if there are none."""
    q_prefix, k_prefix = q.shape[2] - q_grid.patches, k.shape[2] - k_grid.patches

    def make() -> Tensor | None:
        summands = _patch_summands(q[:, :, q_prefix:], k[:, :, k_prefix:], position, q_grid, k_grid)
        summands = [F.pad(s, (k_prefix, 0, q_prefix, 0)) for s in summands] if q_prefix or k_prefix else summands
        if position.prefix is not None:
            summands.append(prefix_bias(position.prefix, q_prefix, k_prefix, q.shape[2], k.shape[2]))
        return sum_of(summands).to(q.dtype) if summands else None

    if {"query", "key"} & set(position.terms) or not (isinstance(q_grid, Grid) and isinstance(k_grid, Grid)):
        return make()
    return position.recall(("dense bias", q_grid, k_grid, q_prefix, k_prefix, q.dtype), make)


def _patch_summands(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> list[Tensor]:
    """The terms that read tables, between patches; q and k are those of the patches."""
    summands = []
    on = [t for t in ("bias", "query", "key") if t in position.terms]
    if on and len(position.tables[on[0]]) == 2 and isinstance(q_grid, Grid) and isinstance(k_grid, Grid):
        if "bias" in on or "query" in on:
            rows, cols = query_profiles(q, position, q_grid, k_grid)
            summands.append((rows[..., :, None] + cols[..., None, :]).flatten(4).flatten(2, 3))
        if "key" in on:
            rows, cols = key_profiles(k, position, q_grid, k_grid)
            summands.append((rows[:, :, :, None] + cols[:, :, None]).flatten(2, 3))
        return summands
    if "bias" in on:
        summands.append(lookup(position.tables["bias"], position.axes, *patch_offsets(q_grid, k_grid, q.device)))
    if "query" in on:
        x = table_queries(q, position)
        for table, entry in table_entries("query", position, q_grid, k_grid, q.device):
            summands.append(gather_scores(x, table, entry))
    if "key" in on:
        for table, entry in table_entries("key", position, q_grid, k_grid, q.device):
            summands.append(gather_scores(position.scales["key"] * k, table, entry.mT).mT)
    return summands


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


def weigh(weights: Tensor, v: Tensor, position: Position, q_grid: Where, k_grid: Where) -> Tensor:
    """Weighted sum over the keys of v, and of V(Δ) where the value term is on: (B, H, Lq, d)."""
    out = weights @ v
    if "value" not in position.terms:
        return out
    q_prefix, k_prefix = weights.shape[2] - q_grid.patches, weights.shape[3] - k_grid.patches
    between, tables = weights[:, :, q_prefix:, k_prefix:], position.tables["value"]
    if len(tables) == 2 and isinstance(q_grid, Grid) and isinstance(k_grid, Grid):
        mass = between.unflatten(3, (k_grid.rows, k_grid.cols))
        value = table_values(mass.sum(-1), mass.sum(-2), position, q_grid, k_grid)
    else:
        parts = [
            scatter_values(between, table, entry)
            for table, entry in table_entries("value", position, q_grid, k_grid, weights.device)
        ]
        value = sum_of(parts)
    return out + F.pad(value, (0, 0, q_prefix, 0)).to(out.dtype)


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


def sum_of(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def prefix_bias(scalars: Tensor, q_prefix: int, k_prefix: int, q_length: int, k_length: int) -> Tensor:
    """(1, H, Lq, Lk): ``scalars`` (H, 3) for prefix->patch, patch->prefix and prefix->prefix, 0 between patches."""
    to_patch, from_patch, among = scalars[:, :, None, None].unbind(1)
    q_patches, k_patches = q_length - q_prefix, k_length - k_prefix
    top = torch.cat([among.expand(-1, q_prefix, k_prefix), to_patch.expand(-1, q_prefix, k_patches)], -1)
    rest = F.pad(from_patch.expand(-1, q_patches, k_prefix), (0, k_patches))
    return torch.cat([top, rest], -2)[None]


def mask_scores(scores: Tensor, attn_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Scores with hidden keys at -inf, and which rows see a key at all, (..., Lq, 1); blind rows stay unmasked.

    An additive mask hides where it is -inf or near its type's lowest number, which plus a negative score may overflow.
    """
    if attn_mask.dtype == torch.bool:
        seen = attn_mask
    else:
        seen = attn_mask > torch.finfo(attn_mask.dtype).min / 2
        scores = scores + attn_mask.masked_fill(~seen, 0).to(scores.dtype)
    seen = seen.expand(scores.shape)
    visible = seen.any(-1, keepdim=True)
    # A row of -inf would give NaN, here and in its gradients; its output is zeroed by the caller instead.
    return scores.masked_fill(~seen & visible, -torch.inf), visible


class FirstOrder(torch.autograd.Function):
    """``(form, gradients, *inputs) -> gradients()``, refused when differentiated again with respect to any input.

    torch's ``once_differentiable`` cuts the graph instead, so that a gradient of given inputs is wrong without a word.
    """

    @staticmethod
    def forward(ctx: Any, form: str, gradients: Callable[[], tuple[Tensor | None, ...]], *inputs: Any) -> Any:
        ctx.form = form
        return gradients()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"backend: {ctx.form!r} cannot be differentiated twice; build the model with backend='reference' for that"
        )
