"""The kernel term: a convolution of the values beside the attention matrix (Dai et al., CoAtNet, arXiv 2106.04803).

As weights of all pairs of patches, or on large full grids a row of queries at a time, from weights by offset of rows.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid, Where, offsets
from vitrel.lookup import lookup, within
from vitrel.masks import seen_pairs
from vitrel.position import Position
from vitrel.profiles import patch_offsets
from vitrel.tracing import traced

# Patches from which a kernel is faster a row of queries at a time, on full grids. On 1 CPU core (avx2) one run of both
# ways gave, forward and backward, 1.16 times the time of weights of all pairs at 14x14, 0.75 at 20x20, 0.33 at 32x32.
BY_ROWS_FROM = 400


def by_rows(q_patches: int, k_patches: int) -> bool:
    """Whether a kernel between full grids of this size is taken a row of queries at a time."""
    return q_patches * k_patches >= BY_ROWS_FROM**2


def kernel_weights(position: Position, q_grid: Where, k_grid: Where, device: torch.device) -> Tensor:
    """s W(Δ) of the kernel term between patches, (B or 1, H, Lq, Lk); 0 where ``clamp`` would repeat the last entry."""
    return _read(position, *patch_offsets(q_grid, k_grid, device))


def row_weights(position: Position, q_grid: Grid, k_grid: Grid, device: torch.device) -> Tensor:
    """s W(Δ) for each offset of rows, (H, query columns, query rows + key rows - 1, key columns).

    The key rows of query row i are ``[:, :, n - 1 - i : n - 1 - i + key rows]`` for n query rows, in their order.
    """
    above = q_grid.top + q_grid.rows - 1 - k_grid.top  # of the last query row from the first key row
    dh = above - torch.arange(q_grid.rows + k_grid.rows - 1, device=device)
    dw = offsets(q_grid.col_coords(device), k_grid.col_coords(device))
    shape = (1, q_grid.cols, len(dh), k_grid.cols)
    return _read(position, dh[:, None].expand(shape), dw[:, None].expand(shape))[0]


def _read(position: Position, dh: Tensor, dw: Tensor) -> Tensor:
    weights = position.scales["kernel"] * lookup(position.tables["kernel"], position.axes, dh, dw)
    return weights.masked_fill(~within(position.axes, dh, dw)[:, None], 0)


def add_kernel(
    out: Tensor,
    v: Tensor,
    position: Position,
    q_grid: Where,
    k_grid: Where,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """``out + s Σ_j W(Δ) v_j`` between patches, if the kernel term is on; a hidden key has weight 0.

    Args:
        out: What attention gave, (B, H, Lq, d).
        v: (B, H, Lk, d).
        attn_mask: As in attention.

    Returns:
        (B, H, Lq, d).
    """
    if "kernel" not in position.terms:
        return out
    q_prefix, k_prefix = out.shape[2] - q_grid.patches, v.shape[2] - k_grid.patches
    values, seen = v[:, :, k_prefix:], None
    if attn_mask is not None:
        seen = seen_pairs(attn_mask)
        if seen.shape[-2] == 1:  # the weights stay those of all images
            seen = seen.expand(*seen.shape[:-1], v.shape[2])[..., k_prefix:]
            values, seen = values.masked_fill(~seen.mT, 0), None
        else:
            seen = seen.expand(*seen.shape[:-2], out.shape[2], v.shape[2])[..., q_prefix:, k_prefix:]
    full = isinstance(q_grid, Grid) and isinstance(k_grid, Grid)
    if full and seen is None and by_rows(q_grid.patches, k_grid.patches) and not traced():
        term = _convolve_rows(values, position, cast(Grid, q_grid), cast(Grid, k_grid))
    else:
        term = _weigh_pairs(values, position, q_grid, k_grid, seen)
    return out + F.pad(term, (0, 0, q_prefix, 0))


def _weigh_pairs(values: Tensor, position: Position, q_grid: Where, k_grid: Where, seen: Tensor | None) -> Tensor:
    """s Σ_j W(Δ) v_j for values (B, H, Lk, d) of the patches that a query sees, (B, H, Lq, d)."""

    def make() -> Tensor:
        return kernel_weights(position, q_grid, k_grid, values.device).to(values.dtype)

    full = isinstance(q_grid, Grid) and isinstance(k_grid, Grid)
    weights = position.recall(("kernel", q_grid, k_grid, values.dtype), make) if full else make()
    weights = weights if seen is None else weights * seen
    if len(weights) == 1:  # one product per head for all images
        return torch.einsum("hij,bhjd->bhid", weights[0], values)
    return torch.einsum("bhij,bhjd->bhid", weights, values)


def _convolve_rows(values: Tensor, position: Position, q_grid: Grid, k_grid: Grid) -> Tensor:
    """The same on full grids where every query sees all of them, without weights of all pairs."""
    batch, heads, _, d = values.shape
    wide = torch.promote_types(values.dtype, torch.float32)

    def make() -> Tensor:
        return row_weights(position, q_grid, k_grid, values.device).to(wide)

    weights = position.recall(("kernel by rows", q_grid, k_grid, wide), make)
    by_head = values.to(wide).permute(1, 2, 0, 3).reshape(heads, k_grid.rows, k_grid.cols, batch * d)
    shapes = {
        "weights": tuple(weights.shape),
        "values": tuple(by_head.shape),
        "out": (heads, q_grid.rows, q_grid.cols, batch * d),
    }
    with torch.autocast(values.device.type, enabled=False):
        term = _ByRows.apply(shapes, "out", weights, by_head)
    return term.view(heads, q_grid.patches, batch, d).permute(2, 0, 1, 3).to(values.dtype)


class _ByRows(torch.autograd.Function):
    """Σ weights · values · out over heads, rows and columns, but for one of the three, which is returned.

    ``weights`` (H, query columns, query rows + key rows - 1, key columns), ``values`` (H, key rows, key columns, n) and
    ``out`` (H, query rows, query columns, n). Its gradients are of the same kind, so that it differentiates at will.
    """

    @staticmethod
    def forward(ctx: Any, shapes: dict[str, tuple[int, ...]], wanted: str, *given: Tensor) -> Tensor:
        ctx.shapes, ctx.wanted = shapes, wanted
        ctx.save_for_backward(*given)
        parts = dict(zip(_others(wanted), given, strict=True))
        result = parts[wanted] = given[0].new_zeros(shapes[wanted])
        weights, values, out = parts["weights"], parts["values"].flatten(1, 2), parts["out"]
        rows, keys = out.shape[1], parts["values"].shape[1]
        for i in range(rows):
            first = rows - 1 - i
            row, at = weights[:, :, first : first + keys].flatten(2), out[:, i]
            if wanted == "out":
                torch.bmm(row, values, out=at)
            elif wanted == "values":
                values.baddbmm_(row.mT, at)
            else:
                row.baddbmm_(at, values.mT)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given = _others(ctx.wanted)
        parts = dict(zip(given, ctx.saved_tensors, strict=True)) | {ctx.wanted: grad.contiguous()}
        grads: list[Tensor | None] = [None, None]
        for role, needed in zip(given, ctx.needs_input_grad[2:], strict=True):
            others = (parts[other] for other in _others(role))
            grads.append(_ByRows.apply(ctx.shapes, role, *others) if needed else None)
        return tuple(grads)


def _others(role: str) -> list[str]:
    return [r for r in ("weights", "values", "out") if r != role]
