"""Attention with relative position: the readable reference, the dense form, and the choice between them.

All take ``q`` (B, H, Lq, d), ``k`` and ``v`` (B, H, Lk, d), a ``Position``, and the grids of queries and keys. Tokens
before the grid's are prefix tokens: Lq - len(q_grid) among the queries, Lk - len(k_grid) among the keys. A mask is
boolean (True = attend) or additive, broadcastable to (B, H, Lq, Lk), and comes after the sum of all terms; a hidden key
has weight exactly 0, and a row without a visible key gives 0.
"""

from __future__ import annotations

import difflib
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid, offsets
from vitrel.relpos import CONTENT, TERMS, Position
from vitrel.tables import axis_lookup, flat_index, lookup


class Backend(Protocol):
    """One way to compute attention; returns (B, H, Lq, d)."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Position,
        q_grid: Grid,
        k_grid: Grid,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor: ...


def reference_terms(q: Tensor, k: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> dict[str, Tensor]:
    """Each term's summand of the scores, straight from its formula.

    Builds R(Δ) for every pair, of size H * Lq * Lk * d: made to be read and to test against, not to be fast.

    Returns:
        Term name (``content`` first) to (B, H, Lq, Lk); 0 where a term does not reach prefix tokens.
    """
    q_prefix, k_prefix = q.shape[2] - len(q_grid), k.shape[2] - len(k_grid)
    q_coords, k_coords = q_grid.coords(q.device), k_grid.coords(q.device)
    dh, dw = (offsets(q_coords[:, axis], k_coords[:, axis]) for axis in (0, 1))
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    nothing = q.new_empty(0)
    terms = {"content": position.scales["content"] * CONTENT.score(q, k, nothing, nothing)}
    for name in position.terms:
        term, tables = TERMS[name], position.reads(name)
        read = lookup(tables, dh, dw) if tables else nothing
        vector = position.vectors.get(name, nothing)
        if term.everywhere:
            summand = term.score(q, k, vector, read)
        else:
            summand = term.score(q[:, :, q_prefix:], k[:, :, k_prefix:], vector, read)
            summand = F.pad(summand, (k_prefix, 0, q_prefix, 0))
        terms[name] = (position.scales[name] * summand).expand(shape)
    return terms


def reference_scores(q: Tensor, k: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> Tensor:
    """Scores before mask and softmax, (B, H, Lq, Lk): the sum of ``reference_terms``."""
    return torch.stack(list(reference_terms(q, k, position, q_grid, k_grid).values())).sum(0)


def masked_softmax(scores: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Softmax over keys after the mask; rows without a visible key are 0."""
    if attn_mask is None:
        return scores.softmax(-1)
    bias, visible = _mask_scores(scores, attn_mask)
    return bias.softmax(-1).masked_fill(~visible, 0)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position,
    q_grid: Grid,
    k_grid: Grid,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The formula as written: scores, mask, softmax, weighted sum."""
    weights = masked_softmax(reference_scores(q, k, position, q_grid, k_grid), attn_mask)
    return F.dropout(weights, dropout_p) @ v


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position,
    q_grid: Grid,
    k_grid: Grid,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Fused attention with the position terms as one additive bias of size (B or 1, H, Lq, Lk)."""
    bias = dense_bias(q, k, position, q_grid, k_grid)
    q = _add_u(q, position)
    visible = None
    if attn_mask is not None:
        if bias is None:
            bias = q.new_zeros(())
        bias, visible = _mask_scores(bias.expand(*q.shape[:3], k.shape[2]), attn_mask)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=position.scales["content"])
    return out if visible is None else out.masked_fill(~visible, 0)


