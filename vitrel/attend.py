"""Attention with relative position: the readable reference, the dense form, and the choice between them.

All take ``q`` (B, H, Lq, d), ``k`` and ``v`` (B, H, Lk, d), a ``Position``, and where queries and keys lie: a ``Grid``,
or ``Points`` per sample. Tokens before the patches are prefix tokens: Lq - q_grid.patches among the queries,
Lk - k_grid.patches among the keys. A mask is boolean (True = attend) or additive, broadcastable to (B, H, Lq, Lk), and
comes after the sum of all terms; a hidden key has weight exactly 0, and a row without a visible key gives 0.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid, Where, offsets
from vitrel.position import Position
from vitrel.relpos import CONTENT, TERMS
from vitrel.rotary import rotate
from vitrel.tables import axis_lookup, lookup

Backend = Callable[[Tensor, Tensor, Tensor, Position, Where, Where, Tensor | None, float], Tensor]


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
        terms["prefix"] = _prefix_bias(position.prefix, q_prefix, k_prefix, shape[2], shape[3]).expand(shape)
    return terms


def reference_scores(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> Tensor:
    """Scores before mask and softmax, (B, H, Lq, Lk): the sum of ``reference_terms``."""
    return torch.stack(list(reference_terms(q, k, position, q_grid, k_grid).values())).sum(0)


def masked_softmax(scores: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Softmax over keys after the mask; rows without a visible key are 0."""
    if attn_mask is None:
        return scores.softmax(-1)
    scores, visible = _mask_scores(scores, attn_mask)
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
    if "value" in position.terms:
        weights = masked_softmax(dense_scores(q, k, position, q_grid, k_grid), attn_mask)
        return weigh(F.dropout(weights, dropout_p), v, position, q_grid, k_grid)
    bias = dense_bias(q, k, position, q_grid, k_grid)
    q, k = content_inputs(q, k, position, q_grid, k_grid)
    visible = None
    if attn_mask is not None:
        bias = q.new_zeros(()) if bias is None else bias
        bias, visible = _mask_scores(bias.expand(*q.shape[:3], k.shape[2]), attn_mask)
    scale = position.scales["content"]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)
    return out if visible is None else out.masked_fill(~visible, 0)


