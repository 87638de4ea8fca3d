"""Callbacks of a run: its settings on disk, its seeds per epoch, checkpoints, averaging, one line per epoch."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar, WeightAveraging
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
    callbacks: list[Callback] = [EpochSeed(config.seed), ConfigWriter(config), EpochLine(), FinishLoggers()]
    if config.optim.ema_decay is not None:
        callbacks.append(WeightEMA(config.optim.ema_decay))
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
    """Of equally good checkpoints the later; a resumed run takes the best one along into its own folder."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._stage, self._zero = stage, trainer.is_global_zero

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        tie = current is not None and self.best_model_score is not None and bool(current == self.best_model_score)
        return tie or super().check_monitor_top_k(trainer, current)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._stage != "fit":
            return  # a test reads weights only
        if state_dict["dirpath"] == self.dirpath:
            super().load_state_dict(state_dict)
            return
        best, score = Path(state_dict["best_model_path"]), state_dict["best_model_score"]
        if self.dirpath and score is not None and best.is_file():
            here = str(Path(self.dirpath) / best.name)
            if self._zero:
                Path(self.dirpath).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(best, here)
            moved = {"best_model_path": here, "kth_best_model_path": here, "best_k_models": {here: score}}
            super().load_state_dict({**state_dict, **moved, "dirpath": self.dirpath})


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
    """Writes the resolved settings to ``config.yaml`` of the run folder."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        if stage == "fit" and folder and trainer.is_global_zero:
            write_whole(folder / "config.yaml", dump(self.config))


class WeightEMA(WeightAveraging):
    """Exponential moving average of the weights, used by validation, checkpoints and the final model.

    The decay grows as (1 + n) / (10 + n) up to ``decay`` with the number of updates n: the average follows the weights
    from the first step on, and is never the untrained copy it started from. Buffers are copied, not averaged.
    """

    def __init__(self, decay: float) -> None:
        def average(averaged: Iterable[Tensor], current: Iterable[Tensor], updates: Tensor | int) -> None:
            n = int(updates)
            part = 1 - min(decay, (1 + n) / (10 + n))
            for mean, value in zip(averaged, current, strict=True):
                mean.lerp_(value.to(mean.dtype), part)

        super().__init__(use_buffers=False, multi_avg_fn=average)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # In a test the checkpoint's weights, which are the average, are the wanted ones.
        if trainer.state.fn == TrainerFn.FITTING:
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


class FinishLoggers(Callback):
    """Closes W&B in a process that a strategy forked or spawned; it would lose what it has not written."""

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
