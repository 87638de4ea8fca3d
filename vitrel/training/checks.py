"""Checks of the values of a config: ranges, and the model built without weights. No data are read."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from vitrel.training.fileio import ConfigError, one_line
from vitrel.training.model import check_model
from vitrel.training.settings import TrainConfig
from vitrel.training.task import position_by_term


def check(config: TrainConfig) -> None:
    """Refuses values that cannot work, before any work is done.

    Raises:
        ConfigError: Naming the first setting that is out of range.
    """
    for name, text in _texts(config, ""):
        if not text.strip():
            raise ConfigError(f"{name}: expected some text, got {text!r}; leave it out for the default")
        if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
            raise ConfigError(f"{name}: expected text without control characters, got {text!r}")
        if max(len(part.encode()) for part in text.split("/")) > 255:
            raise ConfigError(f"{name}: expected names of at most 255 bytes, got {text[:40]!r} and more")
    for name, good, expected, value in _ranges(config):
        if not good:
            raise ConfigError(f"{name}: expected {expected}, got {value}")
    if not config.trainer.get("fast_dev_run"):  # which writes nothing
        _check_runs(Path(config.runs))
    if (config.data.mean is None) != (config.data.std is None):
        raise ConfigError("data.mean and data.std go together; give both or neither")
    if config.data.download and config.data.name not in ("cifar10", "cifar100"):
        raise ConfigError(f"data.download: only cifar10 and cifar100 can be downloaded, not {config.data.name}")
    if config.ckpt_path and config.ckpt_path != "last" and not Path(config.ckpt_path).is_file():
        raise ConfigError(f"ckpt_path: there is no file {config.ckpt_path}; give a .ckpt file or 'last'")
    if config.data.stack > 1 and (config.data.mixup or config.data.cutmix):
        raise ConfigError("data.stack: a mix of two canvases has two marks; leave mixup and cutmix at 0")
    if config.model.strip_rows is None and config.model.memory_rows is not None:
        raise ConfigError("model.memory_rows: without model.strip_rows an image is read in one pass; give both")
    if config.model.strip_rows is not None and config.model.compile:
        raise ConfigError("model.compile: not with model.strip_rows, which reads a model in strips; leave one out")
    if "spawn" in str(config.trainer.get("strategy")):
        raise ConfigError(
            f"trainer.strategy: {config.trainer['strategy']} starts processes without what the run has opened; take"
            " ddp or ddp_fork"
        )
    terms = position_by_term(check_model(config.model))
    for term in config.optim.position_lr_scale if isinstance(config.optim.position_lr_scale, dict) else ():
        if term not in terms:
            known = f"it has {', '.join(terms)}" if terms else "it has no position parameters"
            raise ConfigError(f"optim.position_lr_scale: the model has no {term} to learn; {known}")
    _check_trainer(config.trainer)


def _check_trainer(arguments: dict[str, Any]) -> None:
    """Lightning refuses values that do not fit each other, or this machine, when a trainer is made."""
    bare = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    said = logging.getLogger("pytorch_lightning")
    level = said.level
    said.setLevel(logging.CRITICAL)  # the trainer of the run will say it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pl.Trainer(**{**arguments, **dict.fromkeys(bare, False)})
    except Exception as e:
        raise ConfigError(f"trainer: {one_line(str(e) or repr(e))}") from None
    finally:
        said.setLevel(level)


def _texts(section: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Every setting that is text, by its dotted name."""
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            yield from _texts(value, f"{prefix}{f.name}.")
        elif isinstance(value, str):
            yield prefix + f.name, value


