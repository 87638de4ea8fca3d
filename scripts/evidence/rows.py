"""Finished runs: one line each in ``results/GROUP.jsonl``."""

import fcntl
import json
from pathlib import Path
from typing import Any

from evidence.plan import Planned, Settings, identity
from vitrel.training.fileio import ConfigError, write_whole
from vitrel.training.settings import TrainConfig

RESULTS = Path(__file__).resolve().parents[2] / "results"
Row = dict[str, Any]


def read(group: str) -> list[Row]:
    """The lines of a group, in the order in which the runs ended; none if none has.

    Raises:
        ConfigError: For a damaged line.
    """
    file = RESULTS / f"{group}.jsonl"
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.is_file() else [], start=1):
        try:
            rows.append(json.loads(line))
            rows[-1]["row"], rows[-1]["seed"], rows[-1]["settings"]
        except (ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"{file}, line {number}: not the line of a run ({e}); remove it") from None
    return rows


def find(run: Planned) -> Row | None:
    """The line of a run, if it was made with the settings that the run has now."""
    return next((row for row in read(run.group) if of(row, run)), None)


def of(row: Row, run: Planned) -> bool:
    """Whether a line is that of a run."""
    return (row["row"], row["seed"]) == (run.row, run.seed) and same(row["settings"], run.settings)


def same(then: Settings, now: Settings) -> bool:
    """Whether two runs have the same settings; those that did not exist then were at their defaults."""
    return _whole(then) == _whole(now)


def _whole(settings: Settings) -> Settings:
    whole = {**identity(TrainConfig()), "trainer.precision": "32-true", **settings}
    if whole["data.augment"] != "resized_crop":
        whole.pop("data.scale", None)  # nothing else reads it
    return whole


def complete(row: Row | None, run: Planned) -> bool:
    """Whether there is a line, with all that is to be tested afterwards."""
    if row is None:
        return False
    tested = {(r["rows"], r["cols"]) for r in row.get("sizes", [])}
    return set(run.sizes) <= tested and ("ablation" in row or not run.ablate)


def keep(run: Planned, figures: Row) -> None:
    """Adds the line of a run, in place of one that it had; two processes may do so at once."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [row for row in read(run.group) if (row["row"], row["seed"]) != (run.row, run.seed)]
        row = {"row": run.row, "seed": run.seed, "settings": run.settings, **figures}
        write_whole(RESULTS / f"{run.group}.jsonl", "".join(json.dumps(r) + "\n" for r in [*others, row]))
