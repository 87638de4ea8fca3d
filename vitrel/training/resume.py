"""Checkpoints to go on from: found, read, checked against the settings, and written whole."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities import rank_zero_only

from vitrel.training.fileio import ConfigError, write_whole
from vitrel.training.settings import ModelConfig, TrainConfig

_OF_THE_OPTIMIZER = ("lr", "weight_decay", "betas", "position_lr_scale", "ema_decay", "ema_start")


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it there, so that a kill leaves the old one or the new one.

    Lightning's own writes to the system's folder for temporary files, from where a file is copied, not renamed, to
    another file system.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(Path(path), buffer.getbuffer())


@dataclass(frozen=True)
class Resume:
    """A checkpoint that a run goes on from.

    Attributes:
        path: The file.
        epochs: Epochs behind it.
        steps: Optimizer steps behind it.
        skipped_steps: Those of them that were left out.
        wandb_id: Its run at Weights & Biases, if it had one.
    """

    path: Path
    epochs: int
    steps: int
    skipped_steps: int
    wandb_id: str | None

    @property
    def folder(self) -> Path:
        """The run folder that it lies in."""
        return self.path.parent.parent

    def completes(self, trainer: dict[str, Any]) -> bool:
        """Whether it has all the epochs or steps that the trainer's settings ask for."""
        epochs, steps = trainer.get("max_epochs"), trainer.get("max_steps", -1)
        return (epochs not in (None, -1) and self.epochs >= epochs) or 0 <= steps <= self.steps


def find_resume(config: TrainConfig) -> Resume | None:
    """The checkpoint that ``ckpt_path`` means, or None if it is not set.

    A run that began from a saved model goes on without it: the model's settings and the normalisation are then taken
    from the checkpoint into ``config``.

    Raises:
        ConfigError: If there is none, it cannot be read, belongs to another model, or the run is finished.
    """
    if config.ckpt_path is None:
        return None
    path, stored = _newest(config) if config.ckpt_path == "last" else _named(config.ckpt_path)
    _take_model(config, path, stored["hyper_parameters"]["config"])
    _check_optimizer(config, path, stored["hyper_parameters"]["config"])
    resume = read_resume(path, stored)
    if resume.completes(config.trainer) and (resume.folder / "results.json").is_file():
        raise ConfigError(
            f"ckpt_path: {path} has {resume.epochs} epochs already and its run is finished; raise trainer.max_epochs"
            f" (now {config.trainer.get('max_epochs')}) to go on"
        )
    _warn_of_another_batch(config, stored["hyper_parameters"]["config"])
    return resume


def _warn_of_another_batch(config: TrainConfig, stored: dict[str, Any]) -> None:
    pairs: list[tuple[str, Any, Any]] = [("data.batch_size", stored["data"].get("batch_size"), config.data.batch_size)]
    for name in ("devices", "num_nodes", "accumulate_grad_batches"):
        pairs.append((f"trainer.{name}", stored["trainer"].get(name), config.trainer.get(name)))
    changed = [f"{name} {then} is now {now}" for name, then, now in pairs if then != now]
    if changed:
        _say(f"ckpt_path: {', '.join(changed)}: optim.lr stays, which is stated for the global batch")


def read_resume(path: Path, stored: dict[str, Any] | None = None) -> Resume:
    """What there is to go on from in a checkpoint.

    Args:
        path: The file.
        stored: What it holds, if that has been read.

    Raises:
        ConfigError: As :func:`read_checkpoint`.
    """
    stored = read_checkpoint(path) if stored is None else stored
    return Resume(
        path,
        epochs=stored["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"],
        steps=stored["global_step"],
        skipped_steps=stored.get("skipped_steps", 0),
        wandb_id=stored["callbacks"].get("WandbSession", {}).get("id"),
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of a run as plain data and tensors.

    Raises:
        ConfigError: If it is not there, cannot be read, or is of another kind.
    """
    try:
        path.open("rb").close()
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}; give a .ckpt file of a run") from None
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        stored["hyper_parameters"]["config"]["model"], stored["loops"]["fit_loop"], stored["callbacks"]
        return dict(stored)
    except Exception:  # a file that is cut short or of another kind fails in many ways
        raise ConfigError(f"{path}: damaged, or no checkpoint of a run; take another one of its folder") from None


def last_checkpoints(config: TrainConfig) -> list[Path]:
    """Every ``last.ckpt`` of the runs of this name, the newest first."""
    folder = Path(config.runs) / (config.name or config.data.name)
    return sorted(folder.glob("version_*/checkpoints/last.ckpt"), key=lambda p: p.stat().st_mtime_ns, reverse=True)


def _newest(config: TrainConfig) -> tuple[Path, dict[str, Any]]:
    found = last_checkpoints(config)
    if not found:
        folder = Path(config.runs) / (config.name or config.data.name)
        raise ConfigError(f"ckpt_path: no last.ckpt below {folder}; give a .ckpt file, or start without --ckpt_path")
    for path in found[:-1]:
        try:
            return path, read_checkpoint(path)
        except ConfigError as e:
            _say(f"ckpt_path: {e}: going on from an older one")
    return found[-1], read_checkpoint(found[-1])


def _named(name: str) -> tuple[Path, dict[str, Any]]:
    if not Path(name).is_file():
        raise ConfigError(f"ckpt_path: there is no file {name}; give a .ckpt file or 'last'")
    return Path(name), read_checkpoint(Path(name))


def _take_model(config: TrainConfig, path: Path, stored: dict[str, Any]) -> None:
    """A checkpoint continues the model that it was made with."""
    then, now = stored["model"], vars(config.model)
    if config.model.checkpoint:
        # What the saved model said of itself may be gone with it; what else was given has to agree.
        given = {k: v for k, v in now.items() if v != getattr(ModelConfig(), k)}
        now = {**then, **given, "kwargs": {**then["kwargs"], **config.model.kwargs}}
        for key in ("mean", "std", "crop_pct"):
            setattr(config.data, key, stored["data"][key])
    for name in ("arch", "rel_pos", "img_size", "patch_size", "strip_rows", "memory_rows", "kwargs"):
        if then.get(name) != now[name]:
            raise ConfigError(
                f"ckpt_path: {path} was trained with model.{name} {then.get(name)}, now it is {now[name]}; "
                "give the same, or start without --ckpt_path"
            )
    config.model = ModelConfig(**{**now, "checkpoint": None, "pretrained": False})


def _check_optimizer(config: TrainConfig, path: Path, stored: dict[str, Any]) -> None:
    """The optimizer's settings come back with its state, so that others would be passed over."""
    for name, value, then in _differing(config, stored):
        raise ConfigError(
            f"ckpt_path: {path} was trained with optim.{name} {then}, now it is {value}; give the same, or start"
            " without --ckpt_path"
        )


def _differing(config: TrainConfig, stored: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in _OF_THE_OPTIMIZER:
        value, then = getattr(config.optim, name), stored["optim"].get(name)
        if value != then:
            yield name, value, then


@rank_zero_only
def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
