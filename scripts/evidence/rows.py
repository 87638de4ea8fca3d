"""Finished runs: one line each in ``results/GROUP.jsonl``."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evidence.plan import Planned
from vitrel.training.fileio import write_whole

RESULTS = Path(__file__).resolve().parents[2] / "results"
Row = dict[str, Any]


def read(group: str) -> list[Row]:
    """The lines of a group, in the order in which the runs ended; none if none has."""
    file = RESULTS / f"{group}.jsonl"
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def find(run: Planned) -> Row | None:
    """The line of a run, if it was made with the settings that the run has now."""
    return next((row for row in read(run.group) if same(row, run)), None)


def complete(row: Row | None, run: Planned) -> bool:
    """Whether there is a line, with all that is to be tested afterwards."""
    if row is None:
        return False
    tested = {(r["rows"], r["cols"]) for r in row.get("sizes", [])}
    asked = {(int(rows), int(cols or rows)) for rows, _, cols in (size.partition("x") for size in run.sizes)}
    return asked <= tested and ("ablation" in row or not run.ablate)


def same(row: Row, run: Planned) -> bool:
    return (row["row"], row["seed"], row["settings"]) == (run.row, run.seed, json.loads(json.dumps(run.settings)))


def keep(run: Planned, figures: Row) -> None:
    """Adds the line of a run, in place of one that it had with other settings."""
    others = [row for row in read(run.group) if (row["row"], row["seed"]) != (run.row, run.seed)]
    row = {"row": run.row, "seed": run.seed, "settings": run.settings, **figures}
    write_whole(RESULTS / f"{run.group}.jsonl", "".join(json.dumps(r) + "\n" for r in [*others, row]))


def mean(rows: Iterable[Row], name: str = "test/acc") -> float:
    values = [row[name] for row in rows]
    return sum(values) / len(values)
