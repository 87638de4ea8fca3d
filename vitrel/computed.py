"""Relative position tables that are computed: sinusoids through a projection, or an MLP over coordinates."""

from __future__ import annotations

import math

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from vitrel.initial import fill
from vitrel.lookup import Axes, Tables
from vitrel.stretched import Stretched


class SinusoidTable(Stretched):
    """Transformer-XL's R: the sinusoid of each offset through a learned projection, one per axis.

    ``R(Δ) = W_h r(Δh) + W_w r(Δw)`` with ``r(Δ) = [sin(Δ f) | cos(Δ f)]``, ``f_n = 10000^(-2n/D)`` (Dai et al.,
    arXiv 1901.02860, eq. 5). A joint table of two such halves is the same sum, so there is only this separable one.
    For other distances than it was made for, ``interpolate`` and ``geometric`` take the sinusoid at the place that they
    read of a table, between its entries; ``clamp`` and ``crop`` take that of the offset itself, however far.

    Args:
        heads: H, or 1 for one table shared by all heads.
        axes: Distance maps of rows and columns (``clamp``, directed).
        width: d for a vector table, None for a scalar one.
        sinusoid_width: D, even; the model's width in the original.
        resize: A key of ``RESIZE``.
        init_std: Standard deviation of the projections; 0 fills them with zeros.

    Raises:
        ValueError: If ``sinusoid_width`` is odd.
    """

    def __init__(
        self,
        heads: int,
        axes: Axes,
        width: int | None = None,
        *,
        sinusoid_width: int,
        resize: str = "clamp",
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((axes[0].size, axes[1].size), resize, device)
        if sinusoid_width % 2:
            raise ValueError(f"sinusoid_width: expected an even number, got {sinusoid_width}")
        self.heads, self.width, self.axes = heads, width, axes
        self.sinusoid_width, self.init_std = sinusoid_width, init_std
        out = heads * (1 if width is None else width)
        self.proj_h = nn.Parameter(torch.empty(out, sinusoid_width, device=device, dtype=dtype))
        self.proj_w = nn.Parameter(torch.empty(out, sinusoid_width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        fill(self.proj_h, self.init_std)
        fill(self.proj_w, self.init_std)

    def forward(self, axes: Axes | None = None, stretch: bool = True) -> Tables:
        """The entries, or those of other distance maps: stretched to them, or its own and what follows beyond."""
        axes = axes or self.axes
        sizes = zip(axes, self.made_for, axes if stretch else self.axes, strict=True)
        projections = (self.proj_h, self.proj_w)
        return tuple(
            self._entries(proj, self.places(axis.size, made_for, to.size, proj.device))
            for proj, (axis, made_for, to) in zip(projections, sizes, strict=True)
        )

    def set_axes(self, axes: Axes) -> None:
        """Take other distances; no parameter is resized, since the entries follow from the projections."""
        self.axes = axes

    def _entries(self, proj: Tensor, places: Tensor) -> Tensor:
        dtype = torch.promote_types(proj.dtype, torch.float32)
        table = sinusoid(places.to(dtype), self.sinusoid_width, dtype).to(proj.dtype) @ proj.T
        shape = (table.shape[0], self.heads, *(() if self.width is None else (self.width,)))  # len() would fix the size
        return table.reshape(shape).transpose(0, 1)


def sinusoid(distance: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sinusoid encoding of signed distances, ``[sin | cos]``, shape (len(distance), width)."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=distance.device, dtype=dtype) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class MlpTable(Stretched):
    """A joint scalar table made by a small MLP from log-spaced offsets (Swin V2, arXiv 2111.09883, section 3.3).

    Coordinates per axis, with g = K + 1 the side of the grid that it was made for:

    * ``swin``: ``sign(Δ) log2(1 + 8 |Δ| / (g - 1)) / 3``, output ``16 sigmoid(MLP)``, second layer without bias;
    * ``cr``: ``sign(Δ) ln(1 + |Δ|)``, output ``MLP`` (timm's RelPosMlp in mode ``cr``).

    For other distances ``interpolate`` and ``geometric`` take Δ at the place that they read of a table (``swin`` and
    ``interpolate``: timm without a pretrained window); ``clamp`` and ``crop`` take it as it is (the original's
    pretrained window).

    Args:
        heads: H, or 1 for one table shared by all heads.
        axes: Distance maps of rows and columns (``clamp``, directed).
        coords: ``swin`` or ``cr``.
        hidden: Width of the hidden layer.
        norm_size: Sides (h, w) that ``swin`` divides by where it is not g, those of an earlier pretrained window.
        resize: A key of ``RESIZE``.
    """

    def __init__(
        self,
        heads: int,
        axes: Axes,
        *,
        coords: str = "swin",
        hidden: int = 512,
        norm_size: tuple[int, int] | None = None,
        resize: str = "clamp",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((axes[0].size, axes[1].size), resize, device)
        self.axes, self.coords, self.norm_size = axes, coords, norm_size
        bias = (True, coords == "cr")
        self.mlp = Mlp(2, hidden, heads, act_layer=nn.ReLU, bias=bias, drop=0.0, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.mlp.fc1.reset_parameters()
        self.mlp.fc2.reset_parameters()

    def forward(self, axes: Axes | None = None, stretch: bool = True) -> Tables:
        """The entries, or those of other distance maps: stretched to them, or its own and what follows beyond."""
        axes, weight = axes or self.axes, self.mlp.fc1.weight
        norm = self.norm_size or tuple(size + 1 for size in self.made_for)
        sizes = zip(axes, self.made_for, axes if stretch else self.axes, norm, strict=True)
        cpu = torch.device("cpu")
        rows, cols = (
            self._log_coords(self.places(axis.size, made_for, to.size, cpu), side) for axis, made_for, to, side in sizes
        )
        coords = torch.stack(torch.meshgrid(rows, cols, indexing="ij"), -1).to(weight.device, weight.dtype)
        table = self.mlp(coords).movedim(-1, 0)
        return (16 * table.sigmoid() if self.coords == "swin" else table,)

    def set_axes(self, axes: Axes) -> None:
        """Take other distances; the MLP gives their entries."""
        self.axes = axes

    def _log_coords(self, delta: Tensor, side: int) -> Tensor:
        delta = delta.double()
        if self.coords == "swin":
            return delta.sign() * torch.log2(1 + 8 * delta.abs() / max(side - 1, 1)) / math.log2(8)
        return delta.sign() * torch.log(1 + delta.abs())
