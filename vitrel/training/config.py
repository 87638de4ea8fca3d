"""Settings of a run from a file and a command line, with errors of one line.

* A setting comes from the defaults below, then the file given by ``--config``, then the dotted options.
* Numbers are read as YAML 1.2 reads them: ``1e-3`` is a number. ``on``/``off``/``yes``/``no`` are text, and every
  true/false setting takes them as true/false.
* Every mistake raises ``ConfigError`` with one line: the name, what was expected, and how to mend it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import inspect
import os
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from vitrel.training.checkpoint import stored_settings
from vitrel.training.fileio import ConfigError, dump_yaml, one_line, read_yaml
from vitrel.training.settings import ModelConfig, TrainConfig


def find_config(name: str, folders: Sequence[Path] = ()) -> Path:
    """The file that ``--config NAME`` means: the path as given, then NAME and NAME.yaml in ``folders``.

    Raises:
        ConfigError: With the places looked at and the names that are there.
    """
    if not name.strip():
        raise ConfigError(f"--config: expected a path or a name, got {name!r}")
    given = Path(name).expanduser()
    names = [name] if given.suffix in (".yaml", ".yml") else [name, f"{name}.yaml"]
    places = [] if given.is_absolute() else list(folders)
    for path in (given, *(folder / n for folder in places for n in names)):
        if os.path.isfile(path):
            return path
    if os.path.isdir(given):
        raise ConfigError(f"--config: {name} is a folder; give a YAML file")
    there = sorted(p.name for folder in places for p in folder.glob("*.yaml"))
    looked = ", ".join(str(folder) for folder in (given.absolute().parent, *places))
    hint = suggest(given.stem, [Path(n).stem for n in there]) or (f"; there are {', '.join(there)}" if there else "")
    raise ConfigError(f"--config: there is no {name!r} in {looked}{hint}")


def parse(argv: Sequence[str], folders: Sequence[Path] = (), default: str | None = None) -> TrainConfig:
    """Settings of a command line.

    Args:
        argv: Options, without the program's name.
        folders: Where ``--config NAME`` is looked for besides the path as given.
        default: The config taken when ``argv`` names none.

    Raises:
        ConfigError: For any mistake that can be seen without reading data.
        SystemExit: After ``--help`` or ``--print_config``.
    """
    pre = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    pre.add_argument("--config", default=default)
    pre.add_argument("--print_config", action="store_true")
    try:
        given, rest = pre.parse_known_args(list(argv))
    except argparse.ArgumentError as e:
        raise ConfigError(f"{e.argument_name}: {e.message}") from None
    tree = {} if given.config is None else read_yaml(find_config(given.config, folders))
    config = _parse(tree, rest)
    if given.print_config:
        print(dump(config), end="")
        raise SystemExit(0)
    return config


def from_dict(tree: dict[str, Any]) -> TrainConfig:
    """Settings from plain data, for example the ``config.yaml`` of a run.

    Raises:
        ConfigError: As :func:`parse`.
    """
    return _parse(tree, [])


def dump(config: TrainConfig) -> str:
    """The settings as YAML; parsing it gives an equal config."""
    return dump_yaml(config.as_dict())


def suggest(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the known name closest to ``name``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _parse(tree: dict[str, Any], options: list[str]) -> TrainConfig:
    tree, options = _model_kwargs(tree, options)
    unknown = list(_unknown_names(TrainConfig, tree, ""))
    if unknown:
        more = f"; unknown too: {', '.join(unknown[1:])}" if unknown[1:] else ""
        raise ConfigError(_unknown(unknown[0]) + more)
    _check_tree(TrainConfig, tree, "")
    _check_options(options)
    tree = _with_checkpoint(tree, options)
    defaults = TrainConfig().trainer
    tree = {**tree, "trainer": {**defaults, **tree.get("trainer", {})}}
    parser = _parser(with_help=bool({"-h", "--help"} & set(options)))
    try:
        space = parser.instantiate(parser.parse_args(options, namespace=parser.parse_object(tree)))
        config = TrainConfig(**{f.name: space[f.name] for f in dataclasses.fields(TrainConfig)})
    except ArgumentError as e:
        raise ConfigError(_translate(str(e))) from None
    config.trainer = _check_trainer(config.trainer)
    config.model.kwargs = _check_kwargs(config.model.kwargs)
    if config.name is None:
        config.name = config.data.name
    return config


def _with_checkpoint(tree: dict[str, Any], options: list[str]) -> dict[str, Any]:
    """Puts the settings of the saved model that ``model.checkpoint`` names below the given ones.

    A checkpoint among the options also goes before what the file says of the model's body. A resumed run has its own
    checkpoint, which knows the model: what it began from is not needed any more, and may be gone.
    """
    model = tree.get("model", {})
    pre = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    pre.add_argument("--model.checkpoint", dest="checkpoint")
    pre.add_argument("--ckpt_path", default=tree.get("ckpt_path"))
    try:
        options_given = pre.parse_known_args(options)[0]
    except argparse.ArgumentError as e:
        raise ConfigError(f"model.checkpoint: {e.message}") from None
    given, resumes = options_given.checkpoint, options_given.ckpt_path not in (None, "null")
    if given not in (None, "null"):
        stored = {} if resumes else stored_settings(given)
        body = ("arch", "rel_pos", "patch_size", "kwargs") if stored or resumes else ()
        return {**tree, "model": {**stored, **{k: v for k, v in model.items() if k not in body}}}
    # A resolved config has an arch, and may have lost the folder.
    if isinstance(model.get("checkpoint"), str) and "arch" not in model and not resumes:
        return {**tree, "model": {**stored_settings(model["checkpoint"]), **model}}
    return tree


@functools.cache
def _parser(with_help: bool) -> ArgumentParser:
    epilog = None
    if with_help:
        epilog = f"--trainer.NAME takes {', '.join(sorted(_trainer_arguments() - set(_SET_BY_RUN)))}."
    parser = ArgumentParser(
        exit_on_error=False,
        allow_abbrev=False,
        prog="train.py",
        usage="%(prog)s [--config NAME] [--print_config] [--SECTION.SETTING VALUE ...]",
        description="Settings come from the defaults, then the config file, then these options.",
        epilog=epilog,
    )
    parser.add_argument("--config", help="a YAML file: a path, or a name in the repository's configs/")
    parser.add_argument("--print_config", action="store_true", help="print the resolved settings and exit")
    parser.add_class_arguments(TrainConfig)
    for action in parser._actions:
        if action.dest in ("model", "data", "optim", "logger"):
            action.help = argparse.SUPPRESS  # a section in a file of its own would escape the strict reader
    return parser


def _model_kwargs(tree: dict[str, Any], options: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Moves ``model.NAME`` to ``model.kwargs.NAME`` where NAME is an argument of the timm model."""
    own = {f.name for f in dataclasses.fields(ModelConfig)}
    model = tree.get("model")
    if isinstance(model, dict):
        moved = {k: v for k, v in model.items() if k not in own and k in _timm_arguments()}
        if moved and isinstance(model.get("kwargs", {}), dict):
            kept = {k: v for k, v in model.items() if k not in moved}
            for k in moved:
                if k in model.get("kwargs", {}):
                    raise ConfigError(f"model.{k} is given twice, also as model.kwargs.{k}; keep one")
            tree = {**tree, "model": {**kept, "kwargs": {**model.get("kwargs", {}), **moved}}}
    result = []
    for option in options:
        match = re.match(r"--model\.(\w+)", option)
        if match and match[1] not in own and match[1] in _timm_arguments():
            option = option.replace("--model.", "--model.kwargs.", 1)
        result.append(option)
    return tree, result


