"""Augmentation by albumentations: from an H x W x 3 uint8 picture to a uint8 tensor of the model's input size.

* Pictures stay uint8 until they are on the device; the data module normalises whole batches there.
* Each picture draws its own random state from torch's generator, so that epochs, workers and ranks differ, one seed
  repeats them, and the transforms of one picture are independent of each other.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import timm.data
import torch
from numpy.typing import NDArray
from timm.models import get_model_input_config
from torch import Tensor, nn
from torchvision.transforms import v2

from vitrel.training.settings import DataConfig

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # albumentations looks for updates when it is imported
import albumentations as A
import cv2

cv2.setNumThreads(0)  # a picture is too small to share, and loader workers already use the cores

_INTERPOLATION = {
    "nearest": cv2.INTER_NEAREST,
    "bilinear": cv2.INTER_LINEAR,
    "bicubic": cv2.INTER_CUBIC,
    "lanczos": cv2.INTER_LANCZOS4,
}

STATISTICS = {
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    "digits": ([0.3053, 0.3053, 0.3053], [0.3760, 0.3760, 0.3760]),
}
"""Mean and standard deviation per channel of the training images, RGB in 0..1."""


@dataclass(frozen=True)
class InputConfig:
    """What a model expects of its pictures, in timm's words.

    Attributes:
        size: Rows and columns in pixels.
        mean: Per channel, RGB in 0..1.
        std: Likewise.
        interpolation: ``bicubic``, ``bilinear``, ...
        crop_pct: Part of the picture that the centre crop of evaluation keeps.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0

    @classmethod
    def of(cls, model: nn.Module, data: DataConfig) -> InputConfig:
        """The model's own values, with the mean, std and crop of the data settings where given."""
        known = timm.data.resolve_model_data_config(model)
        size = tuple(get_model_input_config(model)["input_size"][1:])
        mean, std = known["mean"], known["std"]
        if data.name in STATISTICS:
            mean, std = STATISTICS[data.name]
        if data.mean is not None and data.std is not None:
            mean, std = data.mean, data.std
        crop = known["crop_pct"] if data.crop_pct is None else data.crop_pct
        return cls((size[0], size[1]), tuple(mean), tuple(std), known["interpolation"], crop)

    def as_data_config(self) -> dict[str, object]:
        """The keys of timm's ``data_config``."""
        return {
            "input_size": (3, *self.size),
            "mean": self.mean,
            "std": self.std,
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "crop_mode": "center",
        }


class PictureTransform:
    """Brings a picture to the model's size, then augments it with a fresh random state.

    Args:
        fit: albumentations transforms for a picture that has not the model's size.
        size: Rows and columns of the model's input; a picture of this size skips ``fit``.
        augment: albumentations transforms with randomness.
    """

    def __init__(
        self, fit: list[A.BasicTransform], size: tuple[int, int] | None, augment: list[A.BasicTransform]
    ) -> None:
        self.size = size
        self.fit = A.Compose(fit, strict=True)
        self.augment = A.Compose(augment, strict=True)

    def __call__(self, picture: NDArray[np.uint8]) -> Tensor:
        """(H, W, 3) uint8 to (3, h, w) uint8, h x w being the model's input.

        Raises:
            ValueError: For anything but (H, W, 3) uint8; albumentations would take it, and do something else with it.
        """
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or 0 in picture.shape:
            raise ValueError(f"picture: expected (H, W, 3) uint8, got {picture.shape} {picture.dtype}")
        if self.size != picture.shape[:2]:
            picture = self.fit(image=picture)["image"]
        if self.augment.transforms:
            k = int(torch.randint(2**63 - 1, ()))
            self.augment.set_random_state(np.random.default_rng(k), random.Random(k))
            picture = self.augment(image=picture)["image"]
        return torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1)))


def eval_transform(inputs: InputConfig) -> PictureTransform:
    """Resize to cover the input at ``crop_pct``, then the centre crop, as timm does."""
    size = inputs.size if inputs.crop_pct == 1 else None
    return PictureTransform(_cover_and_crop(inputs, inputs.crop_pct), size, [])


