"""Callbacks of a run: its settings on disk, its seeds per epoch, checkpoints, averaging, one line per epoch."""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar, WeightAveraging
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from vitrel.training.config import dump
from vitrel.training.data import PictureDataModule
from vitrel.training.fileio import write_whole
from vitrel.training.loggers import finish_wandb, run_folder
from vitrel.training.pictures import BiasMaps, StudyTables
from vitrel.training.settings import TrainConfig


def build_callbacks(config: TrainConfig) -> list[Callback]:
    """The callbacks that the settings ask for."""
    callbacks: list[Callback] = [EpochSeed(config.seed), ConfigWriter(config), EpochLine(), WandbSession()]
    if config.optim.ema_decay is not None:
        callbacks.append(WeightEMA(config.optim.ema_decay, config.optim.ema_start))
    if saves_checkpoints(config):
        callbacks += best_and_last(validates=config.trainer.get("limit_val_batches", 1.0) != 0)
    if config.logger.maps_every:
        callbacks += [BiasMaps(config.logger.maps_every), StudyTables()]
    callbacks.append(LearningRateMonitor(logging_interval="step"))
    if config.trainer.get("enable_progress_bar", True) and sys.stdout.isatty():
        callbacks.append(TQDMProgressBar(refresh_rate=10, leave=False))
    return callbacks


def saves_checkpoints(config: TrainConfig) -> bool:
    """Whether the run writes checkpoints: not when told so, and not in a trial of a few batches."""
    return bool(config.trainer.get("enable_checkpointing", True)) and not config.trainer.get("fast_dev_run")


def best_and_last(validates: bool = True) -> list[Callback]:
    """The best checkpoint by validation accuracy, and ``last.ckpt`` of every epoch, in ``checkpoints/``."""
    last = RunCheckpoint(filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
    best = RunCheckpoint(
        monitor="val/acc",
        mode="max",
        filename="best-epoch{epoch:03d}",
        auto_insert_metric_name=False,  # the slash of the metric's name would make a folder
    )
    return [best, last] if validates else [last]


class RunCheckpoint(ModelCheckpoint):
    """Of equally good checkpoints the later; a resumed run takes the best and the last along into its own folder."""

    _resumed: str | Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._zero, self._resumed = trainer.is_global_zero, None

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        tie = current is not None and self.best_model_score is not None and bool(current == self.best_model_score)
        return tie or super().check_monitor_top_k(trainer, current)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # a test reads weights only
            self._resumed = trainer.ckpt_path

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.dirpath or not self._resumed:
            return
        resumed, here = Path(self._resumed), Path(self.dirpath)
        if self.monitor is None:
            self._take(resumed, here / "last.ckpt")
            self.best_model_path = str(here / "last.ckpt")
            return
        stored, score = Path(state_dict["best_model_path"]), state_dict["best_model_score"]
        best = next((p for p in (resumed.with_name(stored.name), stored) if p.is_file()), None)
        if score is not None and best is not None:
            self._take(best, here / best.name)
            path = str(here / best.name)
            moved = {"best_model_path": path, "kth_best_model_path": path, "best_k_models": {path: score}}
            super().load_state_dict({**state_dict, **moved, "dirpath": self.dirpath})

    def _take(self, source: Path, target: Path) -> None:
        if self._zero and source.resolve() != target.resolve():
            write_whole(target, source.read_bytes())


class EpochSeed(Callback):
    """Seeds every epoch anew, so that a resumed run draws what it would have drawn without a stop."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sequence = np.random.SeedSequence([self.seed, trainer.current_epoch, trainer.global_rank])
        seeds = [int(s) for s in sequence.generate_state(3)]
        torch.manual_seed(seeds[0])
        np.random.seed(seeds[1])  # noqa: NPY002 (other libraries may draw from it)
        random.seed(seeds[2])
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, PictureDataModule):
            data.seed_order(trainer.current_epoch)


class ConfigWriter(Callback):
    """Writes the resolved settings to ``config.yaml`` of the run folder, and the global batch to the loggers."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        if stage == "fit" and folder and trainer.is_global_zero:
            write_whole(folder / "config.yaml", dump(self.config))
        for logger in trainer.loggers if stage == "fit" else []:
            logger.log_hyperparams({"global_batch": global_batch(self.config, trainer), "lr": self.config.optim.lr})


def global_batch(config: TrainConfig, trainer: pl.Trainer) -> int:
    """Images per optimizer step, over all devices: what the learning rate is stated for."""
    return config.data.batch_size * trainer.world_size * trainer.accumulate_grad_batches


class WeightEMA(WeightAveraging):
    """Exponential moving average of the weights, used by validation, checkpoints and the final model once it has begun.

    It begins as a copy of the weights after the first step of epoch ``start``; until then validation and checkpoints
    have the weights in training. The decay grows as (1 + n) / (10 + n) up to ``decay`` with the number of updates n.
    Buffers are copied, not averaged.
    """

    def __init__(self, decay: float, start: int = 0) -> None:
        def average(averaged: Iterable[Tensor], current: Iterable[Tensor], updates: Tensor | int) -> None:
            n = int(updates)
            part = 1 - min(decay, (1 + n) / (10 + n))
            for mean, value in zip(averaged, current, strict=True):
                mean.lerp_(value.to(mean.dtype), part)

        super().__init__(use_buffers=False, multi_avg_fn=average)
        self.start, self._epoch = start, 0

    @property
    def begun(self) -> bool:
        """Whether there is an average."""
        return self._average_model is not None and bool(self._average_model.n_averaged > 0)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch = trainer.current_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and self._epoch >= self.start

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.begun:
            super().on_validation_epoch_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.begun:
            super().on_validation_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.begun:
            super().on_train_end(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.begun:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # In a test the checkpoint's weights, which are the average, are the wanted ones.
        if trainer.state.fn == TrainerFn.FITTING and "averaging_state" in checkpoint:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)


class EpochLine(Callback):
    """One line per epoch with the metrics, the seconds and the time left."""

    def __init__(self) -> None:
        self._start = 0.0
        self._first = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start, self._first = time.monotonic(), trainer.current_epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        done, total = trainer.current_epoch + 1, trainer.max_epochs or -1
        spent = time.monotonic() - self._start
        values = trainer.callback_metrics
        parts = [f"epoch {done}/{total}" if total > 0 else f"epoch {done}"]
        parts += [f"{n} {float(values[n]):.4f}" for n in ("train/loss", "val/loss", "val/acc") if n in values]
        parts.append(f"{duration(spent)} spent")
        if total > 0:
            parts.append(f"{duration(spent / (done - self._first) * (total - done))} left")
        _print(trainer, "  ".join(parts))


class WandbSession(Callback):
    """Keeps the identity of the W&B run in the checkpoints, so that a resumed run continues it.

    In a process that a strategy forked or spawned it also closes W&B, which would lose what it has not written.
    """

    def __init__(self) -> None:
        self.id: str | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        ids = [logger.version for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        self.id = ids[0] if ids else self.id

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.id}

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if multiprocessing.parent_process() is not None:
            finish_wandb()


def duration(seconds: float) -> str:
    """12 s, 3 min 05 s or 2 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@rank_zero_only
def _print(trainer: pl.Trainer, line: str) -> None:
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        bar.print(line)
    else:
        print(line, flush=True)
