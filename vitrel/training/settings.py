"""The settings of a run as typed sections. Their docstrings are what ``--help`` shows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class ModelConfig:
    """The model, any of timm's.

    Any other argument of the model may be given as ``model.NAME`` too; it goes to ``model.kwargs``.

    Attributes:
        arch: Name of a timm model, vitrel's included.
        rel_pos: Relative position scheme of a vitrel model: a preset, "bias+value" or a mapping; null: the model's own.
        img_size: Side of the input image in pixels, or [rows, columns]; null: the model's own.
        patch_size: Side of a patch in pixels; null: the model's own.
        drop_path_rate: Stochastic depth, the rate of the last block.
        drop_rate: Dropout before the classifier.
        pretrained: Start from the weights timm knows for this name (may download).
        checkpoint: Start from a run, a model folder (config.json + model.safetensors) or a .safetensors file; arch,
            rel_pos and the model's other arguments come from there, its tables take img_size, and the classifier is
            made anew for another number of classes.
        compile: Compile the model with torch.compile.
        strip_rows: Read images in strips of so many patch rows (vitrel.StripReader); null: in one pass.
        memory_rows: Patch rows above a strip that it sees; 0 for none, null for all.
        kwargs: More arguments of the timm model.
    """

    arch: str = "vitrel_micro_patch4_32"
    rel_pos: str | dict[str, Any] | None = None
    img_size: int | list[int] | None = None
    patch_size: int | None = None
    drop_path_rate: float | None = None
    drop_rate: float | None = None
    pretrained: bool = False
    checkpoint: str | None = None
    compile: bool = False
    strip_rows: int | None = None
    memory_rows: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataConfig:
    """The data set, its splits and its augmentation.

    Attributes:
        name: Data set; "folder" is any tree or tar of class folders, "digits" and "fake" need no files.
        root: Where the files lie: torchvision's CIFAR folder, train/ and test/ (or val/) folders, or their tar files.
        download: Fetch CIFAR when it is not under root.
        batch_size: Images per step and device.
        num_workers: Loader processes per device; 0 loads in the training process; null: 0 on CPU, else up to 8.
        val_size: Training images held out for validation where there is no val split: a fraction or a count.
        skip_damaged: Leave out pictures that cannot be read, named and counted, instead of stopping at the first; every
            picture is read once more at the start.
        split_seed: Seed of that split; it does not follow seed, so that runs of several seeds share their split.
        augment: Recipe of the training images.
        crop_padding: Border in pixels of the input, filled with black, before a random crop ("shift", "crop_flip").
        scale: Area of the random crop as parts of the image, smallest and largest ("resized_crop").
        hflip: Probability of a horizontal flip ("crop_flip", "resized_crop").
        color_jitter: Strength of brightness, contrast and saturation jitter; 0 is off.
        cutout: Probability of blanking one square of a quarter of the side; 0 is off.
        mixup: Alpha of MixUp; 0 is off.
        cutmix: Alpha of CutMix; 0 is off.
        stack: Pictures on top of each other in one tall image, labelled by the one below a mark; 1 for single pictures.
        mean: Mean per channel for normalisation, RGB in 0..1; null: the data set's, else the model's.
        std: Standard deviation likewise.
        crop_pct: Part of the image kept by the centre crop of evaluation; null: the model's.
        fake_images: Number of images per split of "fake".
        fake_classes: Number of classes of "fake".
    """

    name: Literal["digits", "cifar10", "cifar100", "folder", "fake"] = "digits"
    root: str = "data"
    download: bool = False
    batch_size: int = 128
    num_workers: int | None = None
    val_size: float = 0.1
    skip_damaged: bool = False
    split_seed: int = 0
    augment: Literal["none", "shift", "crop_flip", "resized_crop"] = "none"
    crop_padding: int = 4
    scale: list[float] = field(default_factory=lambda: [0.35, 1.0])
    hflip: float = 0.5
    color_jitter: float = 0.0
    cutout: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    stack: int = 1
    mean: list[float] | None = None
    std: list[float] | None = None
    crop_pct: float | None = None
    fake_images: int = 256
    fake_classes: int = 10


@dataclass
class OptimConfig:
    """AdamW, linear warm-up, cosine.

    Attributes:
        lr: Peak learning rate, stated for the global batch (batch_size x devices x accumulated batches).
        weight_decay: Decay of matrices; biases, norms and position parameters are not decayed.
        betas: AdamW's two betas.
        position_lr_scale: Learning-rate factor of the position parameters (tables, u, v): one number, or one for each
            named term of the model, prefix and timm's pos_embed among them ({bias: 10, query: 3}; the others take 1).
        warmup: Part of all steps spent on the linear warm-up.
        min_lr: Learning rate of the last step as a part of lr.
        label_smoothing: Probability spread over all classes.
        ema_decay: Decay of an exponential moving average of the weights; null is off.
        ema_start: Epochs before that average begins; validation has the weights in training until then.
        skip_nonfinite: Skip a step whose loss or gradient is not finite, and count it, instead of stopping.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    position_lr_scale: float | dict[str, float] = 10.0
    warmup: float = 0.1
    min_lr: float = 0.0
    label_smoothing: float = 0.0
    ema_decay: float | None = None
    ema_start: int = 0
    skip_nonfinite: bool = False


@dataclass
class LoggerConfig:
    """What is logged beside the CSV file that every run writes.

    Attributes:
        mode: Weights & Biases: online, offline (files to sync later) or off; WANDB_MODE in the environment wins.
        project: W&B project.
        entity: W&B team or user; null: the account's default.
        maps_every: Epochs between pictures of the position tables and numbers per head, after the last of which W&B
            gets tables of what terms and sizes are worth; 0 is off.
    """

    mode: Literal["online", "offline", "off"] = "offline"
    project: str = "vitrel"
    entity: str | None = None
    maps_every: int = 5


@dataclass
class TrainConfig:
    """A training run.

    Attributes:
        name: Name of the run: its files go to RUNS/NAME/version_N; null: the data set's name.
        runs: Folder of all runs.
        seed: Seed of weights, order and augmentation.
        ckpt_path: Checkpoint to resume from, or "last" for the newest last.ckpt of this name; null starts afresh.
        trainer: Arguments of pl.Trainer, handed over as they are (max_epochs, devices, precision, ...).
    """

    name: str | None = None
    runs: str = "runs"
    seed: int = 0
    ckpt_path: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    trainer: dict[str, Any] = field(default_factory=lambda: {"max_epochs": 10, "gradient_clip_val": 1.0})

    def as_dict(self) -> dict[str, Any]:
        """Plain data, safe for YAML, JSON and checkpoints."""
        return dataclasses.asdict(self)
