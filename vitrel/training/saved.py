"""Saved models opened again: the model alone, or with the data that it is to be tested on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import timm
import timm.data
from safetensors import SafetensorError
from torch import nn

import vitrel
from vitrel.training import report
from vitrel.training.checkpoint import stored_config
from vitrel.training.config import from_dict
from vitrel.training.data import PictureDataModule, check_classes
from vitrel.training.fileio import ConfigError, read_yaml
from vitrel.training.model import timm_model
from vitrel.training.resume import read_checkpoint
from vitrel.training.settings import TrainConfig
from vitrel.training.sources import Source, find_source
from vitrel.training.task import ClassificationTask
from vitrel.training.transforms import InputConfig

Opened = tuple[ClassificationTask, PictureDataModule, pl.Trainer]


def evaluate(path: str | Path, **overrides: Any) -> dict[str, float]:
    """Test metrics of a checkpoint, or of the best checkpoint of a run folder; as :func:`open_run`."""
    task, data, trainer = open_run(path, **overrides)
    return dict(trainer.test(task, datamodule=data, verbose=False)[0])


def open_run(path: str | Path, **overrides: Any) -> Opened:
    """The trained task of a checkpoint or run folder, its data, and a trainer to test it.

    Args:
        path: A ``.ckpt`` file in a run folder's ``checkpoints/``, or the run folder.
        **overrides: Data settings to change, for example ``root``.

    Raises:
        ConfigError: If there is no such run or checkpoint.
        DataError: For data that are missing or damaged.
    """
    report.quiet()
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path}: there is no such run folder or checkpoint; a model's name needs --config")
    folder = path if path.is_dir() else path.parent.parent
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{path}: there is no {folder / 'config.yaml'}; give a run folder or a checkpoint inside one, or the"
            " settings of the data with --config"
        )
    found = [path] if path.is_file() else sorted((folder / "checkpoints").glob("best-*.ckpt"))
    found = found or [folder / "checkpoints" / "last.ckpt"]
    if not found[-1].is_file():
        raise ConfigError(f"{folder} holds no checkpoint")
    checkpoint = read_checkpoint(found[-1])
    config = from_dict(read_yaml(folder / "config.yaml"))
    vars(config.data).update(overrides)
    source = find_source(config.data)
    task = ClassificationTask.load_from_checkpoint(found[-1], map_location="cpu")
    opened = _with_data(task, config, source)
    check_classes(found[-1], checkpoint, opened[1].classes)
    return opened


def open_model(name: str, config: TrainConfig, **overrides: Any) -> Opened:
    """A model with weights, the data of some settings, and a trainer to test it; otherwise as :func:`open_run`.

    Args:
        name: As for :func:`load`.
        config: Settings whose ``data`` and ``trainer`` are taken; the model is the saved one.
        **overrides: Data settings to change, for example ``root``.

    Raises:
        ConfigError: If there is no such model, or its classes are not those of the data.
        DataError: For data that are missing or damaged.
    """
    report.quiet()
    vars(config.data).update(overrides)
    net = load(name)
    source = find_source(config.data)
    known = timm.data.resolve_model_data_config(net)  # what it was trained with goes before what the data set has
    config.data.mean, config.data.std = list(known["mean"]), list(known["std"])
    config.data.crop_pct = known["crop_pct"]
    labels = (getattr(net, "pretrained_cfg", None) or {}).get("label_names")
    outputs = getattr(net, "num_classes", None)
    if outputs != len(source.classes) or (labels and list(labels) != list(source.classes)):
        known = f"classes such as {', '.join(labels[:3])}" if labels else f"{outputs} classes"
        raise ConfigError(
            f"{name}: the model has {known}, and the data {len(source.classes)} such as"
            f" {', '.join(source.classes[:3])}; give the settings of the data that it was trained on"
        )
    folder = _model_folder(name)
    strips = {} if folder is None else (stored_config(str(folder)) or {}).get("strips")
    if strips:
        net = vitrel.StripReader(net, strips["strip_rows"], strips["memory_rows"])
    return _with_data(ClassificationTask(config.as_dict(), len(source.classes), net), config, source)


def _with_data(task: ClassificationTask, config: TrainConfig, source: Source) -> Opened:
    data = PictureDataModule(config.data, InputConfig.of(timm_model(task.net), config.data), source)
    data.prepare_data()
    data.setup("test")
    given = {k: v for k, v in config.trainer.items() if k in ("accelerator", "precision", "limit_test_batches")}
    trainer = pl.Trainer(
        logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(), devices=1, **given,
    )  # fmt: skip
    return task, data, trainer


def load(source: str) -> nn.Module:
    """The trained model behind a run folder, a model folder or a model name.

    Raises:
        ConfigError: If there is none, or its files are damaged.
    """
    folder = _model_folder(source)
    if folder is None and Path(source).exists():
        raise ConfigError(
            f"{source}: expected a run folder with model/ in it or a saved model folder; found no config.json"
        )
    if folder is None and not timm.is_model(source.split(".")[0]):
        raise ConfigError(f"{source}: no such folder, and no model of that name (see timm.list_models('vitrel*'))")
    name = source if folder is None else f"local-dir:{folder}"
    try:
        return timm.create_model(name, pretrained=True).eval()
    except (KeyError, TypeError, json.JSONDecodeError) as e:  # not what a saved model has in it
        where = source if folder is None else folder / "config.json"
        raise ConfigError(f"{where}: not the configuration of a saved model: {_first(e)}") from None
    except (OSError, RuntimeError, ValueError, SafetensorError) as e:
        raise ConfigError(f"{source}: {_first(e)}") from None


def _model_folder(source: str) -> Path | None:
    """The model folder that a path means: itself, or ``model/`` of a run folder."""
    return next((p for p in (Path(source) / "model", Path(source)) if (p / "config.json").is_file()), None)


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
