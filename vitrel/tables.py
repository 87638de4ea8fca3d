"""What fills a relative position table: learned entries, or sinusoids through a learned projection.

Every table is a module whose ``forward()`` returns the tensors to look up:

* separable: ``(rows, columns)`` of shapes (H, 2Kh+1[, d]) and (H, 2Kw+1[, d]), **summed** after the look-up;
* joint: ``(table,)`` of shape (H, 2Kh+1, 2Kw+1[, d]).

The centre entry of an axis is offset zero. ``d`` is absent for scalar tables.
"""

from __future__ import annotations

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from vitrel.grid import Grid, clamp_index, offsets

Tables = tuple[Tensor, ...]


class LearnedTable(nn.Module):
    """A table whose entries are parameters: ``table_h`` and ``table_w``, or ``table``.

    Args:
        num_heads: H.
        max_distance: (Kh, Kw), the largest distance per axis with an entry of its own, in patches.
        width: d for a vector table, None for a scalar one.
        joint: One table over (Δh, Δw) instead of one per axis.
        init_std: Standard deviation of the truncated normal that fills it; 0 fills it with zeros.
    """

    def __init__(
        self,
        num_heads: int,
        max_distance: tuple[int, int],
        width: int | None = None,
        *,
        joint: bool = False,
        init_std: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.init_std = init_std
        rows, cols = (2 * k + 1 for k in max_distance)
        tail = () if width is None else (width,)
        shapes = {"table": (rows, cols)} if joint else {"table_h": (rows,), "table_w": (cols,)}
        for name, shape in shapes.items():
            self.register_parameter(
                name, nn.Parameter(torch.empty(num_heads, *shape, *tail, device=device, dtype=dtype))
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.parameters():
            if self.init_std:
                trunc_normal_(table, std=self.init_std)
            else:
                nn.init.zeros_(table)

    def forward(self) -> Tables:
        return tuple(self.parameters())


class SinusoidTable(nn.Module):
    """Transformer-XL's R: the sinusoid of each offset through a learned projection, one per axis.

    ``R(Δ) = W_h r(Δh) + W_w r(Δw)`` with ``r(Δ) = [sin(Δ f) | cos(Δ f)]``, ``f_n = 10000^(-2n/D)`` (Dai et al.,
    arXiv 1901.02860, eq. 5). A joint table of two such halves is the same sum, so there is only this separable one.

    Args:
        num_heads: H.
        max_distance: (Kh, Kw), in patches.
        width: d for a vector table, None for a scalar one.
        sinusoid_width: D, even; the model's width in the original.

    Raises:
        ValueError: If ``sinusoid_width`` is odd.
    """

    def __init__(
        self,
        num_heads: int,
        max_distance: tuple[int, int],
        width: int | None = None,
        *,
        sinusoid_width: int,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if sinusoid_width % 2:
            raise ValueError(f"sinusoid_width: expected an even number, got {sinusoid_width}")
        self.num_heads, self.width, self.max_distance = num_heads, width, max_distance
        self.sinusoid_width, self.init_std = sinusoid_width, init_std
        out = num_heads * (1 if width is None else width)
        self.proj_h = nn.Parameter(torch.empty(out, sinusoid_width, device=device, dtype=dtype))
        self.proj_w = nn.Parameter(torch.empty(out, sinusoid_width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for proj in (self.proj_h, self.proj_w):
            if self.init_std:
                trunc_normal_(proj, std=self.init_std)
            else:
                nn.init.zeros_(proj)

    def forward(self) -> Tables:
        return tuple(self._fill(proj, k) for proj, k in zip((self.proj_h, self.proj_w), self.max_distance, strict=True))

    def _fill(self, proj: Tensor, max_distance: int) -> Tensor:
        distance = torch.arange(-max_distance, max_distance + 1, device=proj.device)
        dtype = torch.promote_types(proj.dtype, torch.float32)
        table = sinusoid(distance, self.sinusoid_width, dtype).to(proj.dtype) @ proj.T
        shape = (len(distance), self.num_heads) if self.width is None else (len(distance), self.num_heads, self.width)
        return table.reshape(shape).transpose(0, 1)


def sinusoid(distance: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sinusoid encoding of signed distances, ``[sin | cos]``, shape (len(distance), width)."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=distance.device, dtype=dtype) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def table_distance(tables: Tables) -> tuple[int, int]:
    """(Kh, Kw), read off the shapes of the tables."""
    rows, cols = (tables[0].shape[1], tables[-1].shape[1 if len(tables) == 2 else 2])
    return rows // 2, cols // 2


def lookup(tables: Tables, dh: Tensor, dw: Tensor) -> Tensor:
    """Read a table at offsets, those beyond its distance clamped.

    Args:
        tables: What a table module returns.
        dh: Row offsets, int64, any shape S.
        dw: Column offsets, shape S.

    Returns:
        (H, *S) for a scalar table, (H, *S, d) for a vector one.
    """
    kh, kw = table_distance(tables)
    ih, iw = clamp_index(dh, kh), clamp_index(dw, kw)
    if len(tables) == 2:
        return tables[0][:, ih] + tables[1][:, iw]
    return tables[0][:, ih, iw]


def flat_index(table: Tensor, dh: Tensor, dw: Tensor) -> Tensor:
    """Entry of each offset in a joint table (H, 2Kh+1, 2Kw+1, d) flattened over its two axes, the shape of ``dh``."""
    rows, cols = table.shape[1:3]
    return clamp_index(dh, rows // 2) * cols + clamp_index(dw, cols // 2)


def axis_lookup(tables: Tables, q_grid: Grid, k_grid: Grid) -> Tables:
    """Read separable tables once per pair of query row and key row, and of query column and key column.

    Returns:
        (H, query rows, key rows[, d]) and (H, query columns, key columns[, d]).
    """
    device = tables[0].device
    dh = offsets(q_grid.row_coords(device), k_grid.row_coords(device))
    dw = offsets(q_grid.col_coords(device), k_grid.col_coords(device))
    kh, kw = table_distance(tables)
    return tables[0][:, clamp_index(dh, kh)], tables[1][:, clamp_index(dw, kw)]
