"""What is to be trained: groups of rows in ``configs/experiments/``, each row with one run per seed."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrel.relpos import RelPos
from vitrel.training.config import parse
from vitrel.training.evaluation import parse_size
from vitrel.training.fileio import ConfigError, read_yaml
from vitrel.training.settings import TrainConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
Settings = dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """One training.

    Attributes:
        group: Name of the file that it is in.
        row: Its name there.
        seed: Seed of weights, order and augmentation.
        own: The settings that tell its row from the others of the group, as text.
        options: Options of ``train.py``.
        sizes: Input sizes (rows, columns) in pixels that its model is tested at afterwards.
        ablate: Whether its model is tested without each of its terms afterwards.
        settings: Its resolved settings: equal ones give equal results.
    """

    group: str
    row: str
    seed: int
    own: str
    options: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    ablate: bool
    settings: Settings

    @property
    def name(self) -> str:
        return f"{self.group}.{self.row}.{self.seed}"


@dataclass
class _File:
    """A group as it is written down."""

    config: str
    rows: dict[str, dict[str, Any]]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    sizes: list[Any] = dataclasses.field(default_factory=list)
    ablate: bool = False


def plan(asked: Sequence[str] = ()) -> list[Planned]:
    """All trainings, or those whose name begins with one of ``asked`` (GROUP, GROUP.ROW or GROUP.ROW.SEED).

    Raises:
        ConfigError: For a mistake in a file, or a name that fits nothing.
    """
    files = sorted((CONFIGS / "experiments").glob("*.yaml"))
    groups = {name.split(".")[0] for name in asked} or {file.stem for file in files}
    every = [run for file in files if file.stem in groups for run in _group(file)]
    for name in asked:
        if not any(_within(run, name) for run in every):
            known = ", ".join(file.stem for file in files)
            raise ConfigError(f"there is no experiment {name!r}; the groups are {known}, --list names all runs")
    return [run for run in every if not asked or any(_within(run, name) for name in asked)]


def _within(run: Planned, name: str) -> bool:
    return run.name == name or run.name.startswith(name + ".")


def _group(file: Path) -> Iterator[Planned]:
    tree = read_yaml(file)
    names = {f.name for f in dataclasses.fields(_File)}
    if unknown := set(tree) - names:
        raise ConfigError(f"{file}: unknown key {min(unknown)!r}, expected {', '.join(sorted(names))}")
    try:
        group = _File(**tree)
        for row, own in group.rows.items():
            own, where = dict(own), f"{file}: {row}"
            if not re.fullmatch(r"\w+", str(row)):
                raise ConfigError(f"{where}: expected a name of letters, digits and underscores")
            seeds, ablate = own.pop("seeds", [0]), own.pop("ablate", group.ablate)
            if not isinstance(seeds, list) or len(set(map(str, seeds))) < len(seeds) or not all(map(_is_seed, seeds)):
                raise ConfigError(f"{where}: seeds: expected different numbers of 0 or more, got {seeds}")
            if not isinstance(ablate, bool):
                raise ConfigError(f"{where}: ablate: expected true or false, got {ablate!r}")
            sizes = _sizes(own.pop("sizes", group.sizes), where)
            options = ["--config", str(CONFIGS / group.config)]
            for key, value in {**group.settings, **own}.items():
                options += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
            try:
                settings = identity(parse(options))
            except ConfigError as e:
                raise ConfigError(f"{where}: {e}") from None
            for seed in seeds:
                yield Planned(file.stem, row, seed, _said(own), tuple(options), sizes, ablate, settings)
    except (TypeError, ValueError, AttributeError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{file}: expected config, and rows of settings; see the other files beside it ({e})") from e


def _is_seed(value: Any) -> bool:
    return type(value) is int and value >= 0


def _sizes(values: Any, where: str) -> tuple[tuple[int, int], ...]:
    try:
        if not isinstance(values, list):
            raise ConfigError(f"expected a list of pixels such as [48, 48x32], got {values!r}")
        return tuple(parse_size(str(value)) for value in values)
    except ConfigError as e:
        raise ConfigError(f"{where}: sizes: {str(e).removeprefix('--sizes: ')}") from None


def _said(own: dict[str, Any]) -> str:
    return ", ".join(f"{key.removeprefix('model.').removeprefix('optim.')} {_text(own[key])}" for key in own)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k} {_text(v)}" if k != "preset" else str(v) for k, v in value.items())
    return str(value)


_APART = ("name", "runs", "seed", "ckpt_path", "logger", "data.root", "data.num_workers", "trainer.accelerator")
"""Settings that leave the result as it is, or are kept beside it."""
_TESTED = "model.rel_pos.resize"  # every rule is, after training at one size from scratch


def identity(config: TrainConfig) -> Settings:
    """The settings that decide a result, flat, with a scheme as its fields: a preset may come to mean another."""
    tree = config.as_dict()
    if tree["model"]["rel_pos"] is not None:
        tree["model"]["rel_pos"] = RelPos.of(tree["model"]["rel_pos"]).as_dict()
    settings = json.loads(json.dumps(_flat(tree)))
    apart = _APART if settings.get("model.checkpoint") else (*_APART, _TESTED)
    return {key: value for key, value in settings.items() if not key.startswith(apart)}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
