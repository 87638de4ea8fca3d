"""Trains what is missing, several runs at a time, each in processes of its own."""

import csv
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evidence.plan import Planned, identity
from evidence.rows import Row, complete, find, keep, same
from vitrel.ablate import switchable
from vitrel.training.config import from_dict, parse
from vitrel.training.fileio import ConfigError, one_line, read_yaml
from vitrel.training.model import check_model
from vitrel.training.run import StoppedError
from vitrel.training.studies import check_patches

SCRIPTS = Path(__file__).resolve().parents[1]


class Trainer:
    """Runs of experiments.

    Args:
        runs: Folder of the run folders; a run that was cut off there goes on from its last epoch.
        options: Options of ``train.py`` for all of them that leave results as they are, such as ``--data.root``.
        threads: Threads of each process.
    """

    def __init__(self, runs: Path, options: Sequence[str], threads: int) -> None:
        self.runs, self.options = runs, list(options)
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "WANDB_MODE": "disabled"}
        self._children: set[subprocess.Popen[bytes]] = set()
        self._starting, self._stopped, self._refused = threading.Lock(), False, False

    def train(self, planned: Sequence[Planned], jobs: int) -> list[str]:
        """Trains and tests those whose line is not complete; returns a line about each that failed.

        After a run whose settings or data are refused no further one is started: what is wrong with the data is wrong
        for all.

        Raises:
            ConfigError: For options that would change results, and tests that the model of a row cannot be put to.
            StoppedError: After Ctrl-C or SIGTERM; each run has then saved its last epoch.
        """
        missing = [run for run in planned if not complete(find(run), run)]
        for run in missing:
            self._check_options(run)
        for run in {(run.group, run.row): run for run in missing}.values():
            _check_tests(run)
        pool = ThreadPoolExecutor(jobs)
        try:
            return [problem for problem in pool.map(self._one, missing) if problem]
        except KeyboardInterrupt:
            with self._starting:
                self._stopped = True
                for child in self._children:
                    child.terminate()
            raise StoppedError("stopped: the same command goes on from the last epoch of each run", 130) from None
        finally:
            pool.shutdown(cancel_futures=True)

    def _check_options(self, run: Planned) -> None:
        own = ("--name", "--seed", "--runs", "--ckpt_path")
        if any(option.split("=")[0] in own for option in self.options) or not same(
            identity(parse([*run.options, *self.options])), run.settings
        ):
            raise ConfigError(
                f"{' '.join(self.options)}: would change {run.name}, expected options such as --data.root,"
                " --data.num_workers and --trainer.accelerator; settings of a run belong into configs/experiments"
            )

    def _one(self, run: Planned) -> str | None:
        self.runs.mkdir(parents=True, exist_ok=True)
        with (self.runs / f".{run.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print(f"{run.name}: another process is at it", flush=True)
                return None
            return None if self._refused or complete(find(run), run) else self._train(run)

    def _train(self, run: Planned) -> str | None:
        try:
            if not any((part / "results.json").is_file() for part in self._parts(run)):
                named = ["--runs", str(self.runs), "--name", run.name, "--seed", str(run.seed), "--logger.mode", "off"]
                saved = [file for part in self._parts(run) for file in part.glob("checkpoints/last.ckpt")]
                resume = [word for file in saved[-1:] for word in ("--ckpt_path", str(file))]
                if status := self._call(run, ["train.py", *run.options, *named, *self.options, *resume]):
                    self._refused |= status == 2
                    return self._failed(run, f"train.py ended with {status}")
            parts = self._parts(run)
            sizes = [f"{rows}x{cols}" for rows, cols in run.sizes]
            studies = [*(["--sizes", *sizes] if sizes else []), *(["--ablate"] if run.ablate else [])]
            if studies and (status := self._call(run, ["evaluate.py", str(parts[-1]), *studies])):
                return self._failed(run, f"evaluate.py ended with {status}")
            row = figures(parts)
            keep(run, row)
        except (OSError, ValueError) as e:
            return f"{run.name}: {one_line(str(e))}, see {self._log(run)}"
        print(f"{run.name}: {row['test/acc']:.4f}", flush=True)
        return None

    def _parts(self, run: Planned) -> list[Path]:
        """The run folders of a run, the newest last, or of one in another group that was the same and has ended."""
        for folder in (self.runs / run.name, *sorted(self.runs.glob(f"*.*.{run.seed}"))):
            parts = self._versions(folder, run)
            while parts and not (parts[-1] / "results.json").is_file():  # begun anew, though one had ended
                parts.pop()
            if parts:
                return parts
        return self._versions(self.runs / run.name, run)

    @staticmethod
    def _versions(folder: Path, run: Planned) -> list[Path]:
        """The versions of a run folder that have the run's settings: one that was resumed has several."""
        folders = [p for p in folder.glob("version_*") if p.name[8:].isdigit()]
        return [
            folder
            for folder in sorted(folders, key=lambda p: int(p.name[8:]))
            if (folder / "config.yaml").is_file()
            and same(identity(from_dict(read_yaml(folder / "config.yaml"))), run.settings)
        ]

    def _log(self, run: Planned) -> Path:
        return self.runs / f"{run.name}.log"

    def _failed(self, run: Planned, how: str) -> str:
        lines = self._log(run).read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"{run.name}: {how} ({one_line(last).removeprefix('error: ')}), see {self._log(run)}"

    def _call(self, run: Planned, command: Sequence[str]) -> int:
        with self._log(run).open("ab") as log:
            with self._starting:
                if self._stopped:
                    return 130
                child = subprocess.Popen(
                    [sys.executable, str(SCRIPTS / command[0]), *command[1:]],
                    stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment,
                )  # fmt: skip
                self._children.add(child)
            status = child.wait()
            with self._starting:
                self._children.discard(child)
            return status


def _check_tests(run: Planned) -> None:
    if not run.sizes and not run.ablate:
        return
    model = check_model(parse(list(run.options)).model)
    for size in run.sizes:
        try:
            check_patches(model, size)
        except ConfigError as e:
            raise ConfigError(f"{run.group}.{run.row}: {e}") from None
    if run.ablate and not switchable(model):
        raise ConfigError(f"{run.group}.{run.row}: ablate: the model has no position terms to switch off; leave it out")


def figures(parts: Sequence[Path]) -> Row:
    """What the folders of a run say of it, as plain data.

    Raises:
        ValueError: For a file that is not what a run writes, with its name.
    """
    file = parts[-1] / "results.json"
    try:
        row: dict[str, Any] = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as e:
        raise ValueError(f"{file}: not the results of a run ({e}); remove its folder") from None
    for key in ("folder", "resumed_from", "checkpoint", "name", "seed", "skipped_files", "skipped_steps"):
        row.pop(key, None)
    epochs: dict[int, float] = {}
    for part in parts:
        if (part / "metrics.csv").is_file():
            epochs |= {line["epoch"]: line["val/acc"] for line in _csv(part / "metrics.csv") if "val/acc" in line}
    row["val/acc"] = [round(epochs[epoch], 4) for epoch in sorted(epochs)]
    if len(parts) > 1:
        row.pop("seconds", None)  # of the last part alone
    for name in ("sizes", "ablation"):
        if (parts[-1] / "evaluation" / f"{name}.csv").is_file():
            row[name] = _csv(parts[-1] / "evaluation" / f"{name}.csv")
    return row


def _csv(file: Path) -> list[Row]:
    with file.open(encoding="utf-8", newline="") as lines:
        return [{k: _number(v) for k, v in line.items() if v != ""} for line in csv.DictReader(lines)]


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
