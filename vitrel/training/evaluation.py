"""A finished run examined: its test metrics, and on demand terms switched off, other sizes, and class by class."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrel.ablate import switchable
from vitrel.measures import as_csv
from vitrel.training.fileio import ConfigError, write_whole
from vitrel.training.saved import open_model, open_run
from vitrel.training.settings import TrainConfig
from vitrel.training.studies import Row, Study, as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def examine(
    path: str | Path,
    *,
    config: TrainConfig | None = None,
    ablate: bool = False,
    sizes: Sequence[str] = (),
    per_class: bool = False,
    out: Path | None = None,
    **overrides: Any,
) -> dict[str, list[Row]]:
    """Prints the test metrics of a run or model as JSON, then the tables asked for, and writes those to files.

    Args:
        path: A run folder, or a ``.ckpt`` file in its ``checkpoints/``; with ``config`` a saved model folder, or the
            name of a model with weights.
        config: Settings whose ``data`` the model is tested on; a run has its own.
        ablate: Switch off each position term.
        sizes: Input sizes in pixels, ``"48"`` or ``"48x32"`` (rows x columns).
        per_class: Top-1 of each class.
        out: Folder for tables and figures; ``evaluation/`` of the run folder by default, and with ``config`` here.
        **overrides: Data settings to change, for example ``root``.

    Returns:
        The tables by name: ``ablation``, ``sizes``, ``per_class``.

    Raises:
        ConfigError: If there is no such run or model, or it cannot be examined so; before anything is evaluated.
        DataError: For data that are missing or damaged.
    """
    sides = [parse_size(size) for size in sizes]
    opened = open_run(path, **overrides) if config is None else open_model(str(path), config, **overrides)
    task, data, trainer = opened
    if ablate and not switchable(task.net):
        raise ConfigError("--ablate: the model has no position terms to switch off; leave it out")
    run = Path(path) if Path(path).is_dir() else Path(path).parent.parent
    beside = run if config is None else Path()  # a saved model's folder holds what it was exported with
    folder = out or beside / "evaluation"
    if (ablate or sides or per_class) and folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out: {folder} is a file, expected a folder for tables and figures")
    study = Study(task.net, data, trainer.strategy.root_device)
    study.check(sides)
    metrics = trainer.test(task, datamodule=data, verbose=False)[0]
    print(json.dumps(dict(metrics), indent=2))
    tables: dict[str, list[Row]] = {}
    if ablate:
        tables["ablation"] = study.ablation()
    if sides:
        tables["sizes"] = study.sizes(sides)
    if per_class:
        tables["per_class"] = study.per_class()
    for name, rows in tables.items():
        print(f"\n{name.replace('_', ' ')}\n{as_text(rows)}")
        for file in _write(rows, name, folder):
            print(file)
    return tables


def parse_size(text: str) -> tuple[int, int]:
    """``48`` or ``48x32`` as (rows, columns) in pixels.

    Raises:
        ConfigError: For anything else.
    """
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
    if not match:
        raise ConfigError(f"--sizes: expected pixels such as 48, or 48x32 for rows x columns, got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def _write(rows: list[Row], name: str, folder: Path) -> list[Path]:
    from vitrel.plots import plot_ablation, plot_sizes
    from vitrel.training.pictures import png

    figures: dict[str, Figure] = {}
    if name in ("ablation", "sizes"):
        figures[name] = (plot_ablation if name == "ablation" else plot_sizes)(rows)
    table = folder / f"{name}.csv"
    write_whole(table, as_csv(rows))
    for stem, figure in figures.items():
        write_whole(folder / f"{stem}.png", png(figure))
    return [table, *(folder / f"{stem}.png" for stem in figures)]
