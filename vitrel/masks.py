"""Masks over the sum of all terms, boolean (True = attend) or additive, broadcastable to (B, H, Lq, Lk)."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_softmax(scores: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Softmax over keys after the mask; rows without a visible key are 0."""
    if attn_mask is None:
        return scores.softmax(-1)
    scores, visible = mask_scores(scores, attn_mask)
    return scores.softmax(-1).masked_fill(~visible, 0)


def mask_scores(scores: Tensor, attn_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Scores with hidden keys at -inf, and which rows see a key at all, (..., Lq, 1); blind rows stay unmasked."""
    seen = seen_pairs(attn_mask)
    if attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.masked_fill(~seen, 0).to(scores.dtype)
    seen = seen.expand(scores.shape)
    visible = seen.any(-1, keepdim=True)
    # A row of -inf would give NaN, here and in its gradients; its output is zeroed by the caller instead.
    return scores.masked_fill(~seen & visible, -torch.inf), visible


def seen_pairs(attn_mask: Tensor) -> Tensor:
    """Where a mask lets a query see a key, boolean, of its shape.

    An additive mask hides where it is -inf or near its type's lowest number, which plus a negative score may overflow.
    """
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask > torch.finfo(attn_mask.dtype).min / 2
