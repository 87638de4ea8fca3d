"""A run from settings to results: build, fit, test the best checkpoint, write what it left.

``main`` is the command line; ``run`` is the same from Python.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.multiprocessing import ProcessRaisedException

import vitrel
from vitrel.training import report
from vitrel.training.callbacks import build_callbacks, saves_checkpoints
from vitrel.training.checks import check
from vitrel.training.config import parse
from vitrel.training.data import PictureDataModule, check_classes
from vitrel.training.fileio import ConfigError, write_whole
from vitrel.training.images import DataError
from vitrel.training.loggers import build_loggers, finish_wandb, run_folder
from vitrel.training.model import build_model, save_model_folder, timm_model
from vitrel.training.resume import Resume, WholeCheckpointIO, find_resume, read_checkpoint, read_resume
from vitrel.training.settings import TrainConfig
from vitrel.training.sources import Source, find_source
from vitrel.training.stopping import gone_after
from vitrel.training.task import ClassificationTask, NonFiniteError
from vitrel.training.transforms import InputConfig

STOPPED_AFTER = 20.0  # seconds from SIGTERM; SLURM kills after 30 by default


def run(config: TrainConfig) -> dict[str, Any]:
    """Trains, tests the best checkpoint and writes the run folder.

    Args:
        config: The settings, as :func:`~vitrel.training.config.parse` gives them.

    Returns:
        What ``results.json`` holds: test metrics, epochs, seconds, parameters, versions, and ``folder``.

    Raises:
        ConfigError: For settings that cannot work, before data are read.
        DataError: For data that are missing or damaged, naming them.
        StoppedError: After Ctrl-C or SIGTERM, for a loss that is not finite, or files that cannot be written.
    """
    report.quiet()
    resume = find_resume(config)
    check(config)
    source = find_source(config.data)
    _check_data(source, resume)
    config = dataclasses.replace(config, ckpt_path=None)  # what is written down can be run again
    pl.seed_everything(config.seed, workers=True, verbose=False)
    net = build_model(config.model, len(source.classes)).train()
    inputs = InputConfig.of(timm_model(net), config.data)
    if config.model.checkpoint:  # the run does not hang on the folder it started from
        config.data.mean, config.data.std, config.data.crop_pct = list(inputs.mean), list(inputs.std), inputs.crop_pct
    data = PictureDataModule(config.data, inputs, source, seed=config.seed)
    task = ClassificationTask(config.as_dict(), len(source.classes), net)
    grown = any(seen.share < 1 for seen in vitrel.coverage(timm_model(net)).values())
    trainer = _trainer(config, grown)
    if not getattr(trainer, "fast_dev_run", False):
        trainer.loggers = build_loggers(config, resume.wandb_id if resume else None)
    report.announce(config, trainer, net, inputs, resume)

    try:
        with _ending(trainer, resume):
            metrics, progress, best, folder = _fit_and_test(trainer, task, data, resume)
        results = report.results(config, trainer, task, metrics, progress.pop("seconds"), best)
        results |= {
            **progress,
            "resumed_from": str(resume.path) if resume else None,
            "tested_on": source.tested_on,
            "skipped_files": len(source.skipped),
            "folder": str(folder) if folder else None,
        }
        if folder and trainer.is_global_zero:
            save_model_folder(task.net, folder / "model", data.classes, inputs.as_data_config())
            write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
        report.outcome(trainer, results, config.model)
    except (KeyboardInterrupt, SystemExit) as e:
        status = 143 if isinstance(e, SIGTERMException) or trainer.received_sigterm else 130
        raise StoppedError(f"stopped: {_saved(trainer, resume)}", status) from None
    except (NonFiniteError, OSError) as e:
        problem = f"{e.filename or config.runs}: {e.strerror or e}" if isinstance(e, OSError) else str(e)
        raise StoppedError(f"error: {problem}; {_saved(trainer, resume)}", 1) from e
    finally:
        finish_wandb()
    return results


def _fit_and_test(
    trainer: pl.Trainer, task: ClassificationTask, data: PictureDataModule, resume: Resume | None
) -> tuple[dict[str, float], dict[str, Any], str | None, Path | None]:
    """Test metrics of the best checkpoint; epochs, steps, seconds of the training; that checkpoint; the run folder."""
    start = time.monotonic()
    trainer.fit(task, datamodule=data, ckpt_path=resume.path if resume else None)
    progress = {"seconds": time.monotonic() - start, "epochs": trainer.current_epoch, "steps": trainer.global_step}
    best, folder = _best_checkpoint(trainer), run_folder(trainer)
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        trainer.loggers = []  # forked processes have taken the loggers with them; the test would start others
        if best:  # and the test loads it in them
            task.load_state_dict(read_checkpoint(Path(best))["state_dict"])
            last = read_resume(Path(best).with_name("last.ckpt"))
            progress |= {"epochs": last.epochs, "steps": last.steps}
            task.skipped_steps = last.skipped_steps
    metrics = trainer.test(task, datamodule=data, ckpt_path=best, verbose=False)[0]
    return dict(metrics), progress, best, folder


def _ending(trainer: pl.Trainer, resume: Resume | None) -> AbstractContextManager[None]:
    """Processes do not wait for each other for ever after SIGTERM.

    Those of a strategy that forks are left out: their parent waits for them, and they end with it.
    """
    if trainer.world_size == 1 or isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        return nullcontext()
    return gone_after(STOPPED_AFTER, lambda: "" if trainer.global_rank else f"stopped: {_saved(trainer, resume)}")


@rank_zero_only
def _check_data(source: Source, resume: Resume | None) -> None:
    """Finds what is wrong with the data before a run folder is made; other processes wait before they open them."""
    source.prepare()
    source.check()
    if resume:
        check_classes(resume.path, read_checkpoint(Path(resume.path)), source.classes)


class StoppedError(RuntimeError):
    """A run that has begun and cannot go on, or was told to stop.

    Attributes:
        status: Exit status of the command line: 130 after Ctrl-C, 143 after SIGTERM, 1 for a loss that is not finite or
            files that cannot be written.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _saved(trainer: pl.Trainer, resume: Resume | None) -> str:
    """What a run that has ended early leaves, and how to go on. Asks no other process."""
    folders = [logger.log_dir for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    paths = [Path(folder, "checkpoints", "last.ckpt") for folder in folders] + ([resume.path] if resume else [])
    for path in paths:
        if path.is_file():
            epochs = read_resume(path).epochs
            saved = "1 epoch is" if epochs == 1 else f"{epochs} epochs are"
            return f"{saved} saved in {path}; --ckpt_path last goes on from there"
    return "nothing is saved, since no epoch was complete"


def main(argv: Sequence[str] | None = None, folders: Sequence[Path] = (), default: str | None = None) -> int:
    """The command line of training.

    Args:
        argv: Options; those of the process if not given.
        folders: Where ``--config NAME`` is looked for besides the path as given.
        default: The config taken when the options name none.

    Returns:
        The exit status: 0, 2 for a mistake in settings or data, or that of :class:`StoppedError`.
    """
    return guarded(lambda: run(parse(sys.argv[1:] if argv is None else argv, folders, default)))


def guarded(work: Callable[[], object]) -> int:
    """Calls ``work``; what the user has to know becomes one line on the error stream and a status that is not 0."""
    try:
        work()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except StoppedError as e:
        if e.status < 128 or not getattr(rank_zero_only, "rank", 0):
            print(e, file=sys.stderr)
        return e.status
    except (ConfigError, DataError, MisconfigurationException, ProcessRaisedException) as e:
        message = _one_line(str(e))
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: {e.filename or 'a file'}: {e.strerror or e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: nothing is saved, since training had not begun", file=sys.stderr)
        return 130
    return 0


def _one_line(message: str) -> str | None:
    """The message without the traceback that a worker hands over with its own; None if that is not one of ours."""
    lines = [line for line in message.splitlines() if line.strip()]
    if "Traceback" not in message:
        return " ".join(lines)
    own = re.match(r"vitrel\.training\.\w+\.\w+Error: (.*)", lines[-1])
    return own[1] if own else None


def _trainer(config: TrainConfig, grown: bool) -> pl.Trainer:
    given = dict(config.trainer)
    if grown:  # the check before training would warn of tables that are about to be trained
        given.setdefault("num_sanity_val_steps", 0)
    bar = given.pop("enable_progress_bar", True) and sys.stdout.isatty()
    try:
        return pl.Trainer(
            logger=DummyLogger(),  # until the settings are known to be good: the real ones make a folder
            callbacks=build_callbacks(config),
            plugins=[*_as_list(given.pop("plugins", None)), WholeCheckpointIO()],
            default_root_dir=config.runs,
            enable_progress_bar=bar,
            **{"enable_model_summary": False, **given, "enable_checkpointing": saves_checkpoints(config)},
        )
    except (MisconfigurationException, ValueError, TypeError) as e:
        raise ConfigError(f"trainer: {' '.join(str(e).split())}") from e


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _best_checkpoint(trainer: pl.Trainer) -> str | None:
    """The best checkpoint, else the last one, else None for the weights in memory."""
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return next((c.best_model_path for c in callbacks if c.best_model_path), None)
