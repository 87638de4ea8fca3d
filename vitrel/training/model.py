"""The timm model of a run: built from its settings, checked before data are read, written as a timm model folder."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from timm.models import save_for_hf
from torch import nn

import vitrel
from vitrel.learned import LearnedTable
from vitrel.training.checkpoint import check_agreement, check_function, stored_config, weights_file
from vitrel.training.config import suggest
from vitrel.training.fileio import ConfigError, one_line, whole_folder
from vitrel.training.settings import ModelConfig

# Settings of their own, and what create_model would take for itself; patch_size may be a pair there.
_NOT_KWARGS = {f.name for f in dataclasses.fields(ModelConfig)} - {"patch_size"} | {
    "num_classes", "in_chans", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "scriptable",
    "exportable", "no_jit", "features_only", "out_indices",
}  # fmt: skip


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """The model that ``config`` describes, with a classifier of ``num_classes``.

    Raises:
        ConfigError: For an unknown name or argument, or an input size that the patches do not tile.
    """
    _check_name(config)
    arguments: dict[str, Any] = {
        "img_size": tuple(config.img_size) if isinstance(config.img_size, list) else config.img_size,
        "patch_size": config.patch_size,
        "drop_path_rate": config.drop_path_rate,
        "drop_rate": config.drop_rate,
        "rel_pos": config.rel_pos,
    }
    arguments = {k: v for k, v in arguments.items() if v is not None}
    for name in config.kwargs:
        if name in arguments or name in _NOT_KWARGS:
            raise ConfigError(f"model.kwargs.{name}: set by the run or by model.{name}; remove it here")
    start: dict[str, Any] = {"pretrained": config.pretrained}
    if config.checkpoint:
        _check_start(config)
        start = {"pretrained": True, "pretrained_cfg_overlay": _start(config.checkpoint), "in_chans": 3}
    try:
        model = timm.create_model(config.arch, num_classes=num_classes, **start, **arguments, **config.kwargs)
    except Exception as e:  # a model may fail in any way on arguments that do not fit it
        given = {**arguments, **config.kwargs}
        named = next((f".{k}" for k in given if k in str(e)), "")
        said = str(e) or traceback.extract_tb(e.__traceback__)[-1].line or repr(e)  # timm asserts without a word
        raise ConfigError(f"model{named}: {config.arch} refuses {given}: {one_line(said)}") from e
    _check_tiling(model, config)
    if config.checkpoint:
        _check_loaded(model, config)
        check_function(config.checkpoint, model)
    if config.strip_rows is None:
        return model
    try:
        return vitrel.StripReader(model, config.strip_rows, config.memory_rows)
    except (TypeError, ValueError) as e:
        text = one_line(str(e))
        raise ConfigError(f"model.{text}" if text.startswith("memory_rows:") else f"model.strip_rows: {text}") from None


def timm_model(net: nn.Module) -> nn.Module:
    """The timm model of a run, without the reader that may be around it."""
    return net.model if isinstance(net, vitrel.StripReader) else net


def check_model(config: ModelConfig) -> nn.Module:
    """Builds the model without memory for its weights (on ``meta``), so that a mistake shows before any work.

    Raises:
        ConfigError: As :func:`build_model`.
    """
    _check_name(config)
    if config.checkpoint:
        _check_start(config)
    with torch.device("meta"):
        model = build_model(ModelConfig(**{**vars(config), "pretrained": False, "checkpoint": None}), num_classes=2)
    if config.checkpoint:
        check_function(config.checkpoint, model)
    return model


def save_model_folder(
    model: nn.Module, folder: Path, label_names: Sequence[str], data_config: Mapping[str, Any]
) -> None:
    """Writes ``config.json`` and ``model.safetensors`` so that timm's ``local-dir:`` gives the model back.

    The folder appears complete or not at all.

    Args:
        model: A timm model, or a reader of strips around one.
        folder: Where to write; an older one is replaced.
        label_names: Class names in the order of the classifier.
        data_config: ``mean``, ``std``, ``interpolation``, ``crop_pct`` used in training.
    """
    with whole_folder(folder) as beside:
        save_for_hf(
            timm_model(model),
            str(beside),
            model_config={"label_names": list(label_names), **_strips(model)},
            safe_serialization=True,
            data_config=dict(data_config),
        )
        written = json.loads((beside / "config.json").read_text(encoding="utf-8"))
        for key in ("tag", "license"):  # those of the weights that timm lists for the architecture
            written["pretrained_cfg"].pop(key, None)
        (beside / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _strips(model: nn.Module) -> dict[str, Any]:
    """How a model reads its images, for ``config.json``; nothing for one pass."""
    if not isinstance(model, vitrel.StripReader):
        return {}
    return {"strips": {"strip_rows": model.strip_rows, "memory_rows": model.memory_rows}}


def _check_name(config: ModelConfig) -> None:
    if ":" not in config.arch:
        name = config.arch.split(".", 1)[0]
        if not timm.is_model(name):
            close = suggest(name, timm.list_models()) or "; timm.list_models() lists the names"
            raise ConfigError(f"model.arch: no timm model is called {config.arch!r}{close}")
        if config.rel_pos is not None and not name.startswith("vitrel_"):
            ours = ", ".join(timm.list_models("vitrel_*"))
            raise ConfigError(f"model.rel_pos: {config.arch} has no relative positions; remove it or take {ours}")
    if config.rel_pos is not None:
        try:
            vitrel.RelPos.of(config.rel_pos)
        except (TypeError, ValueError) as e:
            raise ConfigError(f"model.{one_line(str(e))}") from None


def _check_tiling(model: nn.Module, config: ModelConfig) -> None:
    patches = getattr(model, "patch_embed", None)
    size, patch = getattr(patches, "img_size", None), patch_pixels(model)
    if size is None or patch is None or getattr(patches, "dynamic_img_pad", False):
        return
    if any(s <= 0 or p <= 0 or s % p for s, p in zip(size, patch, strict=True)):
        raise ConfigError(
            f"model.img_size: {size[0]} x {size[1]} is not a multiple of {config.arch}'s patch of"
            f" {patch[0]} x {patch[1]} pixels; change model.img_size or model.patch_size"
        )


def patch_pixels(model: nn.Module) -> tuple[int, int] | None:
    """Rows and columns in pixels that a token of a timm model stands for; None for a model without patches."""
    patches = getattr(model, "patch_embed", None)
    ratio = getattr(patches, "feat_ratio", None)  # a stem of convolutions has patches of features
    return ratio(as_scalar=False) if callable(ratio) else getattr(patches, "patch_size", None)


def _check_start(config: ModelConfig) -> None:
    if config.pretrained:
        raise ConfigError("model.pretrained and model.checkpoint: two sets of weights to start from; give one")
    check_agreement(str(config.checkpoint), config.arch, config.rel_pos)


def _start(checkpoint: str) -> dict[str, Any]:
    """What timm should take for the model's own weights; a classifier of another size is left out."""
    overlay: dict[str, Any] = {"file": str(weights_file(checkpoint))}
    stored = stored_config(checkpoint)
    if stored is not None:
        known = stored["pretrained_cfg"]
        overlay["num_classes"] = stored["num_classes"]
        overlay.update({k: known[k] for k in ("input_size", "mean", "std", "crop_pct") if k in known})
    return overlay


def _check_loaded(model: nn.Module, config: ModelConfig) -> None:
    """timm passes over missing weights where it replaces the classifier."""
    with safe_open(weights_file(str(config.checkpoint)), framework="pt") as file:
        stored = set(file.keys())
    cfg: Any = model.pretrained_cfg
    classifier = cfg.get("classifier") or ()
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    apart = tuple(f"{head}." for head in heads)
    names = stored ^ set(model.state_dict())
    differing = sorted(k for k in names if not k.startswith(apart) and k.rsplit(".", 1)[-1] not in LearnedTable.notes)
    if differing:
        where = f"only in {config.checkpoint}" if differing[0] in stored else "not in it"
        raise ConfigError(
            f"model.checkpoint: {config.checkpoint} holds another model than the settings describe: {differing[0]} is"
            f" {where} ({len(differing)} such names); leave the settings of its body out"
        )
