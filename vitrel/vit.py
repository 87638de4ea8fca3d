"""timm's vision transformer with relative position attention in every block."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer

from vitrel.attention import RelativeAttention2d
from vitrel.position import PositionTerms
from vitrel.relpos import RelPos


class RelativeVisionTransformer(VisionTransformer):
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
                cast(Attention, block.attn),
                grid_size=self.patch_embed.grid_size,
                rel_pos=spec,
                num_prefix_tokens=self.num_prefix_tokens,
                backend=backend,
                shared=shared,
            )
            shared = attn.position_terms if spec.share_layers else None
            block.attn = attn
        self._seen_grids: set[tuple[int, int]] = set()
        # timm writes these beside saved weights; the resolved scheme must not hang on a default that may change.
        self._model_args = {"rel_pos": spec.as_dict()}

    @property
    def _model_args(self) -> dict[str, Any]:
        return self._recorded_args

    @_model_args.setter
    def _model_args(self, args: dict[str, Any]) -> None:
        # timm records here what create_model was given, and writes it as JSON beside saved weights
        self._recorded_args = {k: v.as_dict() if isinstance(v, RelPos) else v for k, v in args.items()}

    def position_parameters(self) -> set[str]:
        """Names of the parameters of relative position (tables, u, v): no weight decay, and a faster learning rate."""
        return {
            f"{name}.{parameter}"
            for name, module in self.named_modules()
            if isinstance(module, PositionTerms)
            for parameter, _ in module.named_parameters()
        }

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that should not decay: timm's own and ``position_parameters()``."""
        return super().no_weight_decay() | self.position_parameters()

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Change the image or patch size; tables follow by the rule ``rel_pos.resize``."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for attn in self.relative_attentions():
            attn.set_grid_size(self.patch_embed.grid_size)

    def relative_attentions(self) -> list[RelativeAttention2d]:
        """The relative attention of each block, in order."""
        return [module for module in self.modules() if isinstance(module, RelativeAttention2d)]

    def _pos_embed(self, x: torch.Tensor) -> torch.Tensor:
        if self.dynamic_img_size:  # x is (B, h, w, D): the grid of this batch
            for attn in self.relative_attentions():
                attn.grid_size = (x.shape[1], x.shape[2])
        if not self.training and not torch.compiler.is_compiling():
            self._warn_beyond_trained()
        return super()._pos_embed(x)

    def _warn_beyond_trained(self) -> None:
        attn = next(iter(self.relative_attentions()), None)
        if attn is None or attn.grid_size in self._seen_grids:
            return
        self._seen_grids.add(attn.grid_size)
        h, w = attn.grid_size
        if not attn.position_terms.covers(torch.arange(h)[:, None], torch.arange(w)[None]).all():
            warnings.warn(
                f"a grid of {h}x{w} patches reads relative positions beyond the trained ones, where the last trained "
                "entry is repeated: see vitrel.coverage(model); train at this size, or take resize='interpolate'",
                stacklevel=2,
            )
