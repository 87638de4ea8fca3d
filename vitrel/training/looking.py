"""What a saved model learned, drawn: pictures and a table of numbers per head, one picture of blocks, or a page."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import timm
import torch
from torch import nn

import vitrel
from vitrel.measures import as_csv, head_numbers
from vitrel.probe import probes
from vitrel.training.config import from_dict
from vitrel.training.data import PictureDataModule, normalize
from vitrel.training.fileio import ConfigError, one_line, read_yaml, write_whole
from vitrel.training.images import DataError, decode
from vitrel.training.pictures import Examples, examples, png
from vitrel.training.saved import load
from vitrel.training.settings import DataConfig
from vitrel.training.sources import find_source
from vitrel.training.transforms import InputConfig, eval_transform

AVERAGED, SHOWN = 8, 4
"""Pictures that terms are averaged over, and that a page shows."""


def look(
    source: str,
    *,
    out: Path | None = None,
    html: Path | None = None,
    together: Path | None = None,
    blocks: Sequence[int] | None = None,
    pictures: Sequence[str] | None = None,
    root: str | None = None,
) -> None:
    """Draws what a model learned, and prints the names of the files.

    Args:
        source: A run folder, a saved model folder, or the name of a model with weights.
        out: Folder for a picture per block and ``heads.csv``; ``bias_maps/`` of the source by default.
        html: File for a page, instead.
        together: File for one picture of several blocks, instead.
        blocks: Which blocks to draw, all by default.
        pictures: Image files to see the terms on; test pictures of the run's data by default.
        root: Where the data lie, if not where the run had them.

    Raises:
        ConfigError: If there is no such model, or nothing to draw.
        DataError: For pictures that are missing or damaged.
    """
    _check_targets(out, html, together, blocks)
    if timm.is_model(source.split(".")[0]) and not source.startswith("vitrel_") and not Path(source).exists():
        raise ConfigError(f"{source}: nothing to draw; it has no position terms (vitrel.relativize gives it some)")
    model = load(source)
    shown = _pictures(model, source, pictures, root)
    try:
        seen = None if shown is None else probes(model, shown.pictures)
        maps = vitrel.term_maps(model, seen)
    except ValueError as e:
        raise ConfigError(f"{source}: {one_line(str(e))}") from None
    if not maps:
        needed = "; the maps of this scheme depend on the picture, give image files with --pictures"
        raise ConfigError(f"{source}: nothing to draw{needed if shown is None else '; it has no position terms'}")
    numbers = {name: _number(name, i) for i, name in enumerate(maps)}
    for n in blocks or ():
        if n not in numbers.values():
            there = ", ".join(map(str, dict.fromkeys(numbers.values())))
            raise ConfigError(f"--blocks: block {n} has no map; there are {there}")
    if html is not None:
        write_whole(html, _page(model, source, shown))
        print(html)
        return
    from vitrel.plots import plot_blocks, plot_term_maps

    chosen = {name: maps[name] for name, n in numbers.items() if not blocks or n in blocks}
    if together is not None:
        write_whole(together, png(plot_blocks(chosen)))
        print(together)
        return
    folder = out or (Path(source) if Path(source).is_dir() else Path()) / "bias_maps"
    for name, block in chosen.items():
        write_whole(folder / f"{name}.png", png(plot_term_maps(block, name)))
        print(folder / f"{name}.png")
    if seen is not None:
        write_whole(folder / "heads.csv", as_csv(head_numbers(model, seen)))
        print(folder / "heads.csv")
    else:
        print("without pictures: no heads.csv; give image files with --pictures", file=sys.stderr)


def _check_targets(out: Path | None, html: Path | None, together: Path | None, blocks: Sequence[int] | None) -> None:
    if html is not None and (together is not None or blocks):
        raise ConfigError("--html: the page has all blocks; leave out --together and --blocks")
    if out is not None and (html is not None or together is not None):
        raise ConfigError("--out: expected with neither --html nor --together, which name their file themselves")
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out: {out} is a file, expected a folder")
    for option, file, suffix in (("--html", html, ".html"), ("--together", together, ".png")):
        if file is not None and (file.suffix != suffix or file.is_dir()):
            raise ConfigError(f"{option}: expected a file that ends in {suffix}, got {file}")


def _number(name: str, place: int) -> int:
    """The number in a block's name, as in ``blocks.3``, else its place among those with a map."""
    found = re.search(r"\.(\d+)", name)
    return int(found[1]) if found else place


def _pictures(model: nn.Module, source: str, files: Sequence[str] | None, root: str | None) -> Examples | None:
    """Given files, or test pictures of the run; None, with a line that says so, where there are neither."""
    if files:
        inputs = InputConfig.of(model, _data_settings(source) or DataConfig(name="folder"))
        raw = [eval_transform(inputs)(decode(Path(f).read_bytes(), f)) for f in files]
        return Examples(
            normalize(torch.stack(raw), inputs),
            [np.asarray(p.movedim(0, -1)) for p in raw],
            [Path(f).name for f in files],
        )
    settings = _data_settings(source)
    if settings is None:
        if root is not None:
            raise ConfigError(f"--data.root: {source} is no run, and has no data; give image files with --pictures")
        return None
    settings.root = root or settings.root
    try:
        data = PictureDataModule(settings, InputConfig.of(model, settings), find_source(settings))
        data.setup("test")
        return examples(data, "test", AVERAGED)
    except DataError as e:
        if root is not None:
            raise
        print(f"without pictures: {one_line(str(e))}", file=sys.stderr)
        return None


def _data_settings(source: str) -> DataConfig | None:
    config = Path(source) / "config.yaml"
    return from_dict(read_yaml(config)).data if config.is_file() else None


def _page(model: nn.Module, source: str, shown: Examples | None) -> str:
    from vitrel.page import report

    try:
        return report(
            model,
            None if shown is None else shown.pictures,
            () if shown is None else shown.shown[:SHOWN],
            title=f"What position learned: {Path(source).resolve().as_posix().split('/runs/')[-1]}",
            captions=() if shown is None else [f"{i} ({label})" for i, label in enumerate(shown.labels)],
            facts=_facts(model, source),
        )
    except ModuleNotFoundError as e:
        raise ConfigError(f"--html: {e}") from None


def _facts(model: nn.Module, source: str) -> Mapping[str, str]:
    """What the line below a page's heading says."""
    found = vitrel.explain(model)
    facts = {
        "model": str(getattr(model, "default_cfg", {}).get("architecture", type(model).__name__)),
        "terms": ", ".join(dict.fromkeys(r.terms for r in found)),
        "grid (rows x columns)": ", ".join(dict.fromkeys(r.grid for r in found)),
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
    }
    results = Path(source) / "results.json"
    if results.is_file():
        facts["test top-1"] = f"{100 * json.loads(results.read_text(encoding='utf-8'))['test/acc']:.1f} %"
    return facts