def dense_scores(q: Tensor, k: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> Tensor:
    """Scores before mask and softmax, (B, H, Lq, Lk), without a tensor of size Lq * Lk * d for separable tables."""
    bias = dense_bias(q, k, position, q_grid, k_grid)
    scores = position.scales["content"] * (_add_u(q, position) @ k.mT)
    return scores if bias is None else scores + bias


def dense_bias(q: Tensor, k: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> Tensor | None:
    """Sum of the terms that read a table: (B or 1, H, Lq, Lk) in q's type, 0 at prefix tokens; None without any."""
    if not position.tables:
        return None
    q_prefix, k_prefix = q.shape[2] - len(q_grid), k.shape[2] - len(k_grid)
    if all(len(tables) == 2 for tables in position.tables.values()):
        rows, cols = profiles(q[:, :, q_prefix:], position, q_grid, k_grid)
        bias = (rows[..., :, None] + cols[..., None, :]).flatten(-2)
    else:
        bias = _joint_bias(q[:, :, q_prefix:], position, q_grid, k_grid)
    return F.pad(bias, (k_prefix, 0, q_prefix, 0)).to(q.dtype)


def profiles(q: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> tuple[Tensor, Tensor]:
    """The position score of each query patch towards every key row and every key column (separable tables).

    The score of query i and key j is ``rows[i, row of j] + cols[i, column of j]``: a sum of two small tensors, since a
    separable table is read per axis.

    Args:
        q: Patch queries, (B, H, len(q_grid), d).

    Returns:
        (B or 1, H, Lq, key rows) and (B or 1, H, Lq, key columns).
    """
    rows: Tensor | float = 0.0
    cols: Tensor | float = 0.0
    if "query" in position.tables:
        rh, rw = axis_lookup(position.tables["query"], q_grid, k_grid)
        grid = _table_queries(q, position).unflatten(2, (q_grid.rows, q_grid.cols))
        rows = torch.einsum("bhyxd,hykd->bhyxk", grid, rh)
        cols = torch.einsum("bhyxd,hxkd->bhyxk", grid, rw)
    if "bias" in position.tables:
        bh, bw = axis_lookup(position.tables["bias"], q_grid, k_grid)
        rows = rows + bh[None, :, :, None]
        cols = cols + bw[None, :, None, :]
    return tuple(p.expand(-1, -1, q_grid.rows, q_grid.cols, -1).flatten(2, 3) for p in (rows, cols))  # type: ignore


def _joint_bias(q: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> Tensor:
    q_coords, k_coords = q_grid.coords(q.device), k_grid.coords(q.device)
    dh, dw = (offsets(q_coords[:, axis], k_coords[:, axis]) for axis in (0, 1))
    bias: Tensor | float = 0.0
    if "query" in position.tables:
        table = position.tables["query"][0]
        # One product per entry of the table, then a gather: nothing of size Lq * Lk * d.
        per_entry = torch.einsum("bhid,hnmd->bhinm", _table_queries(q, position), table).flatten(-2)
        bias = per_entry.gather(-1, flat_index(table, dh, dw).expand(*q.shape[:2], -1, -1))
    if "bias" in position.tables:
        bias = bias + lookup(position.tables["bias"], dh, dw)[None]
    return bias  # type: ignore[return-value]


def _table_queries(q: Tensor, position: Position) -> Tensor:
    """What meets the query term's table: scaled queries plus scaled v, (B, H, Lq, d)."""
    scaled = position.scales["query"] * q
    if "v" in position.vectors:
        scaled = scaled + (position.scales["v"] * position.vectors["v"])[:, None]
    return scaled


def _add_u(q: Tensor, position: Position) -> Tensor:
    """q + u, so that the content product brings the u term with it; one scale serves both."""
    if "u" not in position.vectors:
        return q
    return q + (position.scales["u"] / position.scales["content"] * position.vectors["u"]).to(q.dtype)[:, None]


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
        return "dense", "fused attention with the position terms as an additive bias"
    if backend not in BACKENDS:
        close = difflib.get_close_matches(backend, ["auto", *BACKENDS], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"backend: {backend!r} is unknown, expected one of auto, {', '.join(BACKENDS)}{hint}")
    return backend, "asked for"