def _check_runs(runs: Path) -> None:
    """Run folders can be made below ``runs``."""
    there = next(p for p in (runs, *runs.parents) if os.path.exists(p) or p == p.parent)
    if not there.is_dir():
        raise ConfigError(f"runs: {there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"runs: the folder {there} cannot be written; give another one")


def _ranges(config: TrainConfig) -> Iterator[tuple[str, bool, str, object]]:
    data, optim, model, trainer = config.data, config.optim, config.model, config.trainer
    whole, part = "an integer of at least 1", "a number from 0 to 1"
    name = config.name or ""
    plain = bool(name.strip(". ")) and not set(name) & set('/\\:*?"<>|')
    yield "name", plain, "a plain folder name", repr(name)
    yield "seed", 0 <= config.seed < 2**32, "an integer from 0 to 4294967295", config.seed
    sides = model.img_size if isinstance(model.img_size, list) else [1 if model.img_size is None else model.img_size]
    sizes = len(sides) in (1, 2) and min(sides) >= 1 and max(sides) <= 16384
    yield "model.img_size", sizes, "a side or [rows, columns] of at most 16384 pixels", model.img_size
    yield "model.patch_size", model.patch_size is None or model.patch_size >= 1, whole, model.patch_size
    for key, value in model.kwargs.items():
        most = 1024 if key == "depth" else 65536  # a slip of the finger would fill the memory, or never end
        yield f"model.{key}", not isinstance(value, int) or abs(value) <= most, f"at most {most}", value
    for key in ("drop_path_rate", "drop_rate"):
        rate = getattr(model, key) or 0.0
        yield f"model.{key}", 0 <= rate < 1, "a rate from 0 to below 1", rate
    yield "data.batch_size", data.batch_size >= 1, whole, data.batch_size
    workers = data.num_workers
    yield "data.num_workers", workers is None or 0 <= workers <= 512, "0 to 512, or null", workers
    size = data.val_size
    whole_size = math.isfinite(size) and float(size).is_integer()
    yield "data.val_size", 0 < size < 1 or (size >= 1 and whole_size), "a part below 1 or a count of images", size
    yield "data.split_seed", 0 <= data.split_seed < 2**32, "an integer from 0 to 4294967295", data.split_seed
    yield "data.crop_padding", 0 <= data.crop_padding <= 4096, "0 to 4096 pixels", data.crop_padding
    low_high = len(data.scale) == 2 and 0 < data.scale[0] <= data.scale[1] <= 1
    yield "data.scale", low_high, "[smallest, largest] with 0 < smallest <= largest <= 1", data.scale
    yield "data.hflip", 0 <= data.hflip <= 1, part, data.hflip
    yield "data.stack", data.stack >= 1, whole, data.stack
    yield "data.cutout", 0 <= data.cutout <= 1, part, data.cutout
    yield "data.color_jitter", 0 <= data.color_jitter <= 1, part, data.color_jitter
    for key in ("mixup", "cutmix"):
        alpha = getattr(data, key)
        yield f"data.{key}", 0 <= alpha < math.inf, "an alpha of 0 or more", alpha
    for key in ("mean", "std"):
        values = getattr(data, key)
        good = values is None or (len(values) == 3 and all(math.isfinite(v) for v in values))
        if key == "std" and good and values:
            good = min(values) > 0
        yield f"data.{key}", good, "three numbers, one per channel", values
    yield "data.crop_pct", data.crop_pct is None or 0 < data.crop_pct <= 1, "a part above 0, up to 1", data.crop_pct
    yield "data.fake_images", 1 <= data.fake_images <= 10**6, "1 to 1000000", data.fake_images
    yield "data.fake_classes", 2 <= data.fake_classes <= 10**6, "2 to 1000000", data.fake_classes
    yield "optim.lr", 0 < optim.lr < math.inf, "a positive number", optim.lr
    yield "optim.weight_decay", 0 <= optim.weight_decay < math.inf, "0 or more", optim.weight_decay
    betas = len(optim.betas) == 2 and all(0 <= b < 1 for b in optim.betas)
    yield "optim.betas", betas, "two numbers from 0 to below 1", optim.betas
    scale = optim.position_lr_scale
    factors = scale.values() if isinstance(scale, dict) else [scale]
    good = all(0 <= factor < math.inf for factor in factors)
    yield "optim.position_lr_scale", good, "0 or more, or such a number for each named term", scale
    yield "optim.warmup", 0 <= optim.warmup < 1, "a part of all steps from 0 to below 1", optim.warmup
    yield "optim.min_lr", 0 <= optim.min_lr <= 1, part, optim.min_lr
    yield "optim.label_smoothing", 0 <= optim.label_smoothing < 1, "a number from 0 to below 1", optim.label_smoothing
    decay = optim.ema_decay
    yield "optim.ema_decay", decay is None or 0 < decay < 1, "a decay between 0 and 1", decay
    last = trainer.get("max_epochs")
    begins = optim.ema_start >= 0 and (decay is None or last in (None, -1) or optim.ema_start < last)
    yield "optim.ema_start", begins, "0 or more, and less than trainer.max_epochs", optim.ema_start
    yield "logger.maps_every", config.logger.maps_every >= 0, "0 or more", config.logger.maps_every
    for key, least in (("max_epochs", 1), ("max_steps", 1), ("num_nodes", 1), ("accumulate_grad_batches", 1)):
        value = trainer.get(key)
        unlimited = key in ("max_epochs", "max_steps") and value == -1
        yield f"trainer.{key}", value is None or unlimited or value >= least, whole, value
    epochs, steps = trainer.get("max_epochs"), trainer.get("max_steps", -1)
    yield "trainer.max_epochs", epochs not in (None, -1) or steps > 0, "an end: max_epochs or max_steps", epochs
    clip = trainer.get("gradient_clip_val")
    yield "trainer.gradient_clip_val", clip is None or clip >= 0, "0 or more", clip
