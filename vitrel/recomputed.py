"""Grids that change under gradient checkpointing, which computes blocks again on the last one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Recomputed:
    """Grids (h, w) of the batches whose blocks gradient checkpointing will compute again, in the backward pass."""

    grids: set[tuple[int, int]] = field(default_factory=set)
    begun: bool = False

    def add(self, grid: tuple[int, int]) -> None:
        if self.begun:
            self.grids, self.begun = set(), False
        self.grids.add(grid)

    def check(self, grid: tuple[int, int]) -> None:
        """In a backward pass, see that ``grid`` is that of every batch.

        Raises:
            ValueError: If a block may be computed again on the grid of another batch.
        """
        if torch._C._current_graph_task_id() == -1:
            return
        self.begun = True
        if self.grids != {grid}:
            seen = " and ".join(f"{h}x{w}" for h, w in sorted({*self.grids, grid}))
            raise ValueError(
                f"dynamic_img_size: batches of {seen} patches came before one backward pass, in which gradient "
                "checkpointing computes blocks again on the last grid; take a backward pass for each grid, or leave "
                "checkpointing out"
            )
