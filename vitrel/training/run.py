"""A run from settings to results: build, fit, test the best checkpoint, write what it left.

``main`` is the command line; ``run`` is the same from Python.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import timm
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException

import vitrel
from vitrel.training.callbacks import build_callbacks, duration, saves_checkpoints
from vitrel.training.checkpoint import stored_config
from vitrel.training.checks import check
from vitrel.training.config import from_dict, parse
from vitrel.training.data import PictureDataModule, check_classes
from vitrel.training.fileio import ConfigError, read_yaml, write_whole
from vitrel.training.images import DataError
from vitrel.training.loggers import build_loggers, finish_wandb, run_folder
from vitrel.training.model import build_model, save_model_folder, timm_model
from vitrel.training.settings import TrainConfig
from vitrel.training.sources import Source, find_source
from vitrel.training.task import ClassificationTask
from vitrel.training.transforms import InputConfig


def run(config: TrainConfig) -> dict[str, Any]:
    """Trains, tests the best checkpoint and writes the run folder.

    Args:
        config: The settings, as :func:`~vitrel.training.config.parse` gives them.

    Returns:
        What ``results.json`` holds: test metrics, epochs, seconds, parameters, versions, and ``folder``.

    Raises:
        ConfigError: For settings that cannot work, before data are read.
        DataError: For data that are missing or damaged, naming them.
    """
    _quiet()
    check(config)
    resume = _find_checkpoint(config)
    source = find_source(config.data)
    _check_data(source, resume)
    config = dataclasses.replace(config, ckpt_path=None)  # what is written down can be run again
    pl.seed_everything(config.seed, workers=True, verbose=False)
    # Counts the tables as trained at this size: the check before training would warn of those that have grown.
    net = build_model(config.model, len(source.classes)).train()
    inputs = InputConfig.of(timm_model(net), config.data)
    if config.model.checkpoint:  # the run does not hang on the folder it started from
        config.data.mean, config.data.std, config.data.crop_pct = list(inputs.mean), list(inputs.std), inputs.crop_pct
    data = PictureDataModule(config.data, inputs, source, seed=config.seed)
    task = ClassificationTask(config.as_dict(), len(source.classes), net)
    trainer = _trainer(config)
    _announce(config, trainer, net, inputs)

    start = time.monotonic()
    try:
        trainer.fit(task, datamodule=data, ckpt_path=resume)
        if trainer.interrupted:
            raise KeyboardInterrupt
        seconds = time.monotonic() - start
        best, folder = _best_checkpoint(trainer), run_folder(trainer)
        if trainer.strategy.launcher is not None and trainer.strategy.launcher.is_interactive_compatible:
            trainer.loggers = []  # forked processes have taken the loggers with them; the test would start others
        metrics = trainer.test(task, datamodule=data, ckpt_path=best, verbose=False)[0]
        results = _results(config, trainer, net, metrics, seconds, best) | {
            "tested_on": source.tested_on,
            "skipped_files": len(source.skipped),
            "folder": str(folder) if folder else None,
        }
        if folder and trainer.is_global_zero:
            save_model_folder(task.net, folder / "model", data.classes, inputs.as_data_config())
            write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
        _report(trainer, results)
    finally:
        finish_wandb()
    return results


@rank_zero_only
def _check_data(source: Source, resume: str | None) -> None:
    """Finds what is wrong with the data before a run folder is made; other processes wait before they open them."""
    source.prepare()
    source.check()
    if resume:
        check_classes(resume, read_checkpoint(Path(resume)), source.classes)


def evaluate(path: str | Path, **overrides: Any) -> dict[str, float]:
    """Test metrics of a checkpoint, or of the best checkpoint of a run folder.

    Args:
        path: A ``.ckpt`` file in a run folder's ``checkpoints/``, or the run folder.
        **overrides: Data settings to change, for example ``root``.

    Raises:
        ConfigError: If there is no such run or checkpoint.
        DataError: For data that are missing or damaged.
    """
    task, data, trainer = open_run(path, **overrides)
    return dict(trainer.test(task, datamodule=data, verbose=False)[0])


def open_run(path: str | Path, **overrides: Any) -> tuple[ClassificationTask, PictureDataModule, pl.Trainer]:
    """The trained task of a checkpoint or run folder, its data, and a trainer to test it; as ``evaluate``."""
    _quiet()
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path}: there is no such run folder or checkpoint")
    folder = path if path.is_dir() else path.parent.parent
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{path}: there is no {folder / 'config.yaml'}; give a run folder or a checkpoint inside one")
    found = [path] if path.is_file() else sorted((folder / "checkpoints").glob("best-*.ckpt"))
    found = found or [folder / "checkpoints" / "last.ckpt"]
    if not found[-1].is_file():
        raise ConfigError(f"{folder} holds no checkpoint")
    checkpoint = read_checkpoint(found[-1])
    config = from_dict(read_yaml(folder / "config.yaml"))
    vars(config.data).update(overrides)
    source = find_source(config.data)
    task = ClassificationTask.load_from_checkpoint(found[-1], map_location="cpu")
    data = PictureDataModule(config.data, InputConfig.of(timm_model(task.net), config.data), source)
    data.prepare_data()
    data.setup("test")
    check_classes(found[-1], checkpoint, data.classes)
    given = {k: v for k, v in config.trainer.items() if k in ("accelerator", "precision", "limit_test_batches")}
    trainer = pl.Trainer(
        logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(), devices=1, **given,
    )  # fmt: skip
    return task, data, trainer


def main(argv: Sequence[str] | None = None, folders: Sequence[Path] = (), default: str | None = None) -> int:
    """The command line of training.

    Args:
        argv: Options; those of the process if not given.
        folders: Where ``--config NAME`` is looked for besides the path as given.
        default: The config taken when the options name none.

    Returns:
        The exit status: 0, 2 for a mistake in settings or data, 130 after Ctrl-C.
    """
    return guarded(lambda: run(parse(sys.argv[1:] if argv is None else argv, folders, default)))


def guarded(work: Any) -> int:
    """Calls ``work``; a mistake of the user becomes one line on the error stream and status 2."""
    try:
        work()
    except (ConfigError, DataError, MisconfigurationException) as e:
        lines = [line for line in str(e).splitlines() if line.strip()]
        # A loader worker hands its error over with a traceback, whose last line is the message.
        message = lines[-1] if lines and "Traceback" in str(e) else " ".join(lines)
        print(f"error: {message.removeprefix('vitrel.training.images.DataError: ')}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: {e.filename or 'a file'}: {e.strerror or e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; --ckpt_path last resumes", file=sys.stderr)
        return 130
    return 0


def _trainer(config: TrainConfig) -> pl.Trainer:
    given = dict(config.trainer)
    bar = given.pop("enable_progress_bar", True) and sys.stdout.isatty()
    try:
        return pl.Trainer(
            logger=build_loggers(config),
            callbacks=build_callbacks(config),
            default_root_dir=config.runs,
            enable_progress_bar=bar,
            **{"enable_model_summary": False, **given, "enable_checkpointing": saves_checkpoints(config)},
        )
    except (MisconfigurationException, ValueError, TypeError) as e:
        raise ConfigError(f"trainer: {' '.join(str(e).split())}") from e


def _find_checkpoint(config: TrainConfig) -> str | None:
    if config.ckpt_path is None:
        return None
    if config.ckpt_path != "last":
        _check_resumable(Path(config.ckpt_path), config)
        return config.ckpt_path
    folder = Path(config.runs) / (config.name or config.data.name)
    found = sorted(folder.glob("version_*/checkpoints/last.ckpt"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ConfigError(f"ckpt_path: no last.ckpt below {folder}; give a .ckpt file, or start without --ckpt_path")
    _check_resumable(found[-1], config)
    return str(found[-1])


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint as plain data and tensors.

    Raises:
        ConfigError: If it is not there or cannot be read.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return {**stored, "model": stored["hyper_parameters"]["config"]["model"]}
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}; give a .ckpt file of a run") from None
    except Exception:  # a file that is cut short or of another kind fails in many ways
        raise ConfigError(f"{path}: damaged, or no checkpoint of a run; take another one of its folder") from None


def _check_resumable(path: Path, config: TrainConfig) -> None:
    """A checkpoint continues the model that it was made with."""
    then, now = read_checkpoint(path)["model"], vars(config.model)
    for name in ("arch", "rel_pos", "img_size", "patch_size", "kwargs"):
        if then.get(name) != now[name]:
            raise ConfigError(
                f"ckpt_path: {path} was trained with model.{name} {then.get(name)}, now it is {now[name]}; "
                "give the same, or start without --ckpt_path"
            )


def _best_checkpoint(trainer: pl.Trainer) -> str | None:
    """The best checkpoint, else the last one, else None for the weights in memory."""
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return next((c.best_model_path for c in callbacks if c.best_model_path), None)


def _results(
    config: TrainConfig,
    trainer: pl.Trainer,
    net: torch.nn.Module,
    metrics: Mapping[str, float],
    seconds: float,
    best: str | None,
) -> dict[str, Any]:
    return {
        **metrics,
        "name": config.name,
        "arch": config.model.arch,
        "data": config.data.name,
        "seed": config.seed,
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "seconds": round(seconds, 1),
        "parameters": sum(p.numel() for p in net.parameters()),
        "checkpoint": Path(best).name if best else None,
        "device": device_name(trainer),
        "processes": trainer.world_size,
        "global_batch": global_batch(config, trainer),
        "versions": {
            "vitrel": vitrel.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": timm.__version__,
            "pytorch_lightning": pl.__version__,
        },
    }


def global_batch(config: TrainConfig, trainer: pl.Trainer) -> int:
    """Images per optimizer step, over all devices: what the learning rate is stated for."""
    return config.data.batch_size * trainer.world_size * trainer.accumulate_grad_batches


def device_name(trainer: pl.Trainer) -> str:
    """The GPU's name, or the processor's with its number of threads."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


