"""Rotary position: frequencies, fixed or learned, and the rotation of queries and keys by their coordinates."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitrel.grid import Where
from vitrel.lookup import Tables
from vitrel.stretched import Stretched


class Frequencies(Stretched):
    """Radians per row and per column of each feature pair; ``forward(grid_size)`` gives both, each (H or 1, d/2).

    On another grid than the one it was made for, ``interpolate`` and ``geometric`` turn as far from edge to edge as on
    that one (position interpolation, Chen et al., arXiv 2306.15595), ``clamp`` and ``crop`` as far per patch.

    Args:
        width: d.
        grid_size: (h, w) in patches.
        resize: A key of ``vitrel.resize.RESIZE``.

    Raises:
        ValueError: If d is not a multiple of 4.
    """

    def __init__(
        self, width: int, grid_size: tuple[int, int], resize: str = "clamp", device: torch.device | str | None = None
    ) -> None:
        if width % 4:
            raise ValueError(f"rotary: the width of a head must be a multiple of 4, got {width}")
        super().__init__(grid_size, resize, device)
        self.width, self.grid_size = width, grid_size

    def _on_grid(self, frequencies: Tables, grid_size: tuple[int, int] | None) -> Tables:
        """Frequencies of the grid that they were made for, on another (h, w) or on the one that is set."""
        if not self.stretches:
            return frequencies
        sides = zip(frequencies, self.made_for, grid_size or self.grid_size, strict=True)
        return tuple(frequency * (old / side) for frequency, old, side in sides)


class AxialFrequencies(Frequencies):
    """RoPE-Axial: the first half of the feature pairs turns with the column, the second with the row; no parameters.

    Heo et al., arXiv 2403.13298: pair m turns by ``x θ^(-4m/d)``, pair d/4 + m by ``y θ^(-4m/d)``, m < d/4.
    """

    def __init__(
        self,
        width: int,
        grid_size: tuple[int, int],
        theta: float = 100.0,
        resize: str = "clamp",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(width, grid_size, resize, device)
        self.theta = theta

    def forward(self, grid_size: tuple[int, int] | None = None) -> Tables:
        quarter = torch.arange(0, self.width, 4, dtype=torch.float64, device="cpu")
        frequency = self.theta ** (-quarter / self.width)
        zeros = torch.zeros_like(frequency)
        return self._on_grid((torch.cat([zeros, frequency])[None], torch.cat([frequency, zeros])[None]), grid_size)


class MixedFrequencies(Frequencies):
    """RoPE-Mixed: each feature pair of each head turns along a learned direction (Heo et al., arXiv 2403.13298).

    Parameters ``freqs_h`` and ``freqs_w``, each (H, d/2), radians per patch; they start as two sets of axial
    frequencies of base ``theta``, at right angles to each other, under a random rotation per head.
    """

    def __init__(
        self,
        heads: int,
        width: int,
        grid_size: tuple[int, int],
        theta: float = 10.0,
        resize: str = "clamp",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width, grid_size, resize, device)
        self.theta = theta
        self.freqs_h = nn.Parameter(torch.empty(heads, width // 2, device=device, dtype=dtype))
        self.freqs_w = nn.Parameter(torch.empty(heads, width // 2, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        heads, pairs = self.freqs_h.shape
        device = self.freqs_h.device
        magnitude = self.theta ** (-torch.arange(0, 2 * pairs, 4, device=device) / (2 * pairs))
        angle = torch.rand(heads, 1, device=device) * 2 * math.pi
        for parameter, turn in ((self.freqs_w, torch.cos), (self.freqs_h, torch.sin)):
            parameter.copy_(torch.cat([magnitude * turn(angle), magnitude * turn(angle + math.pi / 2)], -1))

    def forward(self, grid_size: tuple[int, int] | None = None) -> Tables:
        return self._on_grid((self.freqs_h, self.freqs_w), grid_size)


def angles(frequencies: Tables, grid: Where, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each patch's angles, each (B or 1, H or 1, patches, d/2), float32 at least.

    Args:
        frequencies: Radians per row and per column, each (H or 1, d/2).
    """
    single = device.type == "mps"  # has no float64
    wide = [torch.float32 if single else torch.promote_types(f.dtype, torch.float32) for f in frequencies]
    rows, cols = (f.to(dtype).to(device)[:, None] for f, dtype in zip(frequencies, wide, strict=True))
    coords = grid.coords(device)[:, None].to(rows.dtype)  # (B or 1, 1, patches, 2)
    angle = coords[..., :1] * rows + coords[..., 1:] * cols
    return angle.cos(), angle.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn adjacent feature pairs of the patches by ``angles``, in float32 at least.

    Args:
        x: Queries or keys, (B, H, L, d); tokens before the patches stay as they are.
    """
    prefix = x.shape[2] - cos.shape[2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(dtype), sin.to(dtype)
    even, odd = x[:, :, prefix:].to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)
    return torch.cat([x[:, :, :prefix], turned], 2) if prefix else turned


def rotate(x: Tensor, frequencies: Tables, grid: Where) -> Tensor:
    """Turn the patches of ``x`` (B, H, L, d) by the angles of their coordinates on the grid."""
    return turn(x, *angles(frequencies, grid, x.device))
