"""Attention with its softmax written out, head by head, for short sequences on a CPU.

There the fused kernels give a bias no gradient, and most of a small product's time is copying: so each head's products
read q, k and v where they lie, the terms are added by the products themselves, and the weights are kept for a backward
pass that is written out as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.attend import dense_bias
from vitrel.firstorder import FirstOrder
from vitrel.folded import line_entries, one_hot_lines
from vitrel.grid import Grid, Where
from vitrel.lookup import Axes
from vitrel.masks import mask_scores
from vitrel.position import Position
from vitrel.profiles import content_inputs, prefix_bias


def written(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position,
    q_grid: Where,
    k_grid: Where,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention with kept weights; the arguments are those of ``attend.dense``. Returns (B, H, Lq, d).

    Without dropout and for masks that need no gradient. Its backward pass cannot be differentiated again.

    Raises:
        ValueError: If ``dropout_p`` is not 0, or a value term reads joint tables or ``Points``.
    """
    if dropout_p:
        raise ValueError("backend: 'written' has no attention dropout; use backend='auto', or set attn_drop to 0")
    terms, tables = set(position.terms), position.tables
    q_prefix, k_prefix = q.shape[2] - q_grid.patches, k.shape[2] - k_grid.patches
    lines = None
    if isinstance(q_grid, Grid) and isinstance(k_grid, Grid) and _separable(position):
        lines = _lines(position, q_grid, k_grid, q_prefix, k_prefix, like=q)
    if "value" in terms and lines is None:
        raise ValueError("backend: 'written' needs separable tables on full grids for a value term; use backend='auto'")
    bias = q_table = q_bias = k_table = None
    if lines is None or not {"query", "key"} & terms:
        bias = dense_bias(q, k, position, q_grid, k_grid)
    else:
        if position.prefix is not None:
            bias = prefix_bias(position.prefix, q_prefix, k_prefix, q.shape[2], k.shape[2])
        if {"query", "bias"} & terms:
            q_table, q_bias = position.recall(("query table", q.dtype), lambda: _query_table(position, like=q))
        if "key" in terms:
            k_table = position.recall("key table", lambda: position.scales["key"] * torch.cat(tables["key"], 1))
    u = raw_q = raw_k = None
    if position.frequencies is not None:
        raw_q, raw_k = q if q_table is not None else None, k if k_table is not None else None
        q, k = content_inputs(q, k, position, q_grid, k_grid)
    elif "u" in terms:
        u = position.scales["u"] / position.scales["content"] * position.vectors["u"]
    v_table = position.recall("value table", lambda: torch.cat(tables["value"], 1)) if "value" in terms else None
    tensors = [q, k, v, raw_q, raw_k, u, bias, q_table, q_bias, k_table, v_table]
    if torch.is_autocast_enabled(q.device.type):
        half = torch.get_autocast_dtype(q.device.type)
        tensors = [t if t is None else t.to(half) for t in tensors]
    return _Written.apply(position.scales["content"], lines, attn_mask, *tensors)


def _separable(position: Position) -> bool:
    return all(len(position.tables[t]) == 2 for t in ("bias", "query", "key", "value") if t in position.terms)


