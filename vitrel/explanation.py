"""What each relative attention of a model does, and why: ``explain``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from vitrel.attention import RelativeAttention2d
from vitrel.backends import Case, extra_numbers, unsuited
from vitrel.kernel import by_rows


@dataclass(frozen=True)
class BlockReport:
    """What one attention layer does: its block's name, terms, backend, reason, and extra bytes per image."""

    block: str
    terms: str
    grid: str
    backend: str
    why: str
    extra_bytes: int


class Explanation(list[BlockReport]):
    """One ``BlockReport`` per relative attention; prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "no relative attention in this model"
        head = ("block", "terms", "grid", "backend", "extra MB", "why")
        rows = [(r.block, r.terms, r.grid, r.backend, f"{r.extra_bytes / 1e6:.2f}", r.why) for r in self]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
        )

    __repr__ = __str__


def explain(model: nn.Module) -> Explanation:
    """Per relative attention: the terms, the backend taken, why, and the bytes that position adds for one image.

    Says it for the model as it is: in training mode what a step takes, else what inference takes, not traced, on the
    device and with the type of its parameters, or of autocast where it is on. The bytes are what the forward pass holds
    for one image beyond plain fused attention, by count of the largest tensors.
    """
    reports = Explanation()
    for name, attn in model.named_modules():
        if isinstance(attn, RelativeAttention2d):
            terms = "+".join(attn.rel_pos.terms) or "none"
            grid = "x".join(map(str, attn.grid_size))
            backend, reason = "dense", "fused attention is off (timm.layers.set_fused_attn)"
            if attn.fused_attn:
                refused = None if attn.backend == "auto" else unsuited(attn.backend, _case(attn))
                backend = attn.backend if refused else attn.choose(_case(attn))
                reason = f"asked for, but {refused}: a call raises" if refused else attn.why(backend, _case(attn))
            if "kernel" in attn.rel_pos.terms:
                patches = math.prod(attn.grid_size)
                rows = backend != "reference" and by_rows(patches, patches)
                reason += f"; the kernel {'a row of queries at a time' if rows else 'as weights of all pairs'}"
            numbers = extra_numbers(backend, _case(attn), attn.position_terms.axes, attn.grid_size, attn.head_dim)
            size = attn.proj.weight.element_size()
            if backend in ("written", "blocked"):  # which compute in float32 at least
                size = max(size, 4)
            extra = numbers * attn.num_heads * size
            reports.append(BlockReport(name.removesuffix(".attn"), terms, grid, backend, reason, extra))
    return reports


def _case(attn: RelativeAttention2d) -> Case:
    tokens = attn.num_prefix_tokens + attn.grid_size[0] * attn.grid_size[1]
    dropout = attn.training and attn.attn_drop.p > 0
    device, dtype = attn.proj.weight.device.type, attn.proj.weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return Case(attn.rel_pos, tokens, device, grad=attn.training, dropout=dropout, half=dtype.itemsize == 2)
