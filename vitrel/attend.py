"""Attention with relative position: the readable reference and the dense form.

All forms take ``q`` (B, H, Lq, d), ``k`` and ``v`` (B, H, Lk, d), a ``Position``, and where queries and keys lie: a
``Grid``, or ``Points`` per sample. Tokens before the patches are prefix tokens: Lq - q_grid.patches among the queries,
Lk - k_grid.patches among the keys. A mask is boolean (True = attend) or additive, broadcastable to (B, H, Lq, Lk), and
comes after the sum of all terms; a hidden key has weight exactly 0, and a row without a visible key gives 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid, Where
from vitrel.kernel import kernel_weights
from vitrel.lookup import lookup
from vitrel.masks import mask_scores, masked_softmax, seen_pairs
from vitrel.position import Position
from vitrel.profiles import (
    content_inputs,
    gather_scores,
    key_profiles,
    patch_offsets,
    prefix_bias,
    query_profiles,
    scatter_values,
    sum_of,
    table_entries,
    table_queries,
    table_values,
)
from vitrel.rotary import rotate
from vitrel.terms import CONTENT, TERMS


def reference_terms(q: Tensor, k: Tensor, position: Position, q_grid: Where, k_grid: Where) -> dict[str, Tensor]:
    """Each term's summand of the scores, straight from its formula.

    Builds R(Δ) for every pair, of size H * Lq * Lk * d: made to be read and to test against, not to be fast.

    Returns:
        Term name (``content`` first, ``prefix`` last) to (B, H, Lq, Lk); 0 where a term does not reach prefix tokens.
        Terms of the output are left out.
    """
    q_prefix, k_prefix = q.shape[2] - q_grid.patches, k.shape[2] - k_grid.patches
    dh, dw = patch_offsets(q_grid, k_grid, q.device)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    nothing = q.new_empty(0)
    content = CONTENT.formula(q, k, nothing, nothing)
    terms = {"content": position.scales["content"] * content}
    for name in position.terms:
        term = TERMS[name]
        if term.output:
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
    """The formulas as written: scores, mask, softmax, weighted sum of v + V(Δ), and s W(Δ) v. Returns (B, H, Lq, d)."""
    weights = masked_softmax(reference_scores(q, k, position, q_grid, k_grid), attn_mask)
    weights = F.dropout(weights, dropout_p)
    out = weights @ v
    q_prefix, k_prefix = q.shape[2] - q_grid.patches, k.shape[2] - k_grid.patches
    between, values = weights[:, :, q_prefix:, k_prefix:], v[:, :, k_prefix:]
    for name in (t for t in position.terms if TERMS[t].output):
        if name == "kernel":
            table = kernel_weights(position, q_grid, k_grid, q.device)
            if attn_mask is not None:
                table = table * seen_pairs(attn_mask).expand(weights.shape)[:, :, q_prefix:, k_prefix:]
        else:
            table = lookup(position.tables[name], position.axes, *patch_offsets(q_grid, k_grid, q.device))
        out = out + F.pad(TERMS[name].formula(between, values, values, table), (0, 0, q_prefix, 0))
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

    A value term needs the weights, so that its softmax is written out. The kernel term is ``kernel.add_kernel``'s.
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
