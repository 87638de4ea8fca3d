"""Learned tables as maps: the query in the centre, the pixel at (dy, dx) the value towards the key down and right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrel.attention import RelativeAttention2d
from vitrel.relpos import TERMS
from vitrel.tables import lookup


@torch.no_grad()
def bias_maps(model: nn.Module) -> dict[str, Tensor]:
    """What position adds to the score whatever the image, per block and head.

    Sums the terms that need no input: ``bias`` and, for Transformer-XL, ``s * v.R``.

    Args:
        model: Any model with ``RelativeAttention2d`` layers.

    Returns:
        Block name to (H, 2h-1, 2w-1), float32 on the CPU. Entry ``[head, h-1+dy, w-1+dx]`` is the summand of the score
        for a key dy rows below and dx columns right of the query: the table at offset (-dy, -dx). Blocks without such a
        term are left out.
    """
    maps = {}
    for name, attn in model.named_modules():
        if not isinstance(attn, RelativeAttention2d):
            continue
        terms = [t for t in attn.rel_pos.terms if not TERMS[t].needs_input]
        if terms:
            maps[name.removesuffix(".attn")] = _input_free_map(attn, terms)
    return maps


class Coverage(NamedTuple):
    """What of a block's offsets was inside the grid that it was trained on.

    Attributes:
        grid: (h, w) of the present grid, in patches.
        inside: Boolean, (2h-1, 2w-1), oriented as a map.
        share: Share of the pairs of patches whose offset is inside.
    """

    grid: tuple[int, int]
    inside: Tensor
    share: float


def coverage(model: nn.Module) -> dict[str, Coverage]:
    """Which relative positions of the present grid a model was trained on, per block.

    Entries that a table got when it was made larger count as trained from the first forward pass in training mode that
    reads them; a checkpoint keeps the count.

    Returns:
        Block name to ``Coverage``; blocks without a position term are left out.
    """
    result = {}
    for name, attn in model.named_modules():
        if isinstance(attn, RelativeAttention2d) and attn.rel_pos.terms:
            h, w = attn.grid_size
            dy, dx = torch.arange(-(h - 1), h)[:, None], torch.arange(-(w - 1), w)[None]
            inside = attn.position_terms.covers(-dy, -dx)
            pairs = ((h - dy.abs()) * (w - dx.abs())).double()
            share = float((pairs * inside).sum() / pairs.sum())
            result[name.removesuffix(".attn")] = Coverage(attn.grid_size, inside, share)
    return result


def _input_free_map(attn: RelativeAttention2d, terms: list[str]) -> Tensor:
    position, (h, w) = attn.position_terms(attn.grid_size), attn.grid_size
    device = attn.proj.weight.device
    dy = torch.arange(-(h - 1), h, device=device)[:, None].expand(-1, 2 * w - 1)
    dx = torch.arange(-(w - 1), w, device=device)[None].expand(2 * h - 1, -1)
    nothing = torch.empty(0, device=device)
    summands = []
    for term in terms:
        read = lookup(position.tables[TERMS[term].reads], position.axes, -dy[None], -dx[None])
        vector = position.vectors.get(term, nothing)
        summands.append(position.scales[term] * TERMS[term].formula(nothing, nothing, vector, read)[0])
    return torch.stack(summands).sum(0).float().cpu()
