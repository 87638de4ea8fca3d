"""A saved model as the start of a run: where its files lie, what they say of its settings, and whether they agree."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import DropPath
from torch import nn

import vitrel
from vitrel.relpos import DEFAULT
from vitrel.training.fileio import ConfigError, one_line

_NOT_OF_THE_BODY = ("num_classes", "in_chans", "pretrained", "checkpoint_path")


def weights_file(checkpoint: str) -> Path:
    """The ``.safetensors`` file of a model folder, of a run folder, or the file itself.

    Raises:
        ConfigError: If there is none.
    """
    path = Path(checkpoint)
    for file in (path, path / "model.safetensors", path / "model" / "model.safetensors"):
        if file.suffix == ".safetensors" and os.path.isfile(file):
            return file
    raise ConfigError(
        f"model.checkpoint: {checkpoint} is neither a folder with model.safetensors, nor a run with such a folder"
        " model/ in it, nor a .safetensors file (to resume a run, use --ckpt_path)"
    )


def stored_config(checkpoint: str) -> dict[str, Any] | None:
    """What ``config.json`` beside the weights says, or None if there is only a weights file.

    Raises:
        ConfigError: If there are no weights, or the file is damaged.
    """
    path = weights_file(checkpoint).parent / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = {"model_args": {}, **config}
        for key, kind in (("architecture", str), ("num_classes", int), ("pretrained_cfg", dict), ("model_args", dict)):
            if not isinstance(config[key], kind):
                raise TypeError(f"{key} is {config[key]!r}")
        config["pretrained_cfg"]["input_size"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ConfigError(
            f"model.checkpoint: {path} is no configuration of a timm model: {one_line(repr(e))}; export the run again"
        ) from None
    return config


def stored_settings(checkpoint: str) -> dict[str, Any]:
    """The ``model`` section that describes a saved model; empty if there is only a weights file.

    Raises:
        ConfigError: As :func:`stored_config`.
    """
    config = stored_config(checkpoint)
    if config is None:
        return {}
    arguments = {k: v for k, v in config["model_args"].items() if k not in _NOT_OF_THE_BODY}
    patch = arguments.get("patch_size")
    if isinstance(patch, list) and len(set(patch)) == 1:
        arguments["patch_size"] = patch[0]
    own = ["rel_pos", "img_size", "drop_path_rate", "drop_rate"]
    if not isinstance(arguments.get("patch_size"), list):  # the setting is a number, the argument may have two
        own.append("patch_size")
    settings = {k: arguments.pop(k) for k in own if k in arguments}
    return {"arch": config["architecture"], **settings, "kwargs": arguments}


def check_agreement(checkpoint: str, arch: str, rel_pos: Any) -> None:
    """Refuses an architecture or a scheme that is not the saved model's.

    Raises:
        ConfigError: Naming the setting and both values.
    """
    config = stored_config(checkpoint)
    if config is None:
        return
    if config["architecture"] != arch:
        raise ConfigError(
            f"model.arch: {checkpoint} holds a {config['architecture']}, the settings say {arch}; leave model.arch out"
        )
    differing = _differing_schemes(arch, config["model_args"].get("rel_pos"), rel_pos)
    if differing:
        raise ConfigError(f"model.rel_pos: {checkpoint} was trained with {differing}; leave model.rel_pos out")


def check_function(checkpoint: str, model: nn.Module) -> None:
    """Refuses a model whose weights have the saved shapes but that computes something else with them.

    Args:
        checkpoint: As for :func:`weights_file`.
        model: The model that the settings describe; its weights are not looked at.

    Raises:
        ConfigError: Naming the part of the model and both values.
    """
    config = stored_config(checkpoint)
    if config is None:
        return
    arguments = {k: v for k, v in config["model_args"].items() if k not in _NOT_OF_THE_BODY}
    try:
        with torch.device("meta"):
            saved = timm.create_model(config["architecture"], **arguments)
    except Exception as e:  # a model may fail in any way on arguments that do not fit it
        raise ConfigError(f"model.checkpoint: {checkpoint}: its config.json builds no model: {e!r}") from None
    then, now = dict(_meaning(saved)), dict(_meaning(model))
    for name in then:
        if name in now and then[name] != now[name]:
            raise ConfigError(
                f"model.checkpoint: {checkpoint} holds another model than the settings describe: {name} is {then[name]}"
                f" there, and {now[name]} by the settings; leave the settings of its body out"
            )


def _differing_schemes(arch: str, then: Any, now: Any) -> str:
    """In which fields two schemes differ, with their values; nothing where they compute the same."""
    if then is None and now is None:
        return ""
    default = DEFAULT if arch.startswith("vitrel_") else "none"  # of the models that have relative positions
    old, new = (vitrel.RelPos.of(default if spec is None else spec) for spec in (then, now))
    values = old.as_dict(), new.as_dict()
    return ", ".join(f"{k} {values[0][k]} (settings: {values[1][k]})" for k in old.differing(new))


def _meaning(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What tells two models of the same weights apart: kinds of layers, heads, scales, pooling."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Identity, nn.Dropout, DropPath)):
            continue  # rates are free
        yield f"the kind of {name or 'the model'}", type(module).__name__
        for key in ("num_heads", "scale", "eps", "approximate", "global_pool", "pool_include_prefix", "no_embed_class"):
            value = getattr(module, key, None)
            if isinstance(value, (bool, int, float, str)):
                yield f"{name}.{key}".lstrip("."), value
