"""Finished runs: one line each in ``results/GROUP.jsonl``."""

import fcntl
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evidence.plan import Planned, Settings, identity
from vitrel.training.fileio import ConfigError, write_whole
from vitrel.training.settings import TrainConfig

RESULTS = Path(__file__).resolve().parents[2] / "results"
Row = dict[str, Any]


def _share(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1


def _whole_number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _lines(**fields: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list)
        and all(isinstance(line, dict) and all(good(line.get(key)) for key, good in fields.items()) for line in value)
    )


def _text(value: Any) -> bool:
    return isinstance(value, str)


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "row": (_text, "a name"),
    "seed": (_whole_number, "a whole number"),
    "settings": (lambda value: isinstance(value, dict), "the settings by name"),
    "parameters": (_whole_number, "a whole number"),
    "test/acc": (_share, "a number from 0 to 1"),
    "test/acc5": (_share, "a number from 0 to 1"),
    "val/acc": (lambda value: isinstance(value, list) and value != [] and all(map(_share, value)), "such numbers"),
    "sizes": (
        _lines(rows=_whole_number, cols=_whole_number, rule=_text, top1=_share),
        "rows, cols, rule and top1 each",
    ),
    "ablation": (_lines(off=_text, top1=_share), "off and top1 each"),
}
_OPTIONAL = ("test/acc5", "sizes", "ablation")


def check(row: Any) -> None:
    """Sees that a line has what the tables need.

    Raises:
        ValueError: If it has not, with the name of the field.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {row!r}")
    for key, (good, expected) in _FIELDS.items():
        if (key in row or key not in _OPTIONAL) and not good(row.get(key)):
            raise ValueError(f"{key}: expected {expected}, got {json.dumps(row.get(key))[:80]}")


def read(group: str) -> list[Row]:
    """The lines of a group, in the order in which the runs ended; none if none has.

    Raises:
        ConfigError: For a damaged line.
    """
    file = RESULTS / f"{group}.jsonl"
    rows: dict[tuple[str, int], Row] = {}
    for number, line in enumerate(file.read_bytes().splitlines() if file.is_file() else [], start=1):
        try:
            row = json.loads(line)
            check(row)
            if (row["row"], row["seed"]) in rows:
                raise ValueError(f"there is another line of {row['row']}, seed {row['seed']}")
        except ValueError as e:
            raise ConfigError(f"{file}, line {number}: not the line of a run ({e}); remove it") from None
        rows[row["row"], row["seed"]] = row
    return list(rows.values())


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
    """Adds the line of a run, in place of one that it had; two processes may do so at once.

    Raises:
        ValueError: If the figures are not all there; nothing is written then.
        ConfigError: For a damaged line of another run.
    """
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [row for row in read(run.group) if (row["row"], row["seed"]) != (run.row, run.seed)]
        row = {"row": run.row, "seed": run.seed, "settings": run.settings, **figures}
        check(row)
        write_whole(RESULTS / f"{run.group}.jsonl", "".join(json.dumps(r) + "\n" for r in [*others, row]))
