"""Interleaved timing: medians, and ratios pair by pair."""

import statistics
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[], object]


def paired(steps: dict[str, Run], repeats: int, sync: Run) -> dict[str, list[float]]:
    """Seconds of each step, taken in turn, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            sync()
            if count:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio_rows(seconds: dict[str, list[float]], base: str, **where: Any) -> list[dict[str, Any]]:
    """One row per name: the median, and the ratio to ``base`` pair by pair (median and middle half)."""
    rows = []
    for name, own in seconds.items():
        ratios = sorted(a / b for a, b in zip(own, seconds[base], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        cells = {"seconds": statistics.median(own), "ratio": statistics.median(ratios), "from": low, "to": high}
        rows.append({**where, "name": name, **cells})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    heads = list(rows[0])
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for row in rows:
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        print("| " + " | ".join(cells) + " |", flush=True)
