"""What a run draws while it trains: the maps of every block, on disk and in W&B."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytorch_lightning as pl
from numpy.typing import NDArray
from PIL import Image
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import WandbLogger
from torch import nn

import vitrel
from vitrel.training.loggers import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class BiasMaps(Callback):
    """Draws the position maps of every block each ``every`` epochs and after the last one.

    They go to ``bias_maps/BLOCK.png`` of the run folder, the newest over the older, and to W&B, which keeps them all.
    The maps are those of the weights in training, also where an average is kept.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        folder = run_folder(trainer)
        if not (epoch % self.every == 0 or epoch == trainer.max_epochs) or trainer.sanity_checking or not folder:
            return
        if trainer.is_global_zero:
            self._draw(trainer, pl_module, folder / "bias_maps")

    def _draw(self, trainer: pl.Trainer, pl_module: pl.LightningModule, folder: Path) -> None:
        net = pl_module.net
        assert isinstance(net, nn.Module)
        maps = vitrel.bias_maps(net)
        pictures = {name: render(vitrel.plot_bias_maps(maps, blocks=[name])) for name in maps}
        for name, picture in pictures.items():
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(folder / f"{name}.png")
        step = trainer.global_step - 1  # as Lightning counts the metrics of an epoch's end
        for logger in trainer.loggers:
            logger.log_metrics({f"maps/{n}_absmax": float(m.abs().max()) for n, m in maps.items()}, step)
            if isinstance(logger, WandbLogger):
                for name, picture in pictures.items():
                    caption = f"epoch {trainer.current_epoch + 1}, largest {float(maps[name].abs().max()):.3g}"
                    logger.log_image(f"maps/{name}", [picture], step=step, caption=[caption])


def render(figure: Figure) -> NDArray[np.uint8]:
    """A figure as (H, W, 3) uint8 RGB; loggers take floats for something else."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