def train_transform(inputs: InputConfig, data: DataConfig) -> PictureTransform:
    """The recipe ``data.augment`` with the colour jitter and cutout of the settings.

    * ``none``: as in evaluation, without its margin
    * ``shift``: shifts up to ``crop_padding``, turns up to 10 degrees, scales by up to 10 %; no flip
    * ``crop_flip``: black border of ``crop_padding``, random crop, horizontal flip
    * ``resized_crop``: random area and aspect resized to the input, horizontal flip
    """
    rows, cols = inputs.size
    pad = data.crop_padding
    fit, steps = _cover_and_crop(inputs, 1.0), list[A.BasicTransform]()
    size: tuple[int, int] | None = inputs.size
    if data.augment == "shift":
        steps.append(A.Affine(scale=(0.9, 1.1), rotate=(-10, 10), translate_px=(-pad, pad), p=1.0))
    elif data.augment == "crop_flip":
        steps.append(A.PadIfNeeded(rows + 2 * pad, cols + 2 * pad, border_mode=cv2.BORDER_CONSTANT, fill=0))
        steps.append(A.RandomCrop(rows, cols))
    elif data.augment == "resized_crop":
        fit, size = [], None
        low, high = data.scale
        method = _INTERPOLATION[inputs.interpolation]
        steps.append(A.RandomResizedCrop((rows, cols), (low, high), interpolation=method, area_for_downscale="image"))
    if data.augment in ("crop_flip", "resized_crop") and data.hflip:
        steps.append(A.HorizontalFlip(p=data.hflip))
    if data.color_jitter:
        strength = (1 - data.color_jitter, 1 + data.color_jitter)
        steps.append(A.ColorJitter(brightness=strength, contrast=strength, saturation=strength, hue=(0, 0), p=1.0))
    if data.cutout:
        hole = {"hole_height_range": (rows // 4, rows // 4), "hole_width_range": (cols // 4, cols // 4)}
        steps.append(A.CoarseDropout(num_holes_range=(1, 1), **hole, fill=0, p=data.cutout))
    return PictureTransform(fit, size, steps)


def mix_transform(data: DataConfig, num_classes: int) -> nn.Module | None:
    """MixUp and CutMix on a batch, one of them at random where both are on; None where both are off.

    It maps ``(B, 3, h, w)`` and labels ``(B,)`` to pictures and ``(B, num_classes)`` soft labels.
    """
    mixes: list[nn.Module] = []
    if data.mixup:
        mixes.append(v2.MixUp(num_classes=num_classes, alpha=data.mixup))
    if data.cutmix:
        mixes.append(v2.CutMix(num_classes=num_classes, alpha=data.cutmix))
    return v2.RandomChoice(mixes) if mixes else None


def _cover_and_crop(inputs: InputConfig, crop_pct: float) -> list[A.BasicTransform]:
    rows, cols = inputs.size
    cover = (math.floor(rows / crop_pct), math.floor(cols / crop_pct))
    method = _INTERPOLATION[inputs.interpolation]
    return [
        A.Lambda(image=partial(_around_the_middle, cover=cover), name="around_the_middle", p=1.0),
        A.SmallestMaxSize(max_size_hw=cover, interpolation=method, area_for_downscale="image"),
        A.CenterCrop(rows, cols, pad_if_needed=True),
    ]


def _around_the_middle(picture: NDArray[np.uint8], cover: tuple[int, int], **_: object) -> NDArray[np.uint8]:
    """At most 4 times what the crop keeps: 1 x 100,000 pixels would grow to gigabytes before it."""
    scale = max(c / side for c, side in zip(cover, picture.shape, strict=False))
    cut = [max(0, side - math.ceil(4 * c / scale)) // 2 for c, side in zip(cover, picture.shape, strict=False)]
    return picture[cut[0] : picture.shape[0] - cut[0], cut[1] : picture.shape[1] - cut[1]]