def _query_table(position: Position, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both axes' entries as they meet a query: (H, entries, d) scaled, and their input-free scores (H, entries)."""
    axes_entries = sum(axis.entries for axis in position.axes)
    table = like.new_zeros(like.shape[1], axes_entries, like.shape[-1])
    free = like.new_zeros(like.shape[1], axes_entries)
    if "query" in position.terms:
        raw = torch.cat(position.tables["query"], 1)
        table = position.scales["query"] * raw
        if "v" in position.terms:
            free = position.scales["v"] * (raw @ position.vectors["v"][..., None])[..., 0]
    if "bias" in position.terms:
        free = free + torch.cat(position.tables["bias"], 1)
    return table, free


@dataclass(frozen=True)
class _Lines:
    """Which table entry a patch reads for each row and column of the other grid, and on which lines patches lie.

    Attributes:
        q_entries: (query patches, key rows + key columns), into the entries of both axes side by side.
        k_entries: (key patches, query rows + query columns).
        q_lines: One-hot (Lq, query rows + query columns), 0 for prefix tokens.
        k_lines: One-hot (Lk, key rows + key columns).
    """

    q_prefix: int
    k_prefix: int
    q_entries: Tensor
    k_entries: Tensor
    q_lines: Tensor
    k_lines: Tensor


def _lines(position: Position, q_grid: Grid, k_grid: Grid, q_prefix: int, k_prefix: int, like: Tensor) -> _Lines:
    wide = torch.promote_types(like.dtype, torch.float32)
    make = _make_lines if type(like) is Tensor else _make_lines.__wrapped__  # a fake or functional tensor is not kept
    return make(position.axes, q_grid, k_grid, q_prefix, k_prefix, like.device, wide)


@lru_cache(maxsize=32)
def _make_lines(
    axes: Axes, q_grid: Grid, k_grid: Grid, q_prefix: int, k_prefix: int, device: torch.device, dtype: torch.dtype
) -> _Lines:
    entries, hot = [], []
    for grid, lines, sign in ((q_grid, k_grid, 1), (k_grid, q_grid, -1)):
        rows, cols = line_entries(axes, grid, lines, device, sign)
        entries.append(torch.cat([rows, cols + axes[0].entries], -1)[0])
    for grid, prefix in ((q_grid, q_prefix), (k_grid, k_prefix)):
        hot.append(F.pad(torch.cat(one_hot_lines(grid, device, dtype), -1)[0, 0], (0, 0, prefix, 0)))
    return _Lines(q_prefix, k_prefix, *entries, *hot)


def _profile(x: Tensor, table: Tensor, free: Tensor | None, entries: Tensor, prefix: int) -> Tensor:
    """Scores of tokens (B, L, d) towards the other grid's lines, (B, L, lines), 0 for prefix tokens."""
    patches = x[:, prefix:].reshape(-1, x.shape[-1])
    per_entry = patches @ table.T if free is None else torch.addmm(free, patches, table.T)
    profile = per_entry.view(len(x), x.shape[1] - prefix, len(table)).gather(-1, entries.expand(len(x), -1, -1))
    return F.pad(profile, (0, 0, prefix, 0)) if prefix else profile


def _per_entry(profile: Tensor, entries: Tensor, prefix: int, count: int) -> Tensor:
    """What a (B, L, lines) puts on each table entry, (B, patches, entries): the transpose of reading."""
    profile = profile[:, prefix:]
    zeros = profile.new_zeros(*profile.shape[:2], count)
    return zeros.scatter_add_(-1, entries.expand(len(profile), -1, -1), profile)


class _Written(torch.autograd.Function):
    """``softmax(scale * q k^T + ...) v``, one head at a time.

    Args:
        raw_q: What meets ``q_table``, where it is not q; ``raw_k`` likewise.
        u: (H, d), added to q.
        bias: (B or 1, H, Lq, Lk).
        q_table: (H, entries, d), read by ``lines.q_entries``, with input-free scores ``q_bias`` (H, entries).
        k_table: (H, entries, d), read by ``lines.k_entries``.
        v_table: (H, entries, d), summed with the weights of ``lines.q_entries``.
    """

    @staticmethod
    def forward(ctx: Any, scale: float, lines: Any, attn_mask: Tensor | None, *tensors: Any) -> Tensor:
        q, k, v, raw_q, raw_k, u, bias, q_table, q_bias, k_table, v_table = tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        batch, heads, length, _ = q.shape
        keys = k.shape[2]
        keep = any(ctx.needs_input_grad)
        weights = q.new_empty(heads if keep else 1, batch, length, keys, dtype=wide)
        scores = q.new_empty(batch, length, keys, dtype=wide)
        out = v.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        on_entries = []
        with torch.autocast(q.device.type, enabled=False):
            for h in range(heads):
                qs, ks, vs = (t[:, h].to(wide) for t in (q, k, v))
                qu = qs if u is None else qs + u[h].to(wide)
                if bias is None:
                    torch.baddbmm(scores, qu, ks.mT, beta=0, alpha=scale, out=scores)
                else:
                    torch.baddbmm(bias[:, h].to(wide), qu, ks.mT, alpha=scale, out=scores)
                if q_table is not None:
                    x = qs if raw_q is None else raw_q[:, h].to(wide)
                    profile = _profile(x, q_table[h].to(wide), q_bias[h].to(wide), lines.q_entries, lines.q_prefix)
                    scores.baddbmm_(profile, lines.k_lines.T.expand(batch, -1, -1))
                if k_table is not None:
                    x = ks if raw_k is None else raw_k[:, h].to(wide)
                    profile = _profile(x, k_table[h].to(wide), None, lines.k_entries, lines.k_prefix)
                    scores.baddbmm_(lines.q_lines.expand(batch, -1, -1), profile.mT)
                kept = weights[h if keep else 0]
                if attn_mask is None:
                    torch.softmax(scores, -1, out=kept)
                else:
                    masked, visible = mask_scores(scores, _head(attn_mask, h))
                    torch.softmax(masked, -1, out=kept).masked_fill_(~visible, 0)
                result = torch.bmm(kept, vs)
                if v_table is not None:
                    mass = torch.bmm(kept, lines.k_lines.expand(batch, -1, -1))
                    on_entries.append(_per_entry(mass, lines.q_entries, lines.q_prefix, v_table.shape[1]))
                    result[:, lines.q_prefix :] += on_entries[-1] @ v_table[h].to(wide)
                out[:, h] = result
        ctx.scale, ctx.lines = scale, lines
        ctx.save_for_backward(weights, *on_entries, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        saved = ctx.saved_tensors
        grads = FirstOrder.apply(
            "written", lambda: _gradients(ctx.scale, ctx.lines, grad_out, *saved), grad_out, *saved
        )
        return None, None, None, *grads


def _gradients(scale: float, lines: Any, grad_out: Tensor, weights: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    """Gradients of the eleven tensors of ``_Written``; ``saved`` are each head's weights on entries, then these."""
    on_entries, tensors = saved[:-11], saved[-11:]
    q, k, v, raw_q, raw_k, u, bias, q_table, _, k_table, v_table = tensors
    wide, batch = weights.dtype, len(q)
    grads: list[Any] = [_gradient(t, i < 5, wide) for i, t in enumerate(tensors)]
    dq, dk, dv, draw_q, draw_k, du, dbias, dq_table, dq_bias, dk_table, dv_table = grads
    with torch.autocast(q.device.type, enabled=False):
        for h in range(q.shape[1]):
            qs, ks, vs, grad = (t[:, h].to(wide) for t in (q, k, v, grad_out))
            qu = qs if u is None else qs + u[h].to(wide)
            torch.bmm(weights[h].mT, grad, out=dv[h])
            grad_weights = torch.bmm(grad, vs.mT)
            if v_table is not None:
                patches = grad[:, lines.q_prefix :]
                mass = _profile(grad, v_table[h].to(wide), None, lines.q_entries, lines.q_prefix)
                grad_weights.baddbmm_(mass, lines.k_lines.T.expand(batch, -1, -1))
                dv_table[h] = on_entries[h].flatten(0, 1).T @ patches.flatten(0, 1)
            grad_scores = torch._softmax_backward_data(grad_weights, weights[h], -1, wide)
            torch.baddbmm(dq[h], grad_scores, ks, beta=0, alpha=scale, out=dq[h])
            torch.baddbmm(dk[h], grad_scores.mT, qu, beta=0, alpha=scale, out=dk[h])
            if u is not None:
                du[h] = dq[h].sum((0, 1))
            if bias is not None:
                dbias[:, h] = grad_scores if len(bias) == batch else grad_scores.sum(0, keepdim=True)
            if q_table is not None:
                x, dx = (qs, dq[h]) if raw_q is None else (raw_q[:, h].to(wide), draw_q[h])
                profile = torch.bmm(grad_scores, lines.k_lines.expand(batch, -1, -1))
                per_entry = _per_entry(profile, lines.q_entries, lines.q_prefix, q_table.shape[1])
                dq_table[h] = per_entry.flatten(0, 1).T @ x[:, lines.q_prefix :].flatten(0, 1)
                dq_bias[h] = per_entry.sum((0, 1))
                dx[:, lines.q_prefix :] += per_entry @ q_table[h].to(wide)
            if k_table is not None:
                x, dx = (ks, dk[h]) if raw_k is None else (raw_k[:, h].to(wide), draw_k[h])
                profile = torch.bmm(grad_scores.mT, lines.q_lines.expand(batch, -1, -1))
                per_entry = _per_entry(profile, lines.k_entries, lines.k_prefix, k_table.shape[1])
                dk_table[h] = per_entry.flatten(0, 1).T @ x[:, lines.k_prefix :].flatten(0, 1)
                dx[:, lines.k_prefix :] += per_entry @ k_table[h].to(wide)
    grads = [g if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)]
    return tuple(g.transpose(0, 1) if g is not None and i < 5 else g for i, g in enumerate(grads))


def _gradient(x: Tensor | None, by_head: bool, wide: torch.dtype) -> Tensor | None:
    """Room for a gradient, zeros; with the heads first for q, k, v, raw_q and raw_k."""
    if x is None:
        return None
    return x.new_zeros((x.shape[1], x.shape[0], *x.shape[2:]) if by_head else x.shape, dtype=wide)


def _head(attn_mask: Tensor, head: int) -> Tensor:
    """A head's part of a mask that broadcasts to (B, H, Lq, Lk), to broadcast to (B, Lq, Lk)."""
    if attn_mask.ndim < 3:
        return attn_mask
    return attn_mask.select(-3, head if attn_mask.shape[-3] > 1 else 0)
