"""Which models can be read in strips, and how what they have read is pooled."""

from __future__ import annotations

from typing import Any

from timm.layers import PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitrel.attention import RelativeAttention2d
from vitrel.family import RelativeModel
from vitrel.stripstate import POOLS


def check_model(model: Any) -> None:
    """Sees that a model can be read in strips.

    Raises:
        TypeError: For a model of another family.
        ValueError: For a model with an absolute position embedding, or blocks that cannot see a memory.
    """
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise TypeError(
            "model: compiled by torch.compile; give the model as it was, and compile its blocks or the reader"
        )
    if not isinstance(model, VisionTransformer) or isinstance(model, VisionTransformerDistilled):
        raise TypeError(
            f"model: cannot read strips with {name}; expected a vitrel model, or a timm VisionTransformer (with one "
            "classifier) made relative by vitrel.relativize"
        )
    if not isinstance(model, RelativeModel):
        raise TypeError(f"model: {name} has no relative position; make it relative by vitrel.relativize first")
    if model.pos_embed is not None:
        raise ValueError(
            f"model: {name} has an absolute position embedding, which has no entry for a row of a taller image; "
            "build it with pos_embed='none', or make it relative with keep_absolute=False"
        )
    if not isinstance(model.patch_embed, PatchEmbed):
        kind = type(model.patch_embed).__name__
        raise TypeError(f"model: its {kind} looks beyond a patch, and would see a seam; expected a PatchEmbed")
    if len({id(getattr(block, "attn", block)) for block in model.blocks}) < len(model.blocks):
        raise ValueError("blocks: two of them share an attention, which can hold one memory; give each its own")
    for n, block in enumerate(model.blocks):
        attn = getattr(block, "attn", None)
        if type(attn) is not RelativeAttention2d:
            kind = type(block).__name__ if attn is None else type(attn).__name__
            raise ValueError(f"blocks.{n}: {kind} cannot see the rows above a strip, expected a RelativeAttention2d")
    if not isinstance(model.patch_drop, nn.Identity):
        raise ValueError("patch_drop: strips need every patch of their grid; build it with patch_drop_rate=0")


def pooling(model: Any, pool: str | None) -> str:
    """Name of the pooling, the model's own where none is given.

    Raises:
        ValueError: If it cannot go on from strip to strip.
    """
    name = model.global_pool if pool is None else pool
    if name not in POOLS:
        what = f"pool: {name!r}" if pool is not None else f"pool: the model's own, {name!r},"
        raise ValueError(f"{what} cannot go on over strips, expected one of {', '.join(POOLS)}")
    if name == "token" and not model.num_prefix_tokens:
        raise ValueError("pool: 'token' needs a class token, and the model has none; take avg or last")
    if name == "avg" and getattr(model, "pool_include_prefix", False):
        raise ValueError(
            "pool: the model averages prefix tokens too (pool_include_prefix), which strips have many times"
        )
    return str(name)
