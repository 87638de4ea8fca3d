"""Trains what is missing, several runs at a time, each in processes of its own."""

import csv
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evidence.plan import Planned
from evidence.rows import Row, complete, find, keep
from vitrel.training.fileio import ConfigError

SCRIPTS = Path(__file__).resolve().parents[1]


class Trainer:
    """Runs of experiments.

    Args:
        runs: Folder of the run folders; a run that was cut off there goes on from its last epoch.
        options: Options of ``train.py`` for all of them, such as ``--data.root``.
        threads: Threads of each process.
    """

    def __init__(self, runs: Path, options: Sequence[str], threads: int) -> None:
        self.runs, self.options = runs, list(options)
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "WANDB_MODE": "disabled"}
        self._children: set[subprocess.Popen[bytes]] = set()
        self._keeping, self._stopped = threading.Lock(), False

    def train(self, planned: Sequence[Planned], jobs: int) -> list[str]:
        """Trains and tests those whose line is not complete; returns a line about each that failed."""
        missing = [run for run in planned if not complete(find(run), run)]
        try:
            with ThreadPoolExecutor(jobs) as pool:
                try:
                    return [problem for problem in pool.map(self._one, missing) if problem]
                except BaseException:
                    self._stopped = True
                    for child in self._children:
                        child.terminate()  # saves, and goes on another time
                    raise
        except KeyboardInterrupt:
            raise ConfigError("stopped; the same command goes on from the last epoch of each run") from None

    def _one(self, run: Planned) -> str | None:
        folder = self._folder(run)
        if folder is None or not (folder / "results.json").is_file():
            resume = ["--ckpt_path", "last"] if self._saved(run) else []
            named = ["--runs", str(self.runs), "--name", run.name, "--seed", str(run.seed), "--logger.mode", "off"]
            status = self._call(run, ["train.py", *run.options, *named, *self.options, *resume])
            folder = self._folder(run)
            if status or folder is None:
                return f"{run.name}: train.py ended with {status}, see {self._log(run)}"
        studies = [*(["--sizes", *run.sizes] if run.sizes else []), *(["--ablate"] if run.ablate else [])]
        if studies and (status := self._call(run, ["evaluate.py", str(folder), *studies])):
            return f"{run.name}: evaluate.py ended with {status}, see {self._log(run)}"
        with self._keeping:
            keep(run, figures(folder))
        print(f"{run.name}: {figures(folder)['test/acc']:.4f}", flush=True)
        return None

    def _folder(self, run: Planned) -> Path | None:
        """The newest run folder."""
        there = [p for p in (self.runs / run.name).glob("version_*") if p.name[8:].isdigit()]
        return max(there, key=lambda p: int(p.name[8:]), default=None)

    def _saved(self, run: Planned) -> bool:
        return any((self.runs / run.name).glob("version_*/checkpoints/last.ckpt"))

    def _log(self, run: Planned) -> Path:
        return self.runs / f"{run.name}.log"

    def _call(self, run: Planned, command: Sequence[str]) -> int:
        if self._stopped:
            return 1
        self.runs.mkdir(parents=True, exist_ok=True)
        with self._log(run).open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, str(SCRIPTS / command[0]), *command[1:]],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment,
            )  # fmt: skip
            self._children.add(child)
            try:
                return child.wait()
            finally:
                self._children.discard(child)


def figures(folder: Path) -> Row:
    """What a run folder says of its run, as plain data."""
    row: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for key in ("folder", "resumed_from", "checkpoint", "name", "seed", "skipped_files", "skipped_steps"):
        row.pop(key, None)
    epochs: dict[int, float] = {}
    for part in sorted(folder.parent.glob("version_*"), key=lambda p: int(p.name[8:])):  # a resumed run has several
        if (part / "metrics.csv").is_file():
            epochs |= {line["epoch"]: line["val/acc"] for line in _csv(part / "metrics.csv") if "val/acc" in line}
    row["val/acc"] = [round(epochs[epoch], 4) for epoch in sorted(epochs)]
    for name in ("sizes", "ablation"):
        if (folder / "evaluation" / f"{name}.csv").is_file():
            row[name] = _csv(folder / "evaluation" / f"{name}.csv")
    return row


def _csv(file: Path) -> list[Row]:
    with file.open(encoding="utf-8", newline="") as lines:
        return [{k: _number(v) for k, v in line.items() if v != ""} for line in csv.DictReader(lines)]


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
