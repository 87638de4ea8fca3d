"""The named variants, registered with timm, and the weights that come with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import checkpoint_filter_fn

from vitrel.relpos import RelPos
from vitrel.vit import RelativeVisionTransformer

WEIGHTS = Path(__file__).parent / "weights"
"""A folder ARCHITECTURE.TAG for each set of weights, as ``scripts/export.py`` writes it."""

_SHIPPED: dict[str, dict[str, Any]] = {
    file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted(WEIGHTS.glob("[!.]*/config.json"))
}


def _cfg(size: int, num_classes: int, crop_pct: float) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": num_classes,
        "input_size": (3, size, size),
        "pool_size": None,
        "fixed_input_size": True,
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "mean": IMAGENET_INCEPTION_MEAN,
        "std": IMAGENET_INCEPTION_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
    }


def _shipped_cfg(name: str) -> dict[str, Any]:
    stored = _SHIPPED[name]
    known = {"num_classes": stored["num_classes"], "label_names": stored["label_names"], **stored["pretrained_cfg"]}
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in known.items()}
    return {**plain, "file": str(WEIGHTS / name / "model.safetensors")}


default_cfgs = generate_default_cfgs(
    {
        "vitrel_micro_patch4_32": _cfg(32, 100, 1.0),
        "vitrel_tiny_patch4_32": _cfg(32, 100, 1.0),
        "vitrel_tiny_patch16_224": _cfg(224, 1000, 0.9),
        "vitrel_small_patch16_224": _cfg(224, 1000, 0.9),
        "vitrel_base_patch16_224": _cfg(224, 1000, 0.9),
        **{name: _shipped_cfg(name) for name in _SHIPPED},
    }
)


def _create(variant: str, pretrained: bool, body: dict[str, Any], **kwargs: Any) -> RelativeVisionTransformer:
    tag = kwargs.get("pretrained_cfg") or (default_cfgs[variant].tags[0] if pretrained else None)
    overlay = kwargs.get("pretrained_cfg_overlay") or {}
    stored: dict[str, Any] = {}
    if isinstance(tag, str) and not overlay.get("file"):
        stored = _SHIPPED.get(f"{variant}.{tag}", {}).get("model_args", {})
    if stored and pretrained:
        theirs = RelPos.of(stored["rel_pos"])
        if other := theirs.differing(RelPos.of(kwargs.get("rel_pos", theirs))):
            own = ", ".join(f"{name} {getattr(theirs, name)!r}" for name in other)
            raise ValueError(f"rel_pos: the weights {variant}.{tag} are of a scheme with {own}; leave rel_pos out")
    model = build_model_with_cfg(
        RelativeVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,  # an absolute embedding and other patches fit another size too
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **{**body, **stored, **kwargs},
    )
    if isinstance(model, RelativeVisionTransformer):
        model._model_args = {**stored, **model._model_args}  # timm records only what the caller has given
    return model


@register_model
def vitrel_micro_patch4_32(pretrained: bool = False, **kwargs: Any) -> RelativeVisionTransformer:
    """Width 128, depth 6, 4 heads, MLP ratio 2: 0.8 M parameters at 32 px."""
    body = {"patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4, "mlp_ratio": 2.0}
    return _create("vitrel_micro_patch4_32", pretrained, body, **kwargs)


@register_model
def vitrel_tiny_patch4_32(pretrained: bool = False, **kwargs: Any) -> RelativeVisionTransformer:
    """DeiT-Ti's body on 4 px patches: width 192, depth 12, 3 heads."""
    body = {"patch_size": 4, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("vitrel_tiny_patch4_32", pretrained, body, **kwargs)


@register_model
def vitrel_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> RelativeVisionTransformer:
    """DeiT-Ti's body: width 192, depth 12, 3 heads."""
    body = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("vitrel_tiny_patch16_224", pretrained, body, **kwargs)


@register_model
def vitrel_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> RelativeVisionTransformer:
    """ViT-S/16's body: width 384, depth 12, 6 heads."""
    body = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create("vitrel_small_patch16_224", pretrained, body, **kwargs)


@register_model
def vitrel_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> RelativeVisionTransformer:
    """ViT-B/16's body: width 768, depth 12, 12 heads."""
    body = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create("vitrel_base_patch16_224", pretrained, body, **kwargs)
