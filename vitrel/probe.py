"""What the attentions of a model do with given pictures: scores term by term, and weights, of chosen query patches.

The model runs once, on the form of attention that it takes; the rows that are asked for are computed again, densely,
from what came into each attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vitrel.ablate import keep_terms
from vitrel.attend import dense_scores
from vitrel.attention import RelativeAttention2d
from vitrel.eva import RelativeAttentionRope
from vitrel.grid import Grid, Points
from vitrel.masks import masked_softmax
from vitrel.position import Position
from vitrel.terms import TERMS

PARTS = ("both", "content", "position")
"""The attention, that of its content alone (terms content and u, which read no place), and that of the other terms."""

PAIRS = 1 << 17
"""Pairs of patches per picture from which on a part of the queries has to stand for all."""


@dataclass(frozen=True)
class Probe:
    """One attention and what came into it.

    Attributes:
        block: Name of its block.
        attn: The layer.
        position: Its position parameters.
        grid: Where the patches lie.
        x: Its input, (B, L, D).
        rope: The rotary embedding that the model hands it, if it does.
    """

    block: str
    attn: RelativeAttention2d
    position: Position
    grid: Grid
    x: Tensor
    rope: Tensor | None = None

    @cached_property
    def _patches(self) -> tuple[Tensor, Tensor]:
        q, k, _ = self.attn._qkv(self.x, self.grid)
        return q[:, :, self.attn.num_prefix_tokens :], k[:, :, self.attn.num_prefix_tokens :]

    @torch.no_grad()
    def terms(self, queries: Tensor) -> dict[str, Tensor]:
        """Each term's summand of the scores of chosen queries towards every patch.

        Args:
            queries: Indices of patches, int64, (n,).

        Returns:
            Term name (``content`` first) to (B, H, n, patches), float32 at least. ``rotary`` is what turning changes of
            the content. Terms of the output have no summand.
        """
        q, k = self._patches
        here = Points(self.grid.coords(q.device)[:, queries.to(q.device)], self.grid)
        rows = q[:, :, queries.to(q.device)]

        def scores(*terms: str) -> Tensor:
            found = dense_scores(rows, k, keep_terms(self.position, terms), here, self.grid)
            return found.to(torch.promote_types(found.dtype, torch.float32))

        content = scores()
        summands = {t: scores(t) - content for t in self.position.terms if not TERMS[t].output}
        if self.rope is not None:
            assert isinstance(self.attn, RelativeAttentionRope)
            turned = (self.attn._turn(part, self.rope) for part in self.attn._qkv(self.x, self.grid)[:2])
            q, k = (part[:, :, self.attn.num_prefix_tokens :] for part in turned)
            rotated = self.position.scales["content"] * q[:, :, queries.to(q.device)] @ k.mT
            summands["rotary"] = rotated.to(content.dtype) - content
        return {"content": content, **summands}


def split(terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights over the patches from the summands of their scores: one tensor of their shape per name in ``PARTS``."""
    content = sum_of(terms, lambda name: name in ("content", "u"))
    position = sum_of(terms, lambda name: name not in ("content", "u"))
    return {
        "both": masked_softmax(content + position),
        "content": masked_softmax(content),
        "position": masked_softmax(position),
    }


def sum_of(terms: dict[str, Tensor], wanted: Callable[[str], bool] = lambda name: True) -> Tensor:
    """Sum of the summands whose name is wanted; zeros if there are none."""
    chosen = [summand for name, summand in terms.items() if wanted(name)]
    return torch.stack(chosen).sum(0) if chosen else torch.zeros_like(terms["content"])


def lattice(grid: Grid | tuple[int, int], at_most: int | None = None) -> Tensor:
    """Indices of query patches that stand for all: every one, or an even lattice of them with the corners.

    Args:
        grid: The patches.
        at_most: About how many; by default as many as ``PAIRS`` allows.

    Returns:
        int64, (n,).
    """
    h, w = (grid.rows, grid.cols) if isinstance(grid, Grid) else grid
    at_most = max(4, PAIRS // (h * w)) if at_most is None else at_most
    if h * w <= at_most:
        return torch.arange(h * w)
    part = (at_most / (h * w)) ** 0.5
    rows, cols = (_spread_out(side, int(side * part)) for side in (h, w))
    return (rows[:, None] * w + cols).flatten()


def scattered(grid: Grid) -> Tensor:
    """Indices of query patches to see every offset from: all, or the corners and others by chance, the same each time.

    A lattice would see each region of offsets from queries of its own, and show edges that are not there.
    """
    patches, count = grid.patches, PAIRS // grid.patches
    if patches <= count:
        return torch.arange(patches)
    corners = torch.tensor([0, grid.cols - 1, patches - grid.cols, patches - 1])
    chosen = torch.randperm(patches, generator=torch.Generator().manual_seed(0))[:count]
    return torch.cat([corners, chosen]).unique()


def _spread_out(side: int, count: int) -> Tensor:
    """Even places from the first to the last of ``side``, the same seen from either end."""
    count = max(2, count - count % 2) if side % 2 == 0 else max(2, count)
    return torch.linspace(0, side - 1, min(count, side), dtype=torch.float64).round().long()


Seen = Tensor | Mapping[str, Probe]
"""Pictures, or what ``probes`` has kept of a model's run on them."""


@torch.no_grad()
def probes(model: nn.Module, pictures: Seen) -> dict[str, Probe]:
    """Runs a model on pictures, in evaluation mode, and keeps what came into each relative attention.

    Args:
        model: Any model with ``RelativeAttention2d`` layers.
        pictures: What the model takes, (B, 3, h, w), normalised; what an earlier call returned comes back as it is.

    Returns:
        Block name to ``Probe``, in the order of the layers.

    Raises:
        ValueError: If the patches of a batch do not fill one grid.
    """
    if not isinstance(pictures, Tensor):
        return dict(pictures)
    found: dict[str, Probe] = {}

    def catch(name: str) -> Callable[..., None]:
        def hook(attn: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert isinstance(attn, RelativeAttention2d)
            given = inspect.signature(type(attn).forward).bind(attn, *args, **kwargs).arguments
            where, _, position = attn._where(given.get("attn_mask"))
            if not isinstance(where, Grid):
                raise ValueError(f"{name}: expected pictures whose patches fill one grid, got a padded batch")
            found[name] = Probe(name, attn, position, where, given["x"], given.get("rope"))

        return hook

    attentions = {n: m for n, m in model.named_modules() if isinstance(m, RelativeAttention2d)}
    handles = [
        attn.register_forward_pre_hook(catch(name.removesuffix(".attn")), with_kwargs=True)
        for name, attn in attentions.items()
    ]
    first = next(model.parameters())
    with _evaluating(model):
        try:
            model.forward(pictures.to(first.device, first.dtype))  # a compiled call would pass over the hooks
        finally:
            for handle in handles:
                handle.remove()
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each module in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def in_parts(probe: Probe, queries: Tensor, numbers: int = 1 << 21) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Queries a few at a time, with their terms, so that a summand has no more than about ``numbers`` numbers."""
    batch, heads = len(probe.x), probe.attn.num_heads
    step = max(1, numbers // (batch * heads * probe.grid.patches))
    for some in queries.split(step):
        yield some, probe.terms(some)
