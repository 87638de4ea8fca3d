"""What a run shows of its model: maps and numbers of every block while it trains, tables of what terms are worth."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
import wandb
from numpy.typing import NDArray
from PIL import Image
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import vitrel
from vitrel.ablate import switchable
from vitrel.measures import as_csv, block_means, head_numbers
from vitrel.probe import probes
from vitrel.training.data import PictureDataModule, normalize
from vitrel.training.fileio import ConfigError, write_whole
from vitrel.training.loggers import run_folder
from vitrel.training.model import timm_model
from vitrel.training.sources import SplitName
from vitrel.training.studies import Study, sizes_around

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = ("distance", "distance_content", "distance_position", "direction", "entropy_position")
"""Numbers per head whose mean over the heads of a block is logged, besides the shares of the terms."""


@dataclass(frozen=True)
class Examples:
    """A few pictures of a split.

    Attributes:
        pictures: Normalised, as the model takes them, (B, 3, h, w).
        shown: The same as they look, (h, w, 3) each.
        labels: Names of their classes.
    """

    pictures: Tensor
    shown: list[NDArray[np.uint8]]
    labels: list[str]


def examples(data: PictureDataModule, split: SplitName, count: int) -> Examples:
    """The first picture of as many classes as there are, then the next ones, of a split that is open."""
    labels = data.splits[split].labels[data.splits[split].indices]
    order = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    turns = sorted((turn, int(i)) for found in order for turn, i in enumerate(found[:count]))
    dataset = data.eval_dataset(split)
    raw, names = [], []
    for _, index in turns[:count]:
        picture, label = dataset[index]
        raw.append(picture)
        names.append(data.classes[label])
    stacked = torch.stack(raw)
    return Examples(normalize(stacked, data.inputs), [np.asarray(p.movedim(0, -1)) for p in raw], names)


@contextmanager
def _whole_parameters(trainer: pl.Trainer) -> Iterator[None]:
    """Within it every process holds every parameter whole, sharded by FSDP or not; all have to enter it."""
    if isinstance(trainer.strategy, FSDPStrategy):
        wrapped = trainer.strategy.model
        assert wrapped is not None
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            yield
    else:
        yield


class BiasMaps(Callback):
    """Draws every block's maps each ``every`` epochs and after the last one, and measures its heads.

    Pictures go to ``bias_maps/BLOCK.png`` of the run folder, numbers to ``bias_maps/heads.csv``, the newest over the
    older; all loggers get the means over the heads, and W&B the pictures too, which it keeps all. The weights are those
    in training, also where an average is kept. The pictures that terms are seen on come from the validation split.

    Args:
        every: Epochs between two drawings.
        pictures: How many pictures of the validation split terms are averaged over.
    """

    def __init__(self, every: int, pictures: int = 8) -> None:
        self.every, self.pictures = every, pictures
        self._examples: Examples | None = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        folder = run_folder(trainer)
        if not (epoch % self.every == 0 or epoch == trainer.max_epochs) or trainer.sanity_checking or not folder:
            return
        with _whole_parameters(trainer):
            if trainer.is_global_zero:
                self._draw(trainer, pl_module, folder / "bias_maps")

    def _draw(self, trainer: pl.Trainer, pl_module: pl.LightningModule, folder: Path) -> None:
        from vitrel.plots import plot_term_maps

        assert isinstance(pl_module.net, nn.Module)
        net, data = timm_model(pl_module.net), getattr(trainer, "datamodule", None)
        if not switchable(net) or not isinstance(data, PictureDataModule):
            return
        if self._examples is None:
            self._examples = examples(data, "val", self.pictures)
        seen = probes(net, self._examples.pictures)
        maps, rows = vitrel.term_maps(net, seen), head_numbers(net, seen)
        drawn = {name: render(plot_term_maps(block, name)) for name, block in maps.items()}
        for name, picture in drawn.items():
            write_whole(folder / f"{name}.png", _png(picture))
        write_whole(folder / "heads.csv", as_csv(rows))
        step = trainer.global_step - 1  # as Lightning counts the metrics of an epoch's end
        curves = {
            f"heads_{number}/{_key(block)}": value
            for block, numbers in block_means(rows).items()
            for number, value in numbers.items()
            if number in CURVES or number.startswith("share_")
        }
        for name, block in maps.items():
            if largest := [float(block[kind].values.abs().max()) for kind in ("free", "kernel") if kind in block]:
                curves[f"maps_absmax/{_key(name)}"] = max(largest)
        for logger in trainer.loggers:
            shown: dict[str, Any] = {}
            if isinstance(logger, WandbLogger):  # in one call, so that one step of the slider has them all
                caption = f"epoch {trainer.current_epoch + 1}"
                shown = {f"maps/{_key(n)}": wandb.Image(p, caption=caption) for n, p in drawn.items()}
            logger.log_metrics({**curves, **shown}, step)


class StudyTables(Callback):
    """Logs to W&B, after the test, what each term is worth and how the model does at other sizes.

    Args:
        pictures: How many test pictures the tables are made from.
    """

    def __init__(self, pictures: int = 1000) -> None:
        self.pictures = pictures

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        net, data = pl_module.net, getattr(trainer, "datamodule", None)
        assert isinstance(net, nn.Module)
        if not loggers or not trainer.is_global_zero or not isinstance(data, PictureDataModule) or not switchable(net):
            return
        study = Study(net, data, pl_module.device, self.pictures)
        tables = {"tables/ablation": study.ablation()}
        with suppress(ConfigError):  # a model of one size
            tables["tables/sizes"] = study.sizes(sizes_around(data.inputs, net))
        for logger in loggers:
            for name, rows in tables.items():
                logger.log_table(name, columns=list(rows[0]), data=[list(row.values()) for row in rows])


def render(figure: Figure) -> NDArray[np.uint8]:
    """A figure as (H, W, 3) uint8 RGB; loggers take floats for something else."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _key(block: str) -> str:
    """A block's name for loggers: W&B takes a dot for a path, and sorts by letters."""
    return re.sub(r"\d+", lambda number: number[0].zfill(2), block.replace(".", "_"))


def png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    return _png(render(figure))


def _png(picture: NDArray[np.uint8]) -> bytes:
    content = io.BytesIO()
    Image.fromarray(picture).save(content, "PNG")
    return content.getvalue()
