"""What a run says and writes down of itself, and what it keeps others from saying."""

from __future__ import annotations

import logging
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import timm
import torch
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only

import vitrel
from vitrel.training.callbacks import duration, global_batch
from vitrel.training.checkpoint import stored_config
from vitrel.training.resume import Resume
from vitrel.training.settings import ModelConfig, TrainConfig
from vitrel.training.task import ClassificationTask
from vitrel.training.transforms import InputConfig


def results(
    config: TrainConfig,
    trainer: pl.Trainer,
    task: ClassificationTask,
    metrics: Mapping[str, float],
    seconds: float,
    best: str | None,
) -> dict[str, Any]:
    """What ``results.json`` says of the model, its figures and the machine; ``seconds`` are those of the training."""
    return {
        **metrics,
        "name": config.name,
        "arch": config.model.arch,
        "data": config.data.name,
        "seed": config.seed,
        "seconds": round(seconds, 1),
        "parameters": sum(p.numel() for p in task.net.parameters()),
        "skipped_steps": task.skipped_steps,
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


def device_name(trainer: pl.Trainer) -> str:
    """The GPU's name, or the processor's with its number of threads."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


@rank_zero_only
def announce(
    config: TrainConfig, trainer: pl.Trainer, net: torch.nn.Module, inputs: InputConfig, resume: Resume | None
) -> None:
    """Prints the model, its input, the data and the global batch, and what the run goes on from."""
    millions = sum(p.numel() for p in net.parameters()) / 1e6
    print(
        f"{config.model.arch}: {millions:.2f} M parameters, {inputs.size[0]} x {inputs.size[1]} px; {config.data.name};"
        f" global batch {global_batch(config, trainer)} = {config.data.batch_size} x {trainer.world_size} devices x"
        f" {trainer.accumulate_grad_batches} accumulated, lr {config.optim.lr:g}",
        flush=True,
    )
    if resume:
        rest = "only the test is left" if resume.completes(config.trainer) else f"after {resume.epochs} epochs"
        print(f"continues {resume.path}: {rest}", flush=True)
    if config.model.checkpoint:
        stored = stored_config(config.model.checkpoint)
        new = stored is not None and stored["num_classes"] != getattr(net, "num_classes", None)
        notes = "; a new classifier" if new else ""
        if stored is None:
            notes = "; there is no config.json beside them, so that their heads and rel_pos are taken on trust"
        print(f"weights from {config.model.checkpoint}{notes}", flush=True)


@rank_zero_only
def outcome(trainer: pl.Trainer, results: dict[str, Any], model_config: ModelConfig) -> None:
    """Prints the accuracy, where the run folder is, and how to load its model."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger) and getattr(logger.experiment, "offline", False):
            here = Path(logger.experiment.dir).parent.parent
            # A resumed run has several parts, numbered where two began in one second.
            names = (f"offline-run-*-{logger.version}", f"offline-run-*-{logger.version}-[0-9]*")
            parts = sorted(str(part) for name in names for part in here.glob(name))
            print(f"W&B kept this run offline; to send it: wandb sync {' '.join(parts)}")
    folder = results["folder"]
    split = "test" if results["tested_on"] == "test" else "validation"
    accuracy = f"{split} accuracy {results['test/acc']:.4f} (top-5 {results['test/acc5']:.4f})"
    if results["skipped_files"]:
        print(f"damaged pictures left out: {results['skipped_files']}")
    print(f"{accuracy} after {results['epochs']} epochs, {duration(results['seconds'])}")
    if folder:
        print(f"run folder {folder}")
        model = Path(folder, "model").resolve().as_posix()
        reader = ""
        if model_config.strip_rows is not None:
            reader = f"; reader = vitrel.StripReader(model, {model_config.strip_rows}, {model_config.memory_rows})"
        print(f'import timm, vitrel; model = timm.create_model("local-dir:{model}", pretrained=True){reader}')


_NOISE = (
    *("GPU available", "TPU available", "`Trainer.fit` stopped: `max_epochs="),
    *("Detected KeyboardInterrupt", "[rank: ", "Restor", "Loaded model", "Found current"),
)


class _NoAdvice(logging.Filter):
    """Drops the lines that say nothing about this run."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "Tip:" not in message and not message.strip().startswith(_NOISE)


def quiet() -> None:
    """Hides advice that does not apply; warnings that may matter stay."""
    for name in ("utilities.rank_zero", "callbacks.model_checkpoint", "trainer.connectors.signal_connector"):
        logger = logging.getLogger(f"pytorch_lightning.{name}")
        if not any(isinstance(f, _NoAdvice) for f in logger.filters):
            logger.addFilter(_NoAdvice())
    for message in (
        ".*does not have many workers",  # chosen by measurement, see data.py
        ".*smaller than the logging interval",  # every epoch is logged in any case
        ".*isinstance\\(treespec, LeafSpec\\)",  # between Lightning and torch
    ):
        warnings.filterwarnings("ignore", message)
