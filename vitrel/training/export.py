"""A finished run as a folder to share: weights, configuration, model card, and an ONNX file if wanted."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import get_model_input_config
from timm.models._hub import generate_readme
from torch import nn

import vitrel
from vitrel.training.config import from_dict
from vitrel.training.fileio import ConfigError, one_line, read_yaml, whole_folder
from vitrel.training.settings import TrainConfig
from vitrel.zoo import WEIGHTS

NEEDED = {"config.json", "model.safetensors", "README.md"}
ONNX_FILE = "model.onnx"
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def export(run: str | Path, folder: str | Path, onnx: bool = False, license: str = "unknown") -> Path:
    """Writes a run's model, that of its best checkpoint, as a folder that ``timm.create_model("local-dir:...")`` reads.

    Args:
        run: A run folder with ``model/`` and ``results.json``, which a run writes at its end.
        folder: Where to write: new, empty, or an earlier export, which is replaced. It appears complete or not at all.
        onnx: Also write ``model.onnx`` for batches of any size, after comparing it with the model in onnxruntime.
        license: Licence of the weights, an identifier of the Hugging Face Hub.

    Returns:
        ``folder``.

    Raises:
        ConfigError: If there is no such run, it has no model, or the folder holds other files.
    """
    run, folder = Path(run), Path(folder)
    config, results = _read_run(run)
    _check_target(folder)
    missing = [name for name in ONNX_PACKAGES if onnx and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--onnx needs {', '.join(missing)}: pip install {' '.join(missing)}")
    if onnx and "strips" in config:
        raise ConfigError("--onnx: this run reads its images in strips, and model.onnx would read them in one pass")
    model = _load(run / "model")
    recipe = from_dict(read_yaml(run / "config.yaml")) if (run / "config.yaml").is_file() else None
    config["pretrained_cfg"]["license"] = license
    with whole_folder(folder) as beside:
        (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(run / "model" / "model.safetensors", beside / "model.safetensors")
        card = _card(model, config, results, recipe, license, onnx)
        name = folder.resolve().name
        source = name if folder.resolve().parent == WEIGHTS else f"local-dir:{name}"
        (beside / "README.md").write_text(
            generate_readme({**card, "usage": _usage(name, source, config)}, name), encoding="utf-8"
        )
        if onnx:
            _write_onnx(model, beside / ONNX_FILE)
    return folder


def _read_run(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if not run.is_dir():
        raise ConfigError(f"{run}: no such folder; give a run folder, for example runs/digits/version_0")
    for name in ("model/config.json", "model/model.safetensors", "results.json"):
        if not (run / name).is_file():
            hint = "a run writes it at its end; let it finish (train.py --ckpt_path last goes on with it)"
            if (run / "model.safetensors").is_file():
                hint = "this is a model folder; give the run that it belongs to"
            raise ConfigError(f"{run}: not a finished run, there is no {name}; {hint}")
    config, results = (_read_json(run / name) for name in ("model/config.json", "results.json"))
    for file, tree, keys in (
        ("model/config.json", config, ("architecture", "num_classes", "pretrained_cfg")),
        ("results.json", results, ("test/acc", "test/acc5", "data", "epochs")),
    ):
        for key in keys:
            if key not in tree:
                raise ConfigError(f"{run / file}: there is no {key!r} in it; take the file that the run wrote")
    return config, results


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ConfigError(f"{path}: damaged JSON, {one_line(str(e))}; take the file that the run wrote") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping, got {type(tree).__name__}; take the file that the run wrote")
    return tree


def _check_target(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; give a folder that is new, empty, or an earlier export")
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if there and not NEEDED <= there <= {*NEEDED, ONNX_FILE}:
        raise ConfigError(f"{folder}: is not empty and no earlier export; give a new folder, or empty this one")


def _load(folder: Path) -> nn.Module:
    try:
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except Exception as e:  # a damaged file fails in many ways
        raise ConfigError(f"{folder}: the model cannot be read: {one_line(str(e) or repr(e))}") from None


def _factors(scale: float | dict[str, float]) -> str:
    if not isinstance(scale, dict):
        return f"{scale:g}"
    return " and ".join(f"{factor:g} ({term})" for term, factor in scale.items())


def _recipe(config: TrainConfig, positions: bool) -> str:
    """The settings of a training in a line; with ``positions`` that of position parameters too."""
    optim, data = config.optim, config.data
    precision = str(config.trainer.get("precision") or "32-true")
    named = isinstance(optim.position_lr_scale, dict)  # pos_embed may be
    low, high = data.scale
    crops = f" of {100 * low:g} to {100 * high:g} % of the area" if data.augment == "resized_crop" else ""
    parts = {
        f"AdamW, peak learning rate {optim.lr:g}": True,
        f"{data.batch_size} images per step and device": True,
        f"weight decay {optim.weight_decay:g}": True,
        f"position parameters at {_factors(optim.position_lr_scale)} times the learning rate": positions or named,
        f"warm-up over {100 * optim.warmup:g} % of the steps, cosine": True,
        f"label smoothing {optim.label_smoothing:g}": optim.label_smoothing,
        f"EMA {optim.ema_decay}": optim.ema_decay is not None,
        f"augmentation {data.augment}{crops}": True,
        f"MixUp {data.mixup:g}": data.mixup,
        f"CutMix {data.cutmix:g}": data.cutmix,
        f"cutout {data.cutout:g}": data.cutout,
        f"colour jitter {data.color_jitter:g}": data.color_jitter,
        f"stochastic depth {config.model.drop_path_rate}": config.model.drop_path_rate,
        f"precision {precision}": precision not in ("32", "32-true"),
        f"seed {config.seed}": True,
    }
    return ", ".join(part for part, on in parts.items() if on)


def _card(
    model: nn.Module,
    config: dict[str, Any],
    results: dict[str, Any],
    recipe: TrainConfig | None,
    license: str,
    onnx: bool,
) -> dict[str, Any]:
    """The model card as timm's ``generate_readme`` takes it."""
    _, rows, columns = get_model_input_config(model)["input_size"]
    rel_pos = config.get("model_args", {}).get("rel_pos")
    terms = "+".join(vitrel.RelPos.of(rel_pos).terms) or "none" if rel_pos else None
    accuracy = "Validation accuracy" if results.get("tested_on") == "val" else "Test accuracy"
    details = {
        "Architecture": config["architecture"],
        "Relative position": terms and (terms if terms == "kernel" else f"{terms}, {rel_pos['table']} tables"),
        "Parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "Image size": f"{rows} x {columns}",
        "Classes": config["num_classes"],
        "Trained on": f"{results['data']}, {results['epochs']} epochs",
        "Recipe": recipe and _recipe(recipe, bool(vitrel.position_parameters(model))),
        "Started from": recipe and recipe.model.checkpoint,
        accuracy: f"{results['test/acc']:.4f} top-1, {results['test/acc5']:.4f} top-5",
        "Versions": ", ".join(f"{name} {version}" for name, version in results.get("versions", {}).items()),
        "ONNX": f"`{ONNX_FILE}`: `images` (batch, 3, {rows}, {columns}) to `logits`" if onnx else None,
    }
    return {
        "tags": ["image-classification", "timm", "vitrel"],
        "license": license,
        "description": "A vision transformer for image classification, trained with vitrel.",
        "details": {name: value for name, value in details.items() if value},
    }


