"""Patches by several convolutions in place of one (Xiao et al., arXiv 2106.14881), from timm's parts."""

from __future__ import annotations

from typing import Any

from timm.layers import HybridEmbed, to_2tuple
from timm.models.vision_transformer_hybrid import ConvStem


class ConvEmbed(HybridEmbed):
    """An ``embed_layer`` of 3x3 convolutions with stride 2, batch norm and ReLU between them.

    Maps (B, C, H, W) to (B, h * w, D), one token per patch.

    Args:
        img_size: Rows and columns in pixels.
        patch_size: Side of a patch in pixels, 2^n for n convolutions of width D/2^(n-1), ..., D/2, D.
        in_chans: C.
        embed_dim: D.
        bias: Ignored: the last convolution has one.
        **kwargs: As for timm's ``HybridEmbed``.

    Raises:
        ValueError: For a patch that is not a power of two or not square, an image of other than whole patches, and
            ``dynamic_img_pad``.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        bias: bool = True,
        dynamic_img_pad: bool = False,
        **kwargs: Any,
    ) -> None:
        rows, cols = to_2tuple(patch_size)
        if rows != cols or rows < 2 or rows & (rows - 1):
            raise ValueError(f"patch_size: convolutions of stride 2 give patches of 2, 4, 8, ... px, got {patch_size}")
        if dynamic_img_pad:
            raise ValueError("dynamic_img_pad: convolutions have a border of their own; leave it out")
        steps = rows.bit_length() - 1
        self._pixels = rows
        self._check(img_size)
        stem = ConvStem(
            in_chans,
            depth=steps,
            channels=tuple(embed_dim >> steps - 1 - i for i in range(steps)),
            stride=(2,) * steps,
            device=kwargs.get("device"),
            dtype=kwargs.get("dtype"),
        )
        super().__init__(stem, img_size, patch_size=1, in_chans=in_chans, embed_dim=embed_dim, proj=False, **kwargs)

    def set_input_size(  # type: ignore[override]  # the sizes of its features follow from the image's
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Change the image size.

        Raises:
            ValueError: For another patch size, or an image of other than whole patches.
        """
        if patch_size is not None and to_2tuple(patch_size) != (self._pixels, self._pixels):
            raise ValueError(f"patch_size: convolutions cannot be resized to it, got {patch_size}; build a new model")
        if img_size is not None:
            self._check(img_size)
        super().set_input_size(img_size)

    def _check(self, img_size: int | tuple[int, int]) -> None:
        if any(side < self._pixels or side % self._pixels for side in to_2tuple(img_size)):
            raise ValueError(f"img_size: expected a multiple of the patch of {self._pixels} px, got {img_size}")
