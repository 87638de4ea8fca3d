"""Attention over a few grid rows of queries at a time, for large grids on a CPU.

A block's bias is built from the row and column profiles, used and dropped; the backward pass builds it again. So the
memory is that of the profiles and of one block, at about the speed of a bias that was there before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.attend import biased_attention, dense
from vitrel.firstorder import FirstOrder
from vitrel.grid import Grid
from vitrel.masks import mask_scores
from vitrel.position import Position
from vitrel.profiles import content_inputs, key_profiles, prefix_bias, query_profiles, table_values

BLOCK_QUERIES, BLOCK_BYTES = 256, 8 << 20  # of one float32 block of scores: measured best at 32x32 and 64x64


def blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position,
    q_grid: Grid,
    k_grid: Grid,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention in blocks of query rows; the arguments are those of ``attend.dense``. Returns (B, H, Lq, d).

    For separable tables on full grids, without dropout and for masks that need no gradient. Its backward pass cannot be
    differentiated again.

    Raises:
        ValueError: If ``dropout_p`` is not 0.
    """
    if dropout_p:
        raise ValueError("backend: 'blocked' has no attention dropout; use backend='auto', or set attn_drop to 0")
    if not len(q):
        return dense(q, k, v, position, q_grid, k_grid, attn_mask)
    if "key" not in position.terms and not {"bias", "query", "value"} & set(position.terms) and position.prefix is None:
        q, k = content_inputs(q, k, position, q_grid, k_grid)
        return biased_attention(q, k, v, None, position.scales["content"], attn_mask)
    q_prefix, k_prefix, scale = q.shape[2] - q_grid.patches, k.shape[2] - k_grid.patches, position.scales["content"]
    profiles = _profiles(q[:, :, q_prefix:], k[:, :, k_prefix:], position, q_grid, k_grid)
    q, k = content_inputs(q, k, position, q_grid, k_grid)
    tensors = [q[:, :, q_prefix:], k, v, *profiles.values()]
    if torch.is_autocast_enabled(q.device.type):
        tensors = [t.to(torch.get_autocast_dtype(q.device.type)) for t in tensors]
    plan = _Plan(q_grid, k_grid, k_prefix, scale, tuple(profiles), "value" in position.terms)
    out, rows, cols = _Blocked.apply(plan, _cut(attn_mask, -2, slice(q_prefix, None)), *tensors)
    if "value" in position.terms:
        out = out + table_values(rows, cols, position, q_grid, k_grid).to(out.dtype)
    if not q_prefix:
        return out
    bias = None
    if position.prefix is not None:
        bias = prefix_bias(position.prefix, q_prefix, k_prefix, q_prefix, k.shape[2]).to(q.dtype)
    mask = _cut(attn_mask, -2, slice(0, q_prefix))
    return torch.cat([biased_attention(q[:, :, :q_prefix], k, v, bias, scale, mask).to(out.dtype), out], 2)


def block_numbers(grid: Grid, keys: int) -> int:
    """Scores of one head in a block."""
    return grid.cols * keys * _rows_of_block(grid, 4 * grid.cols * keys)