def _usage(name: str, source: str, config: dict[str, Any]) -> str:
    where = f'# "local-dir:" and a path, or "hf-hub:OWNER/{name}" once it is there\n' if source != name else ""
    strips, reader, note = config.get("strips"), "", ""
    if strips:
        reader = f"model = vitrel.StripReader(model, {strips['strip_rows']}, {strips['memory_rows']})\n"
        note = "The accuracy is that of reading images in strips. "
    return f"""```python
import timm, torch, vitrel  # importing vitrel registers its models with timm
from PIL import Image

{where}model = timm.create_model("{source}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
image = transform(Image.open("image.png").convert("RGB"))
labels = model.pretrained_cfg["label_names"]
{reader}with torch.inference_mode():
    probabilities = model(image[None]).softmax(-1)[0]
print(labels[probabilities.argmax()], probabilities.max().item())
```

{note}`num_classes=` puts a new classifier in, `img_size=` takes another image size; the position tables are resized.
"""


@torch.inference_mode()
def _write_onnx(model: nn.Module, path: Path) -> None:
    import onnxruntime
    from timm.utils.onnx import onnx_export

    size = get_model_input_config(model)["input_size"]
    example = torch.randn(2, *size)
    onnx_export(model, str(path), example, use_dynamo=True, input_names=["images"], output_names=["logits"])
    images = torch.randn(3, *size)  # another number of images than it was traced with
    logits = model(images)
    session = onnxruntime.InferenceSession(str(path))
    (got,) = session.run(None, {"images": images.numpy()})
    difference = float((torch.from_numpy(got) - logits).abs().max())
    if not difference <= 1e-4 * max(1.0, float(logits.abs().max())):
        raise ConfigError(f"--onnx: logits in onnxruntime differ by {difference:.1e}; nothing was written")