def dense_scores(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> Tensor:
    """Scores before mask and softmax, (B, H, Lq, Lk), without a tensor of size Lq * Lk * d."""
    bias = dense_bias(q, k, position, q_grid, k_grid)
    q, k = content_inputs(q, k, position, q_grid, k_grid)
    scores = position.scales["content"] * (q @ k.mT)
    return scores if bias is None else scores + bias


def content_inputs(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> tuple[Tensor, Tensor]:
    """The q and k whose product is the content term together with the rotary term, or with u where nothing turns."""
    if position.frequencies is not None:
        return rotate(q, position.frequencies, q_grid), rotate(k, position.frequencies, k_grid)
    if "u" in position.terms:
        q = q + (position.scales["u"] / position.scales["content"] * position.vectors["u"]).to(q.dtype)[:, None]
    return q, k


def dense_bias(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> Tensor | None:
    """Sum of all terms that are not in ``content_inputs``, (B or 1, H, Lq, Lk) in q's type; None if there are none."""
    q_prefix, k_prefix = q.shape[2] - q_grid.patches, k.shape[2] - k_grid.patches
    summands = _patch_summands(q[:, :, q_prefix:], k[:, :, k_prefix:], position, q_grid, k_grid)
    summands = [F.pad(s, (k_prefix, 0, q_prefix, 0)) for s in summands] if q_prefix or k_prefix else summands
    if position.prefix is not None:
        summands.append(_prefix_bias(position.prefix, q_prefix, k_prefix, q.shape[2], k.shape[2]))
    if position.frequencies is not None and "u" in position.terms:  # u meets the keys unturned
        u = position.scales["u"] * torch.einsum("hd,bhjd->bhj", position.vectors["u"], k)
        summands.append(u[:, :, None].expand(-1, -1, q.shape[2], -1))
    return _sum(summands).to(q.dtype) if summands else None


def _patch_summands(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> list[Tensor]:
    """The terms that read tables, between patches; q and k are those of the patches."""
    summands = []
    on = [t for t in ("bias", "query", "key") if t in position.terms]
    if on and len(position.tables[on[0]]) == 2 and isinstance(q_grid, Grid) and isinstance(k_grid, Grid):
        if "bias" in on or "query" in on:
            rows, cols = query_profiles(q, position, q_grid, k_grid)
            summands.append((rows[..., :, None] + cols[..., None, :]).flatten(-2))
        if "key" in on:
            rows, cols = key_profiles(k, position, q_grid, k_grid)
            summands.append((rows[..., :, None] + cols[..., None, :]).flatten(-2).mT)
        return summands
    if "bias" in on:
        summands.append(lookup(position.tables["bias"], position.axes, *patch_offsets(q_grid, k_grid, q.device)))
    if "query" in on:
        x = _table_queries(q, position)
        for table, entry in _entries("query", position, q_grid, k_grid, q.device):
            summands.append(_gather(x, table, entry))
    if "key" in on:
        for table, entry in _entries("key", position, q_grid, k_grid, q.device):
            summands.append(_gather(position.scales["key"] * k, table, entry.mT).mT)
    return summands


def query_profiles(q: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> tuple[Tensor, Tensor]:
    """The score of each query patch towards every key row and every key column: terms bias, query and v.

    A separable table is read per axis, so that the score of query i and key j is
    ``rows[i, row of j] + cols[i, column of j]``.

    Args:
        q: Patch queries, (B, H, q_grid.patches, d).

    Returns:
        (B or 1, H, Lq, key rows) and (B or 1, H, Lq, key columns).
    """
    row_parts, col_parts = [], []
    if "query" in position.terms:
        rh, rw = axis_lookup(position.tables["query"], position.axes, q_grid, k_grid)
        grid = _table_queries(q, position).unflatten(2, (q_grid.rows, q_grid.cols))
        row_parts.append(torch.einsum("bhyxd,hykd->bhyxk", grid, rh))
        col_parts.append(torch.einsum("bhyxd,hxkd->bhyxk", grid, rw))
    if "bias" in position.terms:
        bh, bw = axis_lookup(position.tables["bias"], position.axes, q_grid, k_grid)
        row_parts.append(bh[None, :, :, None].expand(-1, -1, -1, q_grid.cols, -1))
        col_parts.append(bw[None, :, None].expand(-1, -1, q_grid.rows, -1, -1))
    return _sum(row_parts).flatten(2, 3), _sum(col_parts).flatten(2, 3)


def key_profiles(k: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> tuple[Tensor, Tensor]:
    """The score of each key patch towards every query row and every query column: the key term.

    Returns:
        (B, H, Lk, query rows) and (B, H, Lk, query columns).
    """
    ph, pw = axis_lookup(position.tables["key"], position.axes, q_grid, k_grid)
    grid = (position.scales["key"] * k).unflatten(2, (k_grid.rows, k_grid.cols))
    rows = torch.einsum("bhyxd,hkyd->bhyxk", grid, ph).flatten(2, 3)
    cols = torch.einsum("bhyxd,hkxd->bhyxk", grid, pw).flatten(2, 3)
    return rows, cols


def weigh(weights: Tensor, v: Tensor, position: Position, q_grid: Where, k_grid: Where) -> Tensor:
    """Weighted sum over the keys of v, and of V(Δ) where the value term is on: (B, H, Lq, d)."""
    out = weights @ v
    if "value" not in position.terms:
        return out
    q_prefix, k_prefix = weights.shape[2] - q_grid.patches, weights.shape[3] - k_grid.patches
    between, tables = weights[:, :, q_prefix:, k_prefix:], position.tables["value"]
    if len(tables) == 2 and isinstance(q_grid, Grid) and isinstance(k_grid, Grid):
        rows, cols = axis_lookup(tables, position.axes, q_grid, k_grid)
        mass = between.unflatten(3, (k_grid.rows, k_grid.cols)).unflatten(2, (q_grid.rows, q_grid.cols))
        value = torch.einsum("bhyxk,hykd->bhyxd", mass.sum(-1), rows)
        value = (value + torch.einsum("bhyxk,hxkd->bhyxd", mass.sum(-2), cols)).flatten(2, 3)
    else:
        parts = []
        for table, entry in _entries("value", position, q_grid, k_grid, weights.device):
            mass = between.new_zeros(*between.shape[:3], table.shape[1])
            mass = mass.scatter_add(-1, entry.expand(between.shape), between)
            parts.append(torch.einsum("bhin,hnd->bhid", mass, table))
        value = _sum(parts)
    return out + F.pad(value, (0, 0, q_prefix, 0)).to(out.dtype)


def _entries(
    term: str, position: Position, q_grid: Where, k_grid: Where, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Each table of a term as (H, entries, d), with the entry of every pair, (B or 1, 1, Lq, Lk)."""
    tables = position.tables[term]
    dh, dw = patch_offsets(q_grid, k_grid, device)
    rows, cols = position.axes[0].index(dh)[:, None], position.axes[1].index(dw)[:, None]
    if len(tables) == 2:
        return [(tables[0], rows), (tables[1], cols)]
    return [(tables[0].flatten(1, 2), rows * tables[0].shape[2] + cols)]


def _gather(x: Tensor, table: Tensor, entry: Tensor) -> Tensor:
    """x.table[entry] from one product per table entry: (B, H, Lx, d), (H, entries, d) -> the shape of ``entry``."""
    per_entry = torch.einsum("bhid,hnd->bhin", x, table)
    return per_entry.gather(-1, entry.expand(*x.shape[:2], -1, -1))


def _table_queries(q: Tensor, position: Position) -> Tensor:
    """What meets the query term's table: scaled queries plus scaled v, (B, H, Lq, d)."""
    scaled = position.scales["query"] * q
    if "v" in position.terms:
        scaled = scaled + (position.scales["v"] * position.vectors["v"])[:, None]
    return scaled


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _prefix_bias(scalars: Tensor, q_prefix: int, k_prefix: int, q_length: int, k_length: int) -> Tensor:
    """(1, H, Lq, Lk): ``scalars`` (H, 3) for prefix->patch, patch->prefix and prefix->prefix, 0 between patches."""
    to_patch, from_patch, among = scalars[:, :, None, None].unbind(1)
    q_patches, k_patches = q_length - q_prefix, k_length - k_prefix
    top = torch.cat([among.expand(-1, q_prefix, k_prefix), to_patch.expand(-1, q_prefix, k_patches)], -1)
    rest = F.pad(from_patch.expand(-1, q_patches, k_prefix), (0, k_patches))
    return torch.cat([top, rest], -2)[None]


def _mask_scores(scores: Tensor, attn_mask: Tensor) -> tuple[Tensor, Tensor]:
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


BACKENDS: dict[str, Backend] = {"reference": reference, "dense": dense}


def choose(backend: str, position_terms: tuple[str, ...]) -> tuple[str, str]:
    """The backend to take and the reason.

    Args:
        backend: ``auto`` or a key of ``BACKENDS``.
        position_terms: Names of the terms that are on.

    Raises:
        ValueError: If the name is unknown.
    """
    if backend == "auto":
        if not position_terms:
            return "dense", "no position term: plain fused attention"
        if "value" in position_terms:
            return "dense", "written-out softmax: the value term needs the weights"
        return "dense", "fused attention with the position terms as an additive bias"
    if backend not in BACKENDS:
        close = difflib.get_close_matches(backend, ["auto", *BACKENDS], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"backend: {backend!r} is unknown, expected one of auto, {', '.join(BACKENDS)}{hint}")
    return backend, "asked for"
