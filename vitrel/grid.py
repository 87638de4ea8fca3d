"""Coordinates on a patch grid, offsets between them, and the distance maps from an offset to a table entry."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """A full grid of patches, row-major: token ``i = y * cols + x``.

    Attributes:
        rows: Number of patch rows.
        cols: Number of patch columns.
        top: Row coordinate of the first row; keys above the queries have a smaller one.
        left: Column coordinate of the first column.
    """

    rows: int
    cols: int
    top: int = 0
    left: int = 0

    @property
    def patches(self) -> int:
        """Number of patches."""
        return self.rows * self.cols

    def row_coords(self, device: torch.device | None = None) -> Tensor:
        """Row coordinate of each patch row, int64, shape (rows,)."""
        return torch.arange(self.top, self.top + self.rows, device=device)

    def col_coords(self, device: torch.device | None = None) -> Tensor:
        """Column coordinate of each patch column, int64, shape (cols,)."""
        return torch.arange(self.left, self.left + self.cols, device=device)

    def coords(self, device: torch.device | None = None) -> Tensor:
        """(row, column) of each patch, int64, shape (1, rows * cols, 2)."""
        return torch.cartesian_prod(self.row_coords(device), self.col_coords(device))[None]

    @property
    def box(self) -> Grid:
        """The grid that holds every patch: this one."""
        return self


class Points:
    """Patches anywhere, per sample: padded batches of pictures with different grids.

    Args:
        coords: (row, column) of each patch, int64, shape (B, N, 2). Padding may hold anything; mask it.
        box: A grid that holds every patch but padding; None to find one, which reads ``coords`` on the host.
    """

    def __init__(self, coords: Tensor, box: Grid | None = None) -> None:
        if coords.ndim != 3 or coords.shape[-1] != 2:
            raise ValueError(f"coords: expected shape (B, N, 2), got {tuple(coords.shape)}")
        self._coords, self._box = coords, box

    @property
    def patches(self) -> int:
        """Number of patches of a sample, N."""
        return self._coords.shape[1]

    def coords(self, device: torch.device | None = None) -> Tensor:
        """(row, column) of each patch, shape (B, N, 2)."""
        return self._coords.to(device)

    @property
    def box(self) -> Grid:
        """A grid that holds every patch."""
        if self._box is None:
            (top, left), (bottom, right) = (f(self._coords.flatten(0, 1), 0).tolist() for f in (torch.amin, torch.amax))
            self._box = Grid(bottom - top + 1, right - left + 1, top, left)
        return self._box


Where = Grid | Points


def offsets(q: Tensor, k: Tensor) -> Tensor:
    """Offset of every query from every key, **query minus key**.

    Args:
        q: Query coordinates along one axis, shape (..., Lq).
        k: Key coordinates along the same axis, shape (..., Lk).

    Returns:
        Shape (..., Lq, Lk).
    """
    return q[..., :, None] - k[..., None, :]


def _clamp(distance: Tensor, exact: float, buckets: float, max_distance: float) -> Tensor:
    """Every distance up to ``max_distance`` has its own bucket (Shaw et al., arXiv 1803.02155)."""
    return distance


def _t5_log(distance: Tensor, exact: float, buckets: float, max_distance: float) -> Tensor:
    """T5 (arXiv 1910.10683): exact below ``exact``, then logarithmic up to ``max_distance``."""
    steps = torch.log(distance.clamp(min=exact) / exact) / math.log(max_distance / exact) * (buckets + 1 - exact)
    return torch.where(distance < exact, distance, exact + steps.floor())


def _deberta_log(distance: Tensor, exact: float, buckets: float, max_distance: float) -> Tensor:
    """DeBERTa-v2 (``make_log_bucket_position``): exact up to ``exact``, then logarithmic and rounded up."""
    log = torch.log(distance.clamp(min=exact) / exact) / math.log((max_distance - 1) / exact)
    return torch.where(distance <= exact, distance, exact + (log * (buckets - exact - 1)).ceil())


def _piecewise(distance: Tensor, exact: float, buckets: float, max_distance: float) -> Tensor:
    """iRPE (arXiv 2107.14222, eq. 18): exact up to α, then logarithmic, β at γ; (α, β, γ) are the arguments."""
    steps = torch.log(distance.clamp(min=exact) / exact) / math.log(max_distance / exact) * (buckets - exact)
    return torch.where(distance <= exact, distance.round(), (exact + steps).round().clamp(max=buckets).floor())


BUCKETS: dict[str, Callable[[Tensor, float, float, float], Tensor]] = {
    "clamp": _clamp,
    "t5_log": _t5_log,
    "deberta_log": _deberta_log,
    "piecewise": _piecewise,
}


@dataclass(frozen=True)
class AxisDistance:
    """The distance map of one axis: offset -> bucket in [-K, K] -> entry bucket + K.

    Attributes:
        kind: A key of ``BUCKETS``.
        size: K, the largest bucket, at which all larger ones end.
        exact: Distances up to (T5: below) it have buckets of their own; unused by ``clamp``.
        buckets: β of ``piecewise``, else K.
        max_distance: Distance at which a logarithmic map reaches its last bucket.
        directed: False to map Δ and -Δ to one entry |bucket| (LeViT), so that the axis has K + 1 entries.
    """

    kind: str
    size: int
    exact: float = 0.0
    buckets: float = 0.0
    max_distance: float = 0.0
    directed: bool = True

    @property
    def entries(self) -> int:
        """Number of table entries along this axis."""
        return 2 * self.size + 1 if self.directed else self.size + 1

    def with_entries(self, entries: int) -> AxisDistance:
        """The same map with another number of table entries."""
        return replace(self, size=entries // 2 if self.directed else entries - 1)

    def entry_offsets(self) -> Tensor:
        """For each table entry the offset nearest to zero that reads it, int64, shape (entries,).

        Two maps are the same function exactly when these are equal. A bucket that no whole offset falls into gets the
        offset of the next one.
        """
        nearest = torch.searchsorted(self._buckets(), torch.arange(self.size + 1, device="cpu"))
        return torch.cat([-nearest[1:].flip(0), nearest]) if self.directed else nearest

    def bucket(self, offset: Tensor) -> Tensor:
        """Bucket of |offset|, in [0, K], int64, the shape of ``offset``; of a distance between patches, float, too."""
        distance = offset.abs()
        if self.kind == "clamp":
            return distance.clamp(max=self.size)
        if distance.is_floating_point():
            return self._of(distance.double())
        buckets = self._buckets().to(offset.device)
        return buckets[distance.clamp(max=len(buckets) - 1)]

    def _buckets(self) -> Tensor:
        """Bucket of each distance from zero to the first that all larger ones share the bucket of."""
        # float64, which not every device has: at a bucket's edge a rounded logarithm would fall on the wrong side
        largest = max(self.size, math.ceil(self.max_distance))
        return self._of(torch.arange(largest + 1, dtype=torch.float64, device="cpu"))

    def _of(self, distance: Tensor) -> Tensor:
        return BUCKETS[self.kind](distance, self.exact, self.buckets, self.max_distance).long().clamp(max=self.size)

    def index(self, offset: Tensor) -> Tensor:
        """Table entry of each offset (query minus key), int64, the shape of ``offset``."""
        distance = self.bucket(offset)
        return torch.where(offset < 0, -distance, distance) + self.size if self.directed else distance
