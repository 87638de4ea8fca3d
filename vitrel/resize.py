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
    """Fit a table to other distances, axis by axis and linearly in between.

    The zero offset keeps its entry exactly, but in a table of weights (``sums``).

    Args:
        table: (H, entries[, entries][, d]).
        old: Distance map of each axis of the table.
        new: Distance maps to fit.
        rule: ``clamp`` and ``crop`` keep entries at their offsets (further ones repeat the last), ``interpolate``
            stretches, ``geometric`` stretches the far end more (BEiT). Computed in float32 at least.
        sums: Entries are weights in a sum over keys, see ``_shares``: a table that is stretched or squeezed keeps its
            sum, one that is cut loses what lies outside, and none repeats its last entry.

    Returns:
        The same tensor if no axis changes.
    """
    wide = table
    for dim, (a, b) in enumerate(zip(old, new, strict=True), start=1):
        # A size that is traced as a variable must not be compared: the program would be for that size alone.
        if a.kind != "clamp" or (not torch.compiler.is_compiling() and a.size == b.size):
            continue
        if sums:
            shares = _shares(a, b, rule).to(table.device, torch.promote_types(table.dtype, torch.float32))
            wide = (wide.to(shares.dtype).movedim(dim, -1) @ shares.T).movedim(-1, dim)
            continue
        offset = torch.arange(-b.size if b.directed else 0, b.size + 1, dtype=torch.float64)
        place = RESIZE[rule](offset, a.size, b.size) + (a.size if a.directed else 0)
        left = place.floor().long().clamp(0, a.entries - 1)
        right = (left + 1).clamp(max=a.entries - 1)
        wide = wide.to(torch.promote_types(table.dtype, torch.float32))
        weight = (place - left).reshape([-1] + [1] * (table.ndim - dim - 1)).to(wide)
        lower, upper = (wide.index_select(dim, i.to(table.device)) for i in (left, right))
        wide = torch.where(weight == 0, lower, lower + weight * (upper - lower))
    return wide.to(table.dtype)


def _shares(old: AxisDistance, new: AxisDistance, rule: str) -> Tensor:
    """What part of each old weight each new entry gets, (new entries, old entries), float64.

    ``clamp`` and ``crop`` give each weight to its own offset. The others give it to the new entries between which its
    neighbours are interpolated, or, where there are fewer of them, to the two that it lies between.
    """
    k, n = old.size, new.size
    offset, before = torch.arange(-n, n + 1, dtype=torch.float64), torch.arange(-k, k + 1, dtype=torch.float64)
    if rule in ("clamp", "crop"):
        shares = (offset[:, None] == before).double()
    elif n == 0:
        shares = torch.ones(1, len(before), dtype=torch.float64)
    elif torch.compiler.is_compiling():  # both, since n may be a variable
        places = RESIZE[rule](offset, k, n)
        shares = torch.where(torch.full((), n) >= k, _gathered(places, before), _scattered(places, before))
    else:
        places = RESIZE[rule](offset, k, n)
        shares = _gathered(places, before) if n >= k else _scattered(places, before)
    if old.directed:
        return shares
    folded = shares[n:, k:].clone()  # an entry that stands for Δ and -Δ
    folded[:, 1:] += shares[n:, :k].flip(1)
    return folded


def _gathered(places: Tensor, before: Tensor) -> Tensor:
    """Shares by interpolation at new places between old entries, each of which gives away all of its weight."""
    near = (1 - (places[:, None] - before).abs()).clamp(min=0)
    return near / near.sum(0)


def _scattered(places: Tensor, before: Tensor) -> Tensor:
    """Shares of old entries for the two new places between which each lies."""
    last = places.shape[0] - 1  # not len(), which would fix a size traced as a variable
    right = torch.searchsorted(places, before).clamp(1, last)
    low, high = places[right - 1], places[right]
    index = right - 1 + (before - low) / (high - low)
    shares = (1 - (torch.arange(last + 1)[:, None] - index).abs()).clamp(min=0)
    return shares * (index - last / 2).abs().le(last / 2)
