"""A saved model as the start of a run: where its files lie, and what they say of the model's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import vitrel
from vitrel.training.fileio import ConfigError, one_line

_NOT_OF_THE_BODY = ("num_classes", "in_chans", "pretrained", "checkpoint_path")


def weights_file(checkpoint: str) -> Path:
    """The ``.safetensors`` file of a model folder, of a run folder, or the file itself.

    Raises:
        ConfigError: If there is none.
    """
    path = Path(checkpoint)
    for file in (path, path / "model.safetensors", path / "model" / "model.safetensors"):
        if file.is_file() and file.suffix == ".safetensors":
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
        config["architecture"], config["num_classes"], config["pretrained_cfg"]["input_size"]
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"model.checkpoint: {path} is no configuration of a timm model: {one_line(repr(e))}; export the run again"
        ) from None
    return dict(config)


def stored_settings(checkpoint: str) -> dict[str, Any]:
    """The ``model`` section that describes a saved model; empty if there is only a weights file.

    Raises:
        ConfigError: As :func:`stored_config`.
    """
    config = stored_config(checkpoint)
    if config is None:
        return {}
    arguments = {k: v for k, v in config.get("model_args", {}).items() if k not in _NOT_OF_THE_BODY}
    patch = arguments.get("patch_size")
    if isinstance(patch, list) and len(set(patch)) == 1:
        arguments["patch_size"] = patch[0]
    own = ["rel_pos", "img_size", "drop_path_rate", "drop_rate"]
    if not isinstance(arguments.get("patch_size"), list):  # the setting is a number, the argument may have two
        own.append("patch_size")
    settings = {k: arguments.pop(k) for k in own if k in arguments}
    return {"arch": config["architecture"], **settings, "kwargs": arguments}


def check_agreement(checkpoint: str, arch: str, rel_pos: Any) -> None:
    """Refuses settings that are not those of the saved model.

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
    stored = config.get("model_args", {}).get("rel_pos")
    if stored is None:
        return
    free = ("resize", "init", "init_std")  # change neither the parameters nor what they mean
    then, now = (vitrel.RelPos.of(spec).as_dict() for spec in (stored, "bias" if rel_pos is None else rel_pos))
    differing = [k for k in then if k not in free and then[k] != now[k]]
    if differing:
        values = ", ".join(f"{k} {then[k]} (settings: {now[k]})" for k in differing)
        raise ConfigError(f"model.rel_pos: {checkpoint} was trained with {values}; leave model.rel_pos out")
