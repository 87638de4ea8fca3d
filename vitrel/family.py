"""What a model with relative attention adds to timm's: named position parameters, grids that follow the image."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from vitrel.attention import RelativeAttention2d
from vitrel.grid import Grid, Points
from vitrel.position import PositionTerms
from vitrel.recomputed import Recomputed
from vitrel.relpos import RelPos


def position_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters of relative position (tables, u, v) of any model, wrapped or not; empty without any.

    They should not decay, and may take a faster learning rate.
    """
    return {
        f"{name}.{parameter}" if name else parameter
        for name, module in model.named_modules()
        if isinstance(module, PositionTerms)
        for parameter, _ in module.named_parameters()
    }


def patch_grid(model: Any) -> tuple[int, int]:
    """(h, w) in patches of a timm model's image size; with ``dynamic_img_pad`` a last part of a patch counts."""
    rows, cols = model.patch_embed.dynamic_feat_size(model.patch_embed.img_size)
    return int(rows), int(cols)


class RelativeModel(nn.Module):
    """Mixed into a timm model with relative attention."""

    @property
    def _model_args(self) -> dict[str, Any]:
        return self._recorded_args

    @_model_args.setter
    def _model_args(self, args: dict[str, Any]) -> None:
        # timm records here what create_model was given, and writes it as JSON beside saved weights
        plain = dict(args)
        if "rel_pos" in plain:
            plain["rel_pos"] = RelPos.of(plain["rel_pos"]).as_dict()  # no name whose meaning may change
        if plain.get("blocks") is not None:
            plain["blocks"] = [int(i) for i in plain["blocks"]]
        self._recorded_args = plain

    def position_parameters(self) -> set[str]:
        """Names of the parameters of relative position (tables, u, v): no weight decay, and a faster learning rate."""
        return position_parameters(self)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that should not decay: timm's own and ``position_parameters()``."""
        return super().no_weight_decay() | position_parameters(self)  # type: ignore[misc]  # timm's

    def relative_attentions(self) -> list[RelativeAttention2d]:
        """The relative attentions, in order."""
        return [module for module in self.modules() if isinstance(module, RelativeAttention2d)]


class GridModel(RelativeModel):
    """Mixed into a timm ``VisionTransformer`` or ``Eva``: the images of a batch have one grid.

    With ``dynamic_img_size`` the layers hold the grid of the last batch; under gradient checkpointing a batch of
    another grid must wait for the backward pass, or that one raises a ValueError.
    """

    patch_embed: Any
    cls_token: Any

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Change the image or patch size; tables follow by the rule ``rel_pos.resize``."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)  # type: ignore[misc]  # timm's
        for attn in self.relative_attentions():
            attn.set_grid_size(patch_grid(self))

    def _pos_embed(self, x: Tensor) -> Any:
        if self.dynamic_img_size:  # x is (B, h, w, D): the grid of this batch
            if isinstance(x, torch.fx.Proxy):
                raise ValueError(
                    "dynamic_img_size: torch.fx would fix the grid of one image; take feature_cls='getter', or leave "
                    "dynamic_img_size out"
                )
            self._set_running_grid((x.shape[1], x.shape[2]))
        if not self.training and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            self._warn_beyond_trained()
        if isinstance(self, VisionTransformerDistilled) and self.pos_embed is None:  # timm's adds it unasked
            tokens = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.dist_token)]
            return self.pos_drop(torch.cat([*tokens, x.flatten(1, -2)], 1))
        return super()._pos_embed(x)  # type: ignore[misc]  # timm's

    def _set_running_grid(self, grid: tuple[int, int]) -> None:
        attentions = self.relative_attentions()
        again = self.training and self.grad_checkpointing and torch.is_grad_enabled()
        ahead = None
        if again and attentions and not torch.compiler.is_compiling():
            ahead = attentions[0].recomputed or Recomputed()
            ahead.add(grid)
        for attn in attentions:
            attn.running_grid = grid
            attn.recomputed = ahead or attn.recomputed

    def _warn_beyond_trained(self) -> None:
        attn = next(iter(self.relative_attentions()), None)
        seen = self.__dict__.setdefault("_seen_grids", set())
        grid = None if attn is None else attn.running_grid or attn.grid_size
        if attn is None or grid is None or grid in seen:
            return
        seen.add(grid)
        h, w = grid
        if not attn.position_terms.covers(torch.arange(h)[:, None], torch.arange(w)[None]).all():
            warnings.warn(
                f"a grid of {h}x{w} patches reads relative positions beyond the trained ones, where the last trained "
                f"entry is repeated, or a kernel ends: see vitrel.coverage(model, ({h}, {w})); train at this size, or "
                "take resize='interpolate'",
                stacklevel=2,
            )


class NaFlexModel(RelativeModel):
    """Mixed into a timm ``NaFlexVit``: padded batches of images with grids of their own.

    Offsets are those of the patch coordinates, in patches. Tables keep their size; an offset beyond it reads the last
    entry, whatever ``rel_pos.resize`` says, since one batch mixes grids.
    """

    embeds: Any

    def _forward_embeds(
        self, x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        embeds = super()._forward_embeds(x, patch_coord, patch_valid, attn_mask)  # type: ignore[misc]  # timm's
        kept = embeds["keep_indices"]
        where: Grid | Points | None = None
        if patch_coord is None:
            where = Grid(*self.embeds.dynamic_feat_size(tuple(x.shape[-2:])))
            patch_coord = where.coords(x.device).expand(x.shape[0], -1, -1)
        if kept is not None:
            patch_coord = patch_coord.gather(1, kept[..., None].expand(-1, -1, 2))
        if where is None or kept is not None:
            where = Points(patch_coord)
        for attn in self.relative_attentions():
            attn.places = where if isinstance(where, Grid) else None
        if isinstance(where, Points) or (self.grad_checkpointing and self.training):
            tokens, mask = embeds["patches"], embeds["attn_mask"]
            mask = tokens.new_zeros(tokens.shape[0], 1, 1, tokens.shape[1]) if mask is None else mask
            mask = mask.view(mask.shape)  # not the caller's tensor, which may come again with other coordinates
            mask.places = where
            embeds["attn_mask"] = mask
        return embeds
