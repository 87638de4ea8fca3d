"""What a reader of strips knows after each strip: its memory, and what it has pooled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

POOLS = ("avg", "last", "token")


@dataclass
class StripState:
    """What a reader knows of the strips that it has read.

    Attributes:
        rows: Number of patch rows kept of the strips before, at most ``memory_rows``.
        hidden: Per layer the inputs of its attention for these rows, (B, rows * cols, D).
        valid: Which of them are no padding, (B, rows), boolean.
        prefix: What the prefix tokens have become, (B, P, D), where they are carried.
        total: What is pooled so far, (B, D), float32 at least.
        count: Number of patches in ``total``, (B, 1).
        ended: Which images have come to their end, (B,), boolean.
    """

    rows: int
    hidden: list[Tensor]
    valid: Tensor
    prefix: Tensor
    total: Tensor
    count: Tensor
    ended: Tensor

    @classmethod
    def start(cls, x: Tensor, prefix: int, depth: int) -> StripState:
        """That before the first strip, which comes to the first of ``depth`` layers as x, (B, prefix + patches, D)."""
        batch, _, width = x.shape
        return cls(
            rows=0,
            hidden=[x.new_empty(batch, 0, width)] * depth,
            valid=torch.ones(batch, 0, dtype=torch.bool, device=x.device),
            prefix=x[:, :prefix],
            total=x.new_zeros(batch, width, dtype=torch.promote_types(x.dtype, torch.float32)),
            count=torch.zeros(batch, 1, dtype=torch.int64, device=x.device),
            ended=torch.zeros(batch, dtype=torch.bool, device=x.device),
        )

    @classmethod
    def of(cls, saved: Mapping[str, Any], depth: int, width: int, prefix: int) -> StripState:
        """The state that a reader of a model with so many layers, features and prefix tokens has saved.

        Raises:
            ValueError: If it is that of another model.
        """
        expected = {*cls.__dataclass_fields__, "pool"}
        if set(saved) != expected:
            raise ValueError(
                f"state: expected the entries {', '.join(sorted(expected))}, got {', '.join(sorted(saved))}"
            )
        if len(saved["hidden"]) != depth or any(h.shape[-1] != width for h in saved["hidden"]):
            raise ValueError(
                f"state: memory of {len(saved['hidden'])} layers, expected {depth} of width {width}; it is that of "
                "another model"
            )
        if saved["prefix"].shape[1] != prefix:
            raise ValueError(
                f"state: {saved['prefix'].shape[1]} prefix tokens, expected {prefix}; it is that of another model"
            )
        return cls(**{k: v for k, v in saved.items() if k != "pool"})

    def pooled(self, tokens: Tensor, valid: Tensor, prefix: int, pool: str) -> tuple[Tensor, Tensor]:
        """``total`` and ``count`` after a strip.

        Args:
            tokens: After the last norm, (B, prefix + patches, D).
            valid: Which patches are no padding, (B, patches), boolean.
            prefix: Number of prefix tokens.
            pool: One of ``POOLS``.
        """
        wide = torch.promote_types(tokens.dtype, torch.float32)
        total, count = (tokens[:, prefix:] * valid[..., None]).sum(1, dtype=wide), valid.sum(1, keepdim=True)
        if pool == "avg":
            return self.total + total, self.count + count
        if pool == "token":
            total, count = tokens[:, 0].to(wide), torch.ones_like(count)
        here = valid.any(1, keepdim=True)  # an image that has ended keeps what it had
        return torch.where(here, total, self.total), torch.where(here, count, self.count)

    def kept(
        self, given: list[Tensor], seen: Tensor, rows: int, memory_rows: int | None
    ) -> tuple[Tensor, list[Tensor]]:
        """``valid`` and ``hidden`` after a strip of so many rows.

        Args:
            given: Per layer the inputs of its attention for the strip, (B, rows * cols, D).
            seen: Which rows of memory and strip are no padding, (B, self.rows + rows), boolean.
            rows: Of the strip.
            memory_rows: How many to keep; None for all.
        """
        keep = seen.shape[1] if memory_rows is None else min(memory_rows, seen.shape[1])
        cols = given[0].shape[1] // rows
        old_from, new_from = min(self.rows, seen.shape[1] - keep), max(0, rows - keep)
        hidden = [  # copies, so that nothing but what is kept stays alive
            torch.cat([old[:, old_from * cols :].to(new), new[:, new_from * cols :]], 1)
            for old, new in zip(self.hidden, given, strict=True)
        ]
        return seen[:, seen.shape[1] - keep :].clone(), hidden