@functools.cache
def _timm_arguments() -> dict[str, inspect.Parameter]:
    from timm.models import VisionTransformer

    from vitrel.relativized import vitrel_relativized

    theirs = inspect.signature(VisionTransformer.__init__).parameters
    ours = {n: p for n, p in inspect.signature(vitrel_relativized).parameters.items() if p.kind == p.KEYWORD_ONLY}
    run = {"self", "num_classes", "in_chans", "pretrained_cfg", "pretrained_cfg_overlay"}  # set by the run
    return {name: parameter for name, parameter in {**theirs, **ours}.items() if name not in run}


@functools.cache
def _kwargs_parser() -> ArgumentParser:
    """Of the true/false arguments of a timm model, which takes any text for true."""
    parser = ArgumentParser(exit_on_error=False)
    for name, parameter in _timm_arguments().items():
        if isinstance(parameter.default, bool):
            parser.add_argument(f"--{name}", type=bool)
    return parser


def _check_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    parser = _kwargs_parser()
    known = {action.dest for action in parser._actions}
    try:
        space = parser.parse_object({k: v for k, v in given.items() if k in known})
    except ArgumentError as e:
        raise ConfigError(_translate(str(e), prefix="model.")) from None
    return {k: space[k] if k in known else v for k, v in given.items()}


