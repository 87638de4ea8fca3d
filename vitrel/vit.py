"""timm's vision transformer with relative position attention in every block."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from timm.layers import Attention, LayerNorm
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import nn

from vitrel.attention import RelativeAttention2d
from vitrel.family import GridModel, RelativeModel, patch_grid
from vitrel.position import PositionTerms
from vitrel.relpos import DEFAULT, RelPos
from vitrel.stem import ConvEmbed

BLOCKS: dict[str, type[nn.Module]] = {"Block": Block, "ResPostBlock": ResPostBlock}
"""timm's blocks with a separate attention, by the names under which they are saved."""
EMBEDS: dict[str, type[nn.Module]] = {"conv": ConvEmbed}
"""Ways to patches besides timm's ``PatchEmbed``, likewise."""
_NAMED = {"block_fn": BLOCKS, "embed_layer": EMBEDS}


class RelativeVisionTransformer(GridModel, VisionTransformer):
    """A timm ``VisionTransformer`` whose blocks attend with relative position.

    Args:
        rel_pos: A ``RelPos``, a name such as ``"txl"``, or a mapping of its fields.
        backend: As for ``RelativeAttention2d``.
        **kwargs: Arguments of timm's ``VisionTransformer``; ``global_pool`` is ``avg``, ``class_token`` False and
            ``pos_embed`` ``none`` unless given. What is written to a file has names for layers: ``block_fn`` may be one
            of ``BLOCKS``, ``embed_layer`` one of ``EMBEDS``, ``norm_layer`` a mapping ``{"eps": ...}`` for a
            ``LayerNorm``, and ``final_norm`` one for the last norm alone.

    Raises:
        ValueError: For an unknown scheme or backend, an option that needs positions which a grid does not have, or
            blocks without an attention of their own.
        TypeError: For an unknown keyword.
    """

    def __init__(self, *, rel_pos: Any = DEFAULT, backend: str = "auto", **kwargs: Any) -> None:
        spec = RelPos.of(rel_pos)
        if kwargs.get("patch_drop_rate"):
            raise ValueError("patch_drop_rate: relative attention needs every patch of the grid; leave it at 0")
        if kwargs.get("attn_layer"):
            raise ValueError("attn_layer: the attention of these models is RelativeAttention2d; leave it out")
        defaults = {"global_pool": "avg", "class_token": False, "pos_embed": "none"}
        last = kwargs.pop("final_norm") if isinstance(kwargs.get("final_norm"), dict) else {}  # timm's is a flag
        super().__init__(**{**defaults, **_with_layers(kwargs)})
        for norm in (self.norm, self.fc_norm):
            if last and isinstance(norm, nn.LayerNorm):
                norm.eps = last["eps"]
        shared: PositionTerms | None = None
        for block in self.blocks:
            if not isinstance(getattr(block, "attn", None), Attention):
                raise ValueError(
                    f"block_fn: {type(block).__name__} has no timm Attention named attn that could be made relative; "
                    f"take {' or '.join(BLOCKS)}"
                )
            attn = RelativeAttention2d.from_attention(
                cast(nn.Module, block.attn),
                grid_size=patch_grid(self),
                rel_pos=spec,
                num_prefix_tokens=self.num_prefix_tokens,
                backend=backend,
                shared=shared,
            )
            shared = attn.position_terms if spec.share_layers else None
            block.attn = attn
        self._model_args = {"rel_pos": spec}  # saved even where it was not given: a default may change

    @property
    def _model_args(self) -> dict[str, Any]:
        return self._recorded_args

    @_model_args.setter
    def _model_args(self, args: dict[str, Any]) -> None:
        plain = dict(args)
        for key, known in _NAMED.items():
            if key in plain:
                names = {layer: name for name, layer in known.items()}
                plain[key] = names.get(plain[key], plain[key])
        RelativeModel._model_args.__set__(self, plain)  # type: ignore[attr-defined]  # a property


def _with_layers(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for timm: layers in place of their saved names."""
    kwargs = dict(kwargs)
    for key, known in _NAMED.items():
        name = kwargs.get(key)
        if isinstance(name, str):
            if name not in known:
                raise ValueError(f"{key}: {name!r} is unknown, expected one of {', '.join(known)}, or a class")
            kwargs[key] = known[name]
    if isinstance(kwargs.get("norm_layer"), dict):
        kwargs["norm_layer"] = partial(LayerNorm, **kwargs["norm_layer"])
    return kwargs
