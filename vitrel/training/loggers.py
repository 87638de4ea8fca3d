"""Loggers of a run: a CSV file always, Weights & Biases online, offline or off.

W&B never asks, never waits long and never ends a run: online needs a key and a server that answers within
``INIT_TIMEOUT`` seconds, and falls back to offline with one line that says so; what a slow network has not taken
``FINISH_TIMEOUT`` seconds after the end stays in the run's folder.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytorch_lightning as pl
import wandb
from pytorch_lightning.loggers import CSVLogger, Logger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only
from wandb.errors import Error

from vitrel.training.fileio import ConfigError
from vitrel.training.settings import TrainConfig

INIT_TIMEOUT = 12
FINISH_TIMEOUT = 300
_MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "off": "off",
          "disabled": "off"}  # fmt: skip


def build_loggers(config: TrainConfig, wandb_id: str | None = None) -> list[Logger]:
    """The CSV logger, which gives the run its folder, and W&B's if it is not off.

    Args:
        config: The settings.
        wandb_id: The W&B run to continue; a new one if not given.
    """
    mode = wandb_mode(config.logger.mode)
    name = config.name or config.data.name
    loggers: list[Logger] = [CSVLogger(config.runs, name=name, version=_new_version(Path(config.runs, name)))]
    if mode != "off":
        logger = _wandb_logger(config, mode, wandb_id or secrets.token_hex(4))
        if logger is not None:
            loggers.append(logger)
    return loggers


def _new_version(folder: Path) -> int | None:
    """Makes the next ``version_N`` below ``folder``; runs that start at once get one each. None but on rank zero."""
    if getattr(rank_zero_only, "rank", 0):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        found = [p.name.removeprefix("version_") for p in folder.glob("version_*")]
        version = max((int(n) for n in found if n.isdecimal()), default=-1) + 1
        try:
            (folder / f"version_{version}").mkdir()
        except FileExistsError:
            continue
        return version


def wandb_mode(mode: str, environ: Mapping[str, str] = os.environ) -> str:
    """``online``, ``offline`` or ``off``; ``WANDB_MODE`` in the environment wins over the setting."""
    given = environ.get("WANDB_MODE", "").lower()
    if given and given not in _MODES:
        raise ConfigError(f"WANDB_MODE: {given!r} is unknown, expected one of {', '.join(_MODES)}")
    return _MODES.get(given, mode)


def run_folder(trainer: pl.Trainer) -> Path | None:
    """Where the run writes; None in a trial of a few batches. Every rank has to ask, as they agree on it."""
    folder = trainer.log_dir
    return Path(folder) if folder and not getattr(trainer, "fast_dev_run", False) else None


def finish_wandb() -> None:
    """Closes the W&B run, which writes what is still in memory; nothing if there is none."""
    if wandb.run is not None:
        with suppress(Error, OSError):
            wandb.finish()


def _wandb_logger(config: TrainConfig, mode: str, run_id: str) -> WandbLogger | None:
    folder = Path(config.runs, "wandb")
    later = f"'wandb sync' its folder below {folder} later"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        _say(f"W&B: not logged, {folder} cannot be made ({e.strerror})")
        return None
    if not os.access(folder, os.W_OK):
        _say(f"W&B: not logged, {folder} cannot be written")
        return None
    _find_a_home(folder)
    wandb.setup(settings=wandb.Settings(silent=True))
    if mode == "online":
        if not _has_key():
            key = "no valid API key" if os.environ.get("WANDB_API_KEY") else "no API key"
            _say(f"W&B: {key} ('wandb login' stores one), so this run is kept offline; {later}")
        else:
            logger = _logger(config, "online", run_id)
            try:
                _ = logger.experiment  # connects now, where a failure can still be mended
                return logger
            except (Error, OSError) as e:
                wandb.teardown()  # forgets the attempt, whose settings would otherwise stay
                reason = " ".join(str(e).split())[:120]
                _say(f"W&B: the server did not answer ({reason}), so this run is kept offline; {later}")
    return _logger(config, "offline", run_id)


def _find_a_home(folder: Path) -> None:
    """W&B fails, or logs to the terminal, without the user's cache and data folders; the run's own serve as well."""
    home = os.environ.get("HOME") or "/dev/null/none"
    for variable, name in (("XDG_CACHE_HOME", ".cache"), ("XDG_DATA_HOME", ".local/share")):
        place = Path(os.environ.get(variable) or Path(home, name), "wandb")
        try:
            place.mkdir(parents=True, exist_ok=True)
            usable = os.access(place, os.W_OK)
        except OSError:
            usable = False
        if not usable:
            os.environ[variable] = str(folder.resolve() / ".cache")


def _logger(config: TrainConfig, mode: str, run_id: str) -> WandbLogger:
    logger = WandbLogger(
        name=config.name,
        save_dir=config.runs,
        project=config.logger.project,
        entity=config.logger.entity,
        mode=mode,
        id=run_id,
        config=config.as_dict(),
        settings=wandb.Settings(
            init_timeout=INIT_TIMEOUT,
            finish_timeout=FINISH_TIMEOUT,
            silent=True,
            console="off",
            disable_git=True,
        ),
    )
    logger._wandb_init.pop("anonymous", None)  # Lightning always passes it, and W&B warns that it means nothing
    return logger


def _has_key() -> bool:
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except (Error, OSError, ValueError):
        return False


@rank_zero_only
def _say(text: str) -> None:
    print(text, file=sys.stderr)