def _names(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted setting of a config class with its type; a section comes before its members."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        yield prefix + f.name, hints[f.name]
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _names(hints[f.name], f"{prefix}{f.name}.")


def _unknown_names(cls: type, tree: dict[str, Any], prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for key, value in tree.items():
        if key not in hints:
            yield prefix + key
        elif dataclasses.is_dataclass(hints[key]) and isinstance(value, dict):
            yield from _unknown_names(typing.cast(type, hints[key]), value, f"{prefix}{key}.")


def _check_tree(cls: type, tree: dict[str, Any], prefix: str) -> None:
    hints = typing.get_type_hints(cls)
    for key, value in tree.items():
        name = prefix + key
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise ConfigError(f"{name}: expected a section with settings below it, got {value!r}")
            _check_tree(hints[key], value, name + ".")
        elif value is None and type(None) not in typing.get_args(hints[key]):
            raise ConfigError(f"{name}: expected {_type_name(hints[key])}, got null; give a value or remove the line")
        elif typing.get_origin(hints[key]) is dict and not isinstance(value, dict):
            raise ConfigError(f"{name}: expected a mapping of names to values, got {value!r}")


def _check_options(options: list[str]) -> None:
    known = dict(_names(TrainConfig))
    for option in options:
        if not option.startswith("--"):
            continue
        name = option[2:].split("=", 1)[0]
        section = known.get(name)
        if section is not None and dataclasses.is_dataclass(section):
            raise ConfigError(
                f"--{name} is a section; set one of its members, for example "
                f"--{name}.{dataclasses.fields(section)[0].name}"
            )
        opening = [n for n, hint in known.items() if "dict" in str(hint) and name.startswith(n + ".")]
        if name not in known and not opening and name != "help":
            raise ConfigError(_unknown(name))


def _unknown(name: str) -> str:
    known = [n for n, _ in _names(TrainConfig)]
    if name.startswith("model."):
        known += [f"model.{n}" for n in _timm_arguments()]
    leaf = name.rsplit(".", 1)[-1]
    same = [n for n in known if n.rsplit(".", 1)[-1] == leaf]
    hint = f"; did you mean {same[0]}?" if same else suggest(name, known) or _suggest_leaf(leaf, known)
    return f"unknown setting {name!r}{hint or '; --help lists all settings'}"


def _suggest_leaf(leaf: str, known: list[str]) -> str:
    leaves = {n.rsplit(".", 1)[-1]: n for n in known}
    close = difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.6)
    return f"; did you mean {leaves[close[0]]}?" if close else ""


_SET_BY_RUN = {"logger": "logger.mode", "callbacks": "", "default_root_dir": "runs"}


def _trainer_arguments() -> set[str]:
    import pytorch_lightning as pl

    return set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}


@functools.cache
def _trainer_parser() -> ArgumentParser:
    import pytorch_lightning as pl

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(pl.Trainer, skip={*_SET_BY_RUN, "plugins", "profiler"}, instantiate=False)
    return parser


def _check_trainer(given: dict[str, Any]) -> dict[str, Any]:
    """Names and types of the trainer's arguments, by the signature of ``pl.Trainer``."""
    known = _trainer_arguments()
    for key in given:
        if key not in known:
            hint = suggest(f"trainer.{key}", (f"trainer.{k}" for k in known - set(_SET_BY_RUN)))
            raise ConfigError(f"unknown setting 'trainer.{key}'{hint or ': pl.Trainer has no such argument'}")
        if key in _SET_BY_RUN:
            instead = f"; use {_SET_BY_RUN[key]}" if _SET_BY_RUN[key] else ""
            raise ConfigError(f"trainer.{key} is set by the run itself{instead}")
    checked = {k: v for k, v in given.items() if k not in ("plugins", "profiler")}
    try:
        space = _trainer_parser().parse_object(checked)
    except ArgumentError as e:
        raise ConfigError(_translate(str(e), prefix="trainer.")) from None
    simple = (bool, int, float, str)
    return {k: space[k] if k in checked and isinstance(space[k], simple) else v for k, v in given.items()}


def _translate(message: str, prefix: str = "") -> str:
    """jsonargparse's message as one line in the user's words."""
    match = re.match(r'Parser key "([^"]+)":', message)
    if not match:
        return one_line(re.sub(r"^argument --([\w.]+)", r"\1", message))
    body = message[match.end() :]
    types = re.findall(r"^\s*(?:- )?Expected an? (.+?)(?:\. Got value: .*)?$", body, flags=re.M)
    got = re.findall(r"(?:Got value|Given value): ?(.*)", body)
    if not types:
        return f"{prefix}{match[1]}: {one_line(body)}"
    expected = " or ".join(dict.fromkeys(_type_name(t) for t in types))
    return f"{prefix}{match[1]}: expected {expected}" + (f", got {got[-1].strip() or 'nothing'}" if got else "")


def _type_name(hint: Any) -> str:
    text = hint if isinstance(hint, str) else getattr(hint, "__name__", None) or str(hint)
    text = re.sub(r"<class '([^']+)'>", r"\1", text).replace("typing.", "").replace("NoneType", "null")
    literal = re.match(r"Literal\[(.*)\]$", text)
    return "one of " + literal[1].replace("'", "") if literal else text