def _rows_of_block(grid: Grid, row_bytes: int) -> int:
    return min(grid.rows, max(1, BLOCK_QUERIES // grid.cols), max(1, BLOCK_BYTES // row_bytes))


def _profiles(q: Tensor, k: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> dict[str, Tensor]:
    profiles = {}
    if {"bias", "query"} & set(position.terms):
        profiles["rows"], profiles["cols"] = query_profiles(q, position, q_grid, k_grid)
    if "key" in position.terms:
        profiles["key_rows"], profiles["key_cols"] = key_profiles(k, position, q_grid, k_grid)
    if position.prefix is not None:
        profiles["from_patch"] = position.prefix[None, :, 1, None, None, None]
    return profiles


def _cut(x: Tensor | None, dim: int, part: slice) -> Tensor | None:
    """A part of one dimension, the whole where it is broadcast or absent."""
    if x is None or x.ndim < -dim or x.shape[dim] == 1:
        return x
    index: list[Any] = [..., part, *[slice(None)] * (-1 - dim)]
    return x[tuple(index)]


@dataclass(frozen=True)
class _Plan:
    """What the blocks need besides tensors; ``names`` are those of the profiles, in the order of the arguments."""

    q_grid: Grid
    k_grid: Grid
    k_prefix: int
    scale: float
    names: tuple[str, ...]
    value: bool

    def blocks(self, batch: int, heads: int) -> Iterator[tuple[slice, slice, slice]]:
        """Samples, heads and grid rows of each block."""
        one = 4 * self.q_grid.cols * (self.k_prefix + self.k_grid.patches)  # a head's scores of one row of queries
        n_rows = _rows_of_block(self.q_grid, one)
        n_heads = min(heads, max(1, BLOCK_BYTES // (one * n_rows)))
        n_batch = min(batch, max(1, BLOCK_BYTES // (one * n_heads * n_rows)))
        for b in range(0, batch, n_batch):
            for h in range(0, heads, n_heads):
                for y in range(0, self.q_grid.rows, n_rows):
                    yield slice(b, b + n_batch), slice(h, h + n_heads), slice(y, min(y + n_rows, self.q_grid.rows))

    def tokens(self, rows: slice) -> slice:
        return slice(rows.start * self.q_grid.cols, rows.stop * self.q_grid.cols)

    def parts(self, profiles: Sequence[Tensor], b: slice, h: slice, rows: slice) -> dict[str, Tensor]:
        """A block's part of each profile, as a view."""
        parts = {}
        for name, profile in zip(self.names, profiles, strict=True):
            part = profile[b if profile.shape[0] > 1 else slice(None), h]
            along_rows = name != "key_cols" and profile.shape[2] > 1
            parts[name] = part[:, :, rows] if along_rows else part
        return parts

    def bias(
        self, parts: dict[str, Tensor], n_rows: int, attn_mask: Tensor | None, like: Tensor, room: _Room
    ) -> tuple[Tensor, Tensor | None]:
        """A block's bias, (B or 1, H, queries, Lk), and which of its queries see a key."""
        batch = max([1, *(part.shape[0] for part in parts.values())])
        shape = (batch, like.shape[1], n_rows, self.q_grid.cols, self.k_prefix + self.k_grid.patches)
        bias = room("bias", shape, like.dtype)
        bias[..., : self.k_prefix] = parts.get("from_patch", 0)
        between = bias[..., self.k_prefix :]
        if "rows" in parts:
            by_line = between.unflatten(-1, (self.k_grid.rows, self.k_grid.cols))
            rows = parts["rows"][..., :, None].expand(by_line.shape)  # a bias has one sample, beside a key term's many
            torch.add(rows, parts["cols"][..., None, :], out=by_line)
        else:
            between.zero_()
        if "key_rows" in parts:
            between += parts["key_rows"][:, :, :, None]
            between += parts["key_cols"][:, :, None]
        bias = bias.flatten(2, 3)
        if attn_mask is None:
            return bias, None
        return mask_scores(bias.expand(torch.broadcast_shapes(bias.shape, attn_mask.shape)), attn_mask)

    def add_gradients(self, parts: dict[str, Tensor], grad_scores: Tensor) -> None:
        """Add to the gradients of a block's profiles what its scores' (B, H, rows, columns, Lk) gives."""
        grad = grad_scores[..., self.k_prefix :]
        if "from_patch" in parts:
            parts["from_patch"] += grad_scores[..., : self.k_prefix].sum((0, 2, 3, 4))[None, :, None, None, None]
        if "key_rows" in parts:
            parts["key_rows"] += grad.sum(3)
            parts["key_cols"] += grad.sum(2)
        if "rows" in parts:
            if parts["rows"].shape[0] == 1:
                grad = grad.sum(0, keepdim=True)
            grad = grad.unflatten(-1, (self.k_grid.rows, self.k_grid.cols))
            parts["rows"] += grad.sum(-1).sum_to_size(parts["rows"].shape)
            parts["cols"] += grad.sum(-2).sum_to_size(parts["cols"].shape)


class _Room:
    """Buffers of the size of the largest block, which all blocks use in turn."""

    def __init__(self, plan: _Plan, q: Tensor, keys: int) -> None:
        b, h, rows = next(plan.blocks(*q.shape[:2]))
        queries = (rows.stop - rows.start) * plan.q_grid.cols
        self._numbers = len(range(*b.indices(len(q)))) * len(range(*h.indices(q.shape[1]))) * queries * keys
        self._like = q
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if (name, dtype) not in self._buffers:
            self._buffers[name, dtype] = self._like.new_empty(self._numbers, dtype=dtype)
        return self._buffers[name, dtype][: math.prod(shape)].view(shape)


def _weights(
    q: Tensor, k: Tensor, bias: Tensor, visible: Tensor | None, scale: float, room: _Room
) -> tuple[Tensor, Tensor]:
    """Softmax weights of a block, (B * H, queries, Lk), in the type of q, and a buffer of their shape to use."""
    shape = (q.shape[0] * q.shape[1], q.shape[2], k.shape[2])
    if bias.shape[:2] == q.shape[:2] and bias.dtype == q.dtype and bias.is_contiguous():
        scores = bias.view(shape)
    else:
        scores = room("scores", shape, q.dtype)
        scores.unflatten(0, q.shape[:2]).copy_(bias)
    scores.baddbmm_(q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
    weights = torch.softmax(scores, -1, out=room("weights", shape, q.dtype))
    if visible is not None:
        weights.masked_fill_(~visible.expand(*q.shape[:3], 1).flatten(0, 1), 0)
    return weights, scores


class _Blocked(torch.autograd.Function):
    """``(plan, attn_mask, q, k, v, *profiles) -> out, mass on key rows, mass on key columns`` of the patch queries.

    The masses (B, H, Lq, key rows) and (B, H, Lq, key columns) are empty without a value term.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, attn_mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *profiles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(attn_mask, q, k, v, *profiles)
        batch, heads, length, _ = q.shape
        out = v.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        k_rows, k_cols = (plan.k_grid.rows, plan.k_grid.cols) if plan.value else (0, 0)
        on_rows, on_cols = v.new_empty(batch, heads, length, k_rows), v.new_empty(batch, heads, length, k_cols)
        wide, room = torch.promote_types(q.dtype, torch.float32), _Room(plan, q, k.shape[2])
        with torch.autocast(q.device.type, enabled=False):
            for b, h, rows in plan.blocks(batch, heads):
                i = plan.tokens(rows)
                qs, ks, vs = q[b, h, i], k[b, h], v[b, h]
                mask = _cut(_cut(_cut(attn_mask, -4, b), -3, h), -2, i)
                bias, visible = plan.bias(plan.parts(profiles, b, h, rows), rows.stop - rows.start, mask, qs, room)
                if not plan.value:
                    part = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=bias, scale=plan.scale)
                    out[b, h, i] = part if visible is None else part.masked_fill(~visible, 0)
                    continue
                weights, _ = _weights(qs.to(wide), ks.to(wide), bias, visible, plan.scale, room)
                out[b, h, i] = (weights @ vs.flatten(0, 1).to(wide)).unflatten(0, qs.shape[:2])
                mass = weights[..., plan.k_prefix :].unflatten(-1, (k_rows, k_cols)).unflatten(0, qs.shape[:2])
                on_rows[b, h, i], on_cols[b, h, i] = mass.sum(-1), mass.sum(-2)
        return out, on_rows, on_cols

    @staticmethod
    def backward(ctx: Any, *grads_out: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        grads = FirstOrder.apply("blocked", lambda: _gradients(ctx.plan, grads_out, *saved), *grads_out, *saved)
        return None, None, *grads


def _gradients(
    plan: _Plan, grads_out: tuple[Tensor | None, ...], attn_mask: Tensor | None, *saved: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and the profiles of ``_Blocked``."""
    grad_out, grad_rows, grad_cols = grads_out
    wide = torch.promote_types(saved[0].dtype, torch.float32)
    q, k, v = (t.to(wide).contiguous() for t in saved[:3])
    profiles, room = saved[3:], _Room(plan, q, k.shape[2])
    grad_out = torch.zeros_like(q) if grad_out is None else grad_out.to(wide)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    grads = [torch.zeros_like(p, dtype=wide, memory_format=torch.contiguous_format) for p in profiles]
    with torch.autocast(q.device.type, enabled=False):
        for b, h, rows in plan.blocks(*q.shape[:2]):
            i = plan.tokens(rows)
            qs, ks = q[b, h, i], k[b, h]
            shape = (*qs.shape[:2], rows.stop - rows.start, plan.q_grid.cols)
            mask = _cut(_cut(_cut(attn_mask, -4, b), -3, h), -2, i)
            bias, visible = plan.bias(plan.parts(profiles, b, h, rows), shape[2], mask, saved[0][b, h, i], room)
            weights, buffer = _weights(qs, ks, bias, visible, plan.scale, room)
            grad = grad_out[b, h, i].flatten(0, 1)
            grad_weights = torch.bmm(grad, v[b, h].flatten(0, 1).mT, out=buffer)
            if grad_rows is not None or grad_cols is not None:
                by_line = grad_weights[..., plan.k_prefix :].unflatten(-1, (plan.k_grid.rows, plan.k_grid.cols))
                for mass, dim in ((grad_rows, -1), (grad_cols, -2)):
                    if mass is not None:
                        by_line += mass[b, h, i].flatten(0, 1).to(wide).unsqueeze(dim)
            grad_scores = room("gradient", tuple(weights.shape), wide)
            torch._softmax_backward_data(grad_weights, weights, -1, wide, grad_input=grad_scores)
            plan.add_gradients(plan.parts(grads, b, h, rows), grad_scores.view(*shape, -1))
            grad_q[b, h, i] = (grad_scores @ ks.flatten(0, 1)).mul_(plan.scale).unflatten(0, shape[:2])
            grad_k[b, h] += (grad_scores.mT @ qs.flatten(0, 1)).mul_(plan.scale).unflatten(0, shape[:2])
            grad_v[b, h] += (weights.mT @ grad).unflatten(0, shape[:2])
    return tuple(g.to(t.dtype) for g, t in zip([grad_q, grad_k, grad_v, *grads], saved, strict=True))
