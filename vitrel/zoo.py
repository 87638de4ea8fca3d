"""The named variants, registered with timm."""

from __future__ import annotations

from typing import Any

from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import checkpoint_filter_fn

from vitrel.vit import RelativeVisionTransformer


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


default_cfgs = generate_default_cfgs(
    {
        "vitrel_micro_patch4_32": _cfg(32, 100, 1.0),
        "vitrel_tiny_patch4_32": _cfg(32, 100, 1.0),
        "vitrel_tiny_patch16_224": _cfg(224, 1000, 0.9),
        "vitrel_small_patch16_224": _cfg(224, 1000, 0.9),
        "vitrel_base_patch16_224": _cfg(224, 1000, 0.9),
    }
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> RelativeVisionTransformer:
    return build_model_with_cfg(
        RelativeVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,  # an absolute embedding and other patches fit another size too
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def vitrel_micro_patch4_32(pretrained: bool = False, **kwargs: Any) -> RelativeVisionTransformer:
    """Width 128, depth 6, 4 heads, MLP ratio 2: 0.8 M parameters at 32 px."""
    args = {"patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4, "mlp_ratio": 2.0}
    return _create("vitrel_micro_patch4_32", pretrained, **{**args, **kwargs})


@register_model
def vitrel_tiny_patch4_32(pretrained: bool = False, **kwargs: Any) -> RelativeVisionTransformer:
    """DeiT-Ti's body on 4 px patches: width 192, depth 12, 3 heads."""
    args = {"patch_size": 4, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("vitrel_tiny_patch4_32", pretrained, **{**args, **kwargs})


@register_model
def vitrel_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> RelativeVisionTransformer:
    """DeiT-Ti's body: width 192, depth 12, 3 heads."""
    args = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("vitrel_tiny_patch16_224", pretrained, **{**args, **kwargs})


@register_model
def vitrel_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> RelativeVisionTransformer:
    """ViT-S/16's body: width 384, depth 12, 6 heads."""
    args = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create("vitrel_small_patch16_224", pretrained, **{**args, **kwargs})


@register_model
def vitrel_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> RelativeVisionTransformer:
    """ViT-B/16's body: width 768, depth 12, 12 heads."""
    args = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create("vitrel_base_patch16_224", pretrained, **{**args, **kwargs})
