"""What is to be trained: groups of rows in ``configs/experiments/``, each row with one run per seed."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrel.training.config import parse
from vitrel.training.fileio import ConfigError, read_yaml
from vitrel.training.settings import TrainConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@dataclass(frozen=True)
class Planned:
    """One training.

    Attributes:
        group: Name of the file that it is in.
        row: Its name there.
        seed: Seed of weights, order and augmentation.
        own: The settings that tell its row from the others of the group, as text.
        options: Options of ``train.py``.
        sizes: Input sizes in pixels that its model is tested at afterwards.
        ablate: Whether its model is tested without each of its terms afterwards.
        settings: What of its resolved settings differs from the defaults: equal ones give equal results.
    """

    group: str
    row: str
    seed: int
    own: str
    options: tuple[str, ...]
    sizes: tuple[str, ...]
    ablate: bool
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.group}.{self.row}.{self.seed}"


def plan(asked: Sequence[str] = ()) -> list[Planned]:
    """All trainings, or those whose name begins with one of ``asked`` (GROUP, GROUP.ROW or GROUP.ROW.SEED).

    Raises:
        ConfigError: For a mistake in a file, or a name that fits nothing.
    """
    files = sorted((CONFIGS / "experiments").glob("*.yaml"))
    every = [run for file in files for run in _group(file)]
    for name in asked:
        if not any(_within(run, name) for run in every):
            known = ", ".join(file.stem for file in files)
            raise ConfigError(f"there is no experiment {name!r}; the groups are {known}, --list names all runs")
    return [run for run in every if not asked or any(_within(run, name) for name in asked)]


def _within(run: Planned, name: str) -> bool:
    return run.name == name or run.name.startswith(name + ".")


def _group(file: Path) -> Iterator[Planned]:
    tree = read_yaml(file)
    config, common = tree["config"], tree.get("settings", {})
    sizes, ablate = tree.get("sizes", []), tree.get("ablate", False)
    for row, own in tree["rows"].items():
        own = dict(own or {})
        seeds = own.pop("seeds", [0])
        size, terms = own.pop("sizes", sizes), own.pop("ablate", ablate)
        said = ", ".join(f"{key.removeprefix('model.').removeprefix('optim.')} {_text(own[key])}" for key in own)
        options = ["--config", str(CONFIGS / config)]
        for key, value in {**common, **own}.items():
            options += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
        try:
            settings = _differing(parse(options, folders=[CONFIGS]))
        except ConfigError as e:
            raise ConfigError(f"{file}: {row}: {e}") from None
        for seed in seeds:
            yield Planned(file.stem, row, seed, said, tuple(options), tuple(map(str, size)), terms, settings)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k} {_text(v)}" if k != "preset" else str(v) for k, v in value.items())
    return str(value)


_APART = ("name", "runs", "seed", "ckpt_path", "logger", "data.root", "data.num_workers", "trainer.accelerator")
"""Settings that leave the result as it is, or are kept beside it."""


def _differing(config: TrainConfig) -> dict[str, Any]:
    default = TrainConfig()
    given, usual = _flat(config.as_dict()), _flat(default.as_dict())
    return {k: v for k, v in given.items() if (k not in usual or usual[k] != v) and not k.startswith(_APART)}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