@rank_zero_only
def _announce(config: TrainConfig, trainer: pl.Trainer, net: torch.nn.Module, inputs: InputConfig) -> None:
    millions = sum(p.numel() for p in net.parameters()) / 1e6
    print(
        f"{config.model.arch}: {millions:.2f} M parameters, {inputs.size[0]} x {inputs.size[1]} px; {config.data.name};"
        f" global batch {global_batch(config, trainer)} = {config.data.batch_size} x {trainer.world_size} devices x"
        f" {trainer.accumulate_grad_batches} accumulated, lr {config.optim.lr:g}",
        flush=True,
    )
    if config.model.checkpoint:
        stored = stored_config(config.model.checkpoint)
        new = stored is not None and stored["num_classes"] != getattr(net, "num_classes", None)
        notes = "; a new classifier" if new else ""
        if stored is None:
            notes = "; there is no config.json beside them, so that their heads and rel_pos are taken on trust"
        print(f"weights from {config.model.checkpoint}{notes}", flush=True)


@rank_zero_only
def _report(trainer: pl.Trainer, results: dict[str, Any]) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger) and getattr(logger.experiment, "offline", False):
            print(f"W&B kept this run offline; to send it: wandb sync {Path(logger.experiment.dir).parent}")
    folder = results["folder"]
    split = "test" if results["tested_on"] == "test" else "validation"
    accuracy = f"{split} accuracy {results['test/acc']:.4f} (top-5 {results['test/acc5']:.4f})"
    if results["skipped_files"]:
        print(f"damaged pictures left out: {results['skipped_files']}")
    print(f"{accuracy} after {results['epochs']} epochs, {duration(results['seconds'])}")
    if folder:
        print(f"run folder {folder}")
        model = Path(folder, "model").resolve().as_posix()
        print(f'import timm, vitrel; model = timm.create_model("local-dir:{model}", pretrained=True)')


class _NoAdvice(logging.Filter):
    """Drops the lines that say nothing about this run."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "Tip:" not in message and not message.startswith(("GPU available", "TPU available"))


def _quiet() -> None:
    """Hides advice that does not apply; warnings that may matter stay."""
    for name in ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.callbacks.model_checkpoint"):
        logger = logging.getLogger(name)
        if not any(isinstance(f, _NoAdvice) for f in logger.filters):
            logger.addFilter(_NoAdvice())
    for message in (
        ".*does not have many workers",  # chosen by measurement, see data.py
        ".*smaller than the logging interval",  # every epoch is logged in any case
        ".*isinstance\\(treespec, LeafSpec\\)",  # between Lightning and torch
    ):
        warnings.filterwarnings("ignore", message)
