"""Tall canvases of stacked pictures, one of which is marked: a task that strips solve only with memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrel.training.fileio import ConfigError
from vitrel.training.transforms import InputConfig

MARK = (255, 0, 255)  # magenta, RGB


def cell(inputs: InputConfig, count: int) -> InputConfig:
    """What one picture of a stack has to be.

    Raises:
        ConfigError: If the canvas cannot be divided.
    """
    rows, cols = inputs.size
    if rows % count:
        raise ConfigError(
            f"data.stack: {count} pictures do not divide the model's {rows} pixel rows; change model.img_size"
        )
    if count > 1 and rows // count < 4:
        raise ConfigError(
            f"data.stack: pictures of {rows // count} pixel rows have no room for a mark, expected at least 4"
        )
    return replace(inputs, size=(rows // count, cols))


class StackedPictures(Dataset[tuple[Tensor, int]]):
    """Canvases of ``count`` pictures on top of each other; the label is that of the picture below the mark.

    The mark is a square of a quarter of a picture's height, in the lower left corner of the picture above: cut between
    the two, neither half tells the label. The marked picture is any but the first, the others are drawn at random; in
    training any number of them is left black, since a label that six pictures may have given teaches next to nothing.

    Args:
        pictures: Pairs of a (3, h, w) uint8 tensor and a class index, all of one size.
        count: Number of pictures, at least 2.
        fixed: For evaluation: the same canvas for an index each time, and all of its pictures.
    """

    def __init__(self, pictures: Dataset[tuple[Tensor, int]], count: int, fixed: bool) -> None:
        self.pictures, self.count, self.fixed = pictures, count, fixed

    def __len__(self) -> int:
        return len(self.pictures)  # type: ignore[arg-type]  # those of a split have a length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(index) if self.fixed else None
        chosen = torch.randint(len(self), (self.count,), generator=draw)
        place = int(torch.randint(1, self.count, (), generator=draw))
        chosen[place] = index
        parts = [self.pictures[int(i)] for i in chosen]
        if not self.fixed:
            others = [i for i in torch.randperm(self.count).tolist() if i != place]
            for i in others[int(torch.randint(self.count, ())) :]:
                parts[i] = torch.zeros_like(parts[i][0]), parts[i][1]
        canvas = torch.cat([picture for picture, _ in parts], 1)
        height = canvas.shape[1] // self.count
        side = height // 4
        canvas[:, place * height - side : place * height, :side] = torch.tensor(MARK, dtype=torch.uint8)[:, None, None]
        return canvas, parts[place][1]
