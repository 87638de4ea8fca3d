"""Learned tables as maps: the query in the centre, the pixel at (dy, dx) the value towards the key down and right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrel.attention import RelativeAttention2d
from vitrel.lookup import lookup, within
from vitrel.position import Position
from vitrel.probe import Probe, Seen, in_parts, probes, scattered
from vitrel.terms import TERMS


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
            maps[name.removesuffix(".attn")] = _input_free_map(attn, terms, *_own(attn))
    return maps


def _own(attn: RelativeAttention2d) -> tuple[Position, tuple[int, int]]:
    """The position of a layer on the grid of its tables, and that grid (h, w)."""
    return attn.position_terms(attn.grid_size), attn.grid_size


class Coverage(NamedTuple):
    """What of a block's offsets was inside the grid that it was trained on.

    Attributes:
        grid: (h, w) in patches.
        inside: Boolean, (2h-1, 2w-1), oriented as a map.
        share: Share of the pairs of patches whose offset is inside.
    """

    grid: tuple[int, int]
    inside: Tensor
    share: float


def coverage(model: nn.Module, grid_size: tuple[int, int] | None = None) -> dict[str, Coverage]:
    """Which relative positions of a grid a model was trained on, per block.

    Entries that a table got when it was made larger count as trained from the first forward pass in training mode that
    reads them; a checkpoint keeps the count.

    Args:
        model: Any model with ``RelativeAttention2d`` layers.
        grid_size: (h, w) in patches, such as that of a batch under ``dynamic_img_size``; None for the model's own.

    Returns:
        Block name to ``Coverage``; blocks without a position term are left out.
    """
    result = {}
    for name, attn in model.named_modules():
        if isinstance(attn, RelativeAttention2d) and attn.rel_pos.terms:
            h, w = grid_size or attn.grid_size
            dy, dx = torch.arange(-(h - 1), h)[:, None], torch.arange(-(w - 1), w)[None]
            inside = attn.position_terms.covers(-dy, -dx)
            pairs = ((h - dy.abs()) * (w - dx.abs())).double()
            share = float((pairs * inside).sum() / pairs.sum())
            result[name.removesuffix(".attn")] = Coverage((h, w), inside, share)
    return result


@dataclass(frozen=True)
class TermMap:
    """A map per head of one thing that position does in a block.

    Attributes:
        title: What it is, in words.
        unit: Of its values.
        values: (H, 2h-1, 2w-1), float32 on the CPU, oriented as ``bias_maps``; NaN where no pair of patches was seen.
        signed: Whether values lie on both sides of zero, as summands of a score do and norms do not.
        spread: Standard deviation over queries and pictures, of the same shape, if it is a mean.
    """

    title: str
    unit: str
    values: Tensor
    signed: bool = True
    spread: Tensor | None = None


SCORE = "added to the score"


@torch.no_grad()
def term_maps(model: nn.Module, pictures: Seen | None = None) -> dict[str, dict[str, TermMap]]:
    """Every map that there is of a model, per block.

    * ``free``: what position adds whatever the picture, as ``bias_maps``: bias and s v.R;
    * ``query``, ``key``: the mean summand at each offset over the queries of the pictures, with its spread; without
      pictures the norms of the table's vectors;
    * ``rotary``: the mean score of turned queries and keys at each offset, with its spread; needs pictures;
    * ``value``: the norms of V(Δ), of what is added to the output;
    * ``kernel``: s W(Δ), the weight of the value of the patch there, beside its attention.

    The term u reads no place and has no map.

    Args:
        model: Any model with ``RelativeAttention2d`` layers.
        pictures: A batch that the model takes, (B, 3, h, w), normalised (a dozen are enough); or its ``probes``.

    Returns:
        Block name to the name of a map to ``TermMap``; blocks without any are left out.

    Raises:
        ValueError: If the patches of the pictures do not fill one grid.
    """
    seen = {} if pictures is None else probes(model, pictures)
    result: dict[str, dict[str, TermMap]] = {}
    for name, attn in model.named_modules():
        if not isinstance(attn, RelativeAttention2d):
            continue
        block, maps, terms = name.removesuffix(".attn"), dict[str, TermMap](), attn.rel_pos.terms
        probe = seen.get(block)
        position, grid = _own(attn) if probe is None else (probe.position, (probe.grid.rows, probe.grid.cols))
        if free := [t for t in terms if not TERMS[t].needs_input]:
            maps["free"] = TermMap("whatever the picture", SCORE, _input_free_map(attn, free, position, grid))
        if probe is not None:
            maps.update(_expected(probe))
        for term in (t for t in ("query", "key", "value") if t in terms and t not in maps):
            maps[term] = _norms(attn, term, position, grid)
        if "kernel" in terms:
            weights = position.scales["kernel"] * table_map(attn, position, "kernel", grid)
            maps["kernel"] = TermMap("kernel", "weight of the value", weights)
        if maps:
            result[block] = maps
    return result


def _expected(probe: Probe) -> dict[str, TermMap]:
    """Mean and spread at each offset of the terms that depend on the picture."""
    h, w = probe.grid.rows, probe.grid.cols
    keys = probe.grid.coords()[0]
    heads, size = probe.attn.num_heads, (2 * h - 1) * (2 * w - 1)
    sums: dict[str, Tensor] = {}
    count = torch.zeros(size, dtype=torch.float64)
    for queries, terms in in_parts(probe, scattered(probe.grid)):
        way = keys[None] - keys[queries][:, None]  # the key's place from the query: a map, not an offset
        entry = ((way[..., 0] + h - 1) * (2 * w - 1) + way[..., 1] + w - 1).flatten()
        count.index_add_(0, entry, torch.full(entry.shape, float(len(probe.x)), dtype=torch.float64))
        shown: dict[str, Tensor] = {t: terms[t] for t in ("query", "key") if t in terms}
        shown.update((t, terms["content"] + terms[t]) for t in ("rotary", "rotary_mixed") if t in terms)
        for term, summand in shown.items():
            both = torch.stack([summand.double().sum(0), summand.double().square().sum(0)]).flatten(2).cpu()
            sums.setdefault(term, torch.zeros(2, heads, size, dtype=torch.float64)).index_add_(2, entry, both)
    maps = {}
    for term, (total, squares) in ((t, s.unbind(0)) for t, s in sums.items()):
        mean = total / count
        spread = (squares / count - mean.square()).clamp(min=0).sqrt()
        mean, spread = (x.unflatten(1, (2 * h - 1, 2 * w - 1)).float() for x in (mean, spread))
        if term.startswith("rotary"):
            maps["rotary"] = TermMap("turned query and key, mean", "score", mean, spread=spread)
        else:
            maps[term] = TermMap(f"{term} term, mean", SCORE, mean, spread=spread)
    return maps


def _norms(attn: RelativeAttention2d, term: str, position: Position, grid: tuple[int, int]) -> TermMap:
    """Norms of the vectors of a table."""
    norms = table_map(attn, position, term, grid).norm(dim=-1)
    added = "norm, added to the output" if term == "value" else "norm of the table's vector"
    return TermMap(f"{term} term", added, norms, signed=False)


def table_map(attn: RelativeAttention2d, position: Position, term: str, grid: tuple[int, int]) -> Tensor:
    """The table that a term reads, unscaled, at each place of a map, (H, 2h-1, 2w-1[, d]), float32 on the CPU."""
    return _read(attn, position, term, grid).float().cpu()


def _read(attn: RelativeAttention2d, position: Position, term: str, grid: tuple[int, int]) -> Tensor:
    h, w = grid
    device = attn.proj.weight.device
    dy = torch.arange(-(h - 1), h, device=device)[:, None].expand(-1, 2 * w - 1)
    dx = torch.arange(-(w - 1), w, device=device)[None].expand(2 * h - 1, -1)
    read = lookup(position.tables[str(TERMS[term].reads)], position.axes, -dy[None], -dx[None])[0]
    return read.masked_fill(~within(position.axes, dy, dx), 0) if term == "kernel" else read


def _input_free_map(attn: RelativeAttention2d, terms: list[str], position: Position, grid: tuple[int, int]) -> Tensor:
    nothing = torch.empty(0, device=attn.proj.weight.device)
    summands = []
    for term in terms:
        vector = position.vectors.get(term, nothing)
        read = _read(attn, position, term, grid)[None]
        summands.append(position.scales[term] * TERMS[term].formula(nothing, nothing, vector, read)[0])
    return torch.stack(summands).sum(0).float().cpu()
