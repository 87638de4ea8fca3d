"""timm's vision transformer with relative position attention in every block."""

from __future__ import annotations

from typing import Any, cast

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitrel.attention import RelativeAttention2d
from vitrel.family import GridModel
from vitrel.position import PositionTerms
from vitrel.relpos import RelPos


class RelativeVisionTransformer(GridModel, VisionTransformer):
    """A timm ``VisionTransformer`` whose blocks attend with relative position.

    Args:
        rel_pos: A ``RelPos``, a name such as ``"txl"``, or a mapping of its fields.
        backend: ``auto``, ``dense`` or ``reference``.
        **kwargs: Arguments of timm's ``VisionTransformer``; ``global_pool`` is ``avg``, ``class_token`` False and
            ``pos_embed`` ``none`` unless given.

    Raises:
        ValueError: For an unknown scheme or backend, or an option that needs positions which a grid does not have.
        TypeError: For an unknown keyword.
    """

    def __init__(self, *, rel_pos: Any = "bias", backend: str = "auto", **kwargs: Any) -> None:
        spec = RelPos.of(rel_pos)
        if kwargs.get("patch_drop_rate"):
            raise ValueError("patch_drop_rate: relative attention needs every patch of the grid; leave it at 0")
        if kwargs.get("attn_layer"):
            raise ValueError("attn_layer: the attention of these models is RelativeAttention2d; leave it out")
        defaults = {"global_pool": "avg", "class_token": False, "pos_embed": "none"}
        super().__init__(**{**defaults, **kwargs})
        shared: PositionTerms | None = None
        for block in self.blocks:
            attn = RelativeAttention2d.from_attention(
                cast(nn.Module, block.attn),
                grid_size=self.patch_embed.grid_size,
                rel_pos=spec,
                num_prefix_tokens=self.num_prefix_tokens,
                backend=backend,
                shared=shared,
            )
            shared = attn.position_terms if spec.share_layers else None
            block.attn = attn
        # timm writes these beside saved weights; the resolved scheme must not hang on a default that may change.
        self._model_args = {"rel_pos": spec.as_dict()}

    @property
    def _model_args(self) -> dict[str, Any]:
        return self._recorded_args

    @_model_args.setter
    def _model_args(self, args: dict[str, Any]) -> None:
        # timm records here what create_model was given, and writes it as JSON beside saved weights
        self._recorded_args = {k: v.as_dict() if isinstance(v, RelPos) else v for k, v in args.items()}
