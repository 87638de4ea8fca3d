"""How a table follows another grid: the rules by which its entries are resized."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vitrel.grid import AxisDistance


def _edge(new: Tensor, old: int, size: int) -> Tensor:
    """Keep every entry at its offset; beyond the old distance, the last entry."""
    return new.clamp(-old, old)


def _interpolate(new: Tensor, old: int, size: int) -> Tensor:
    """Stretch the whole axis: the largest offset keeps the last entry."""
    return new * (old / max(size, 1))


@functools.cache
def _ratio(old: int, size: int) -> float:
    """q with 1 + q + ... + q^(old-1) = size."""
    low, high = 1.01, 10.0
    for _ in range(100):
        ratio = (low + high) / 2
        low, high = (ratio, high) if sum(ratio**n for n in range(old)) < size else (low, ratio)
    return ratio


def _geometric(new: Tensor, old: int, size: int) -> Tensor:
    """BEiT's: entries near the centre keep their offsets, those further out lie in geometric progression.

    Its ratio is 1.01 at least, so that a smaller grid gets nearly the centre of the table, and not all of it squeezed.
    """
    if old == 0 or size == 0 or old == size:
        return _interpolate(new, old, size)
    ratio = _ratio(old, size)
    places = torch.cumsum(torch.tensor([0.0] + [ratio**n for n in range(old)], dtype=torch.float64), 0)
    places[-1] = max(float(places[-1]), size)
    distance = new.abs()
    right = torch.searchsorted(places, distance.contiguous()).clamp(1, old)
    left = right - 1
    return new.sign() * (left + (distance - places[left]) / (places[right] - places[left]))


RESIZE = {"clamp": _edge, "crop": _edge, "interpolate": _interpolate, "geometric": _geometric}


def resize_table(
    table: Tensor, old: tuple[AxisDistance, ...], new: tuple[AxisDistance, ...], rule: str, *, sums: bool = False
) -> Tensor:
    """Fit a table to other distances, axis by axis and linearly in between; zero offset keeps its entry exactly.

    Args:
        table: (H, entries[, entries][, d]).
        old: Distance map of each axis of the table.
        new: Distance maps to fit.
        rule: ``clamp`` and ``crop`` keep entries at their offsets (further ones repeat the last), ``interpolate``
            stretches, ``geometric`` stretches the far end more (BEiT). Computed in float32 at least.
        sums: Entries are weights in a sum over keys: each is multiplied by the part of an old entry that it stands for,
            so that a stretched table keeps its sum, and one that repeats its last entry adds nothing.

    Returns:
        The same tensor if no axis changes.
    """
    wide = table
    for dim, (a, b) in enumerate(zip(old, new, strict=True), start=1):
        if a.size == b.size or a.kind != "clamp":
            continue
        offset = torch.arange(-b.size if b.directed else 0, b.size + 1, dtype=torch.float64)
        place = RESIZE[rule](offset, a.size, b.size)
        inner = RESIZE[rule](offset - torch.where(offset == 0, -1.0, offset.sign()), a.size, b.size)
        part = (place - inner).abs()
        place = place + (a.size if a.directed else 0)
        left = place.floor().long().clamp(0, a.entries - 1)
        right = (left + 1).clamp(max=a.entries - 1)
        wide = wide.to(torch.promote_types(table.dtype, torch.float32))
        weight = (place - left).reshape([-1] + [1] * (table.ndim - dim - 1)).to(wide)
        lower, upper = (wide.index_select(dim, i.to(table.device)) for i in (left, right))
        wide = torch.where(weight == 0, lower, lower + weight * (upper - lower))
        wide = wide * part.reshape(weight.shape).to(wide) if sums else wide
    return wide.to(table.dtype)
