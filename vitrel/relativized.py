"""A relativized model by name, so that timm loads what it has saved, and trains it from settings alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import timm
import torch
from timm.models import (
    Eva,
    NaFlexVit,
    build_model_with_cfg,
    eva,
    naflexvit,
    register_model,
    vision_transformer,
)
from torch import Tensor, nn

from vitrel import zoo
from vitrel.relativize import NAME, family, relativize
from vitrel.relpos import DEFAULT

default_cfgs = {NAME: zoo.default_cfgs["vitrel_tiny_patch16_224"]}  # that of its default base; another base has its own


@register_model
def vitrel_relativized(
    pretrained: bool = False,
    *,
    base: str = "vit_tiny_patch16_224",
    rel_pos: Any = DEFAULT,
    keep_absolute: bool = True,
    blocks: Iterable[int] | None = None,
    grid_size: tuple[int, int] | None = None,
    backend: str = "auto",
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """timm's ``base`` made relative, see ``vitrel.relativize``.

    Args:
        pretrained: From a folder or the hub the weights that were saved there; else those that timm knows for ``base``.
        base: Name of a timm model.
        rel_pos: As for ``vitrel.relativize``; no terms are "none", since timm drops an argument that is None.
        **kwargs: Arguments of ``base``.
    """
    stored = bool((pretrained_cfg_overlay or {}).get("file") or pretrained_cfg)
    if not pretrained_cfg:
        try:
            known = timm.get_pretrained_cfg(base)
        except RuntimeError as e:  # an unknown tag
            raise ValueError(f"base: {e}") from None
        if known is None:
            raise ValueError(f"base: no timm model is called {base!r}; timm.list_models() lists the names")
        pretrained_cfg = replace(known, architecture=NAME)

    with torch.device("meta"):
        family(timm.create_model(base))  # a model of another family may not know the arguments of the body

    def build(**body: Any) -> nn.Module:
        plain = timm.create_model(base, pretrained=pretrained and not stored, **body)
        how: dict[str, Any] = {"keep_absolute": keep_absolute, "blocks": blocks, "grid_size": grid_size}
        return relativize(plain, rel_pos, backend=backend, **how)

    return build_model_with_cfg(
        build,
        NAME,
        pretrained and stored,
        pretrained_cfg=pretrained_cfg,
        pretrained_cfg_overlay=pretrained_cfg_overlay,
        pretrained_filter_fn=_resized,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **kwargs,
    )


def _resized(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """What timm does to saved weights of a family, so that an absolute embedding and patches fit another size."""
    room = eva if isinstance(model, Eva) else naflexvit if isinstance(model, NaFlexVit) else vision_transformer
    return room.checkpoint_filter_fn(state_dict, model)
