"""The Lightning module: classification with AdamW, a schedule per step, and metrics that do not depend on ranks."""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import vitrel
from vitrel.training.config import from_dict
from vitrel.training.model import build_model
from vitrel.training.settings import ModelConfig, OptimConfig, TrainConfig
from vitrel.training.transforms import mix_transform


class ClassificationTask(pl.LightningModule):
    """Trains one timm model, ``net``, on labelled pictures.

    Args:
        config: The settings of the run as plain data, so that checkpoints load without trusting any code.
        num_classes: Number of classes.
        net: The model; built from the settings if not given, without their starting weights.

    Raises:
        ConfigError: For settings that do not fit.
    """

    def __init__(self, config: dict[str, Any], num_classes: int, net: nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters({"config": config, "num_classes": num_classes})
        self.config: TrainConfig = from_dict(config)
        model = self.config.model
        bare = ModelConfig(**{**vars(model), "pretrained": False, "checkpoint": None})
        self.net = build_model(bare, num_classes) if net is None else net
        if model.compile:
            self.net.compile()  # in place: the names of the parameters stay as they are
        self.schedule: WarmupCosine | None = None
        self.mix = mix_transform(self.config.data, num_classes)
        top5 = min(5, num_classes)
        accuracy = MetricCollection(
            {
                "acc": MulticlassAccuracy(num_classes, average="micro"),
                "acc5": MulticlassAccuracy(num_classes, average="micro", top_k=top5),
            }
        )
        self.train_loss = MeanMetric()
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()
        self.val_acc, self.test_acc = accuracy.clone(prefix="val/"), accuracy.clone(prefix="test/")

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits (B, classes) of normalised pictures (B, 3, h, w)."""
        return self.net(pictures)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, labels = batch
        targets = labels
        if self.mix is not None:
            pictures, targets = self.mix(pictures, labels)
        logits = self(pictures)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.config.optim.label_smoothing)
        # A mixed picture counts as the class that has the larger part of it.
        self.train_acc.update(logits, targets if targets.ndim == 1 else targets.argmax(dim=1))
        self.train_loss.update(loss.detach(), weight=len(labels))
        self.log("train/loss_step", loss.detach(), on_step=True, on_epoch=False)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val/loss", self.val_loss, self.val_acc, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test/loss", self.test_loss, self.test_acc, batch)

    def _evaluate(self, name: str, mean: MeanMetric, acc: MetricCollection, batch: tuple[Tensor, Tensor]) -> None:
        pictures, labels = batch
        logits = self(pictures)
        mean.update(F.cross_entropy(logits, labels), weight=len(labels))
        acc.update(logits, labels)
        self.log(name, mean, on_step=False, on_epoch=True, prog_bar=True)
        self.log_dict(acc, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optim = self.config.optim
        groups = parameter_groups(self.net, optim)
        betas = (optim.betas[0], optim.betas[1])
        optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, weight_decay=optim.weight_decay)
        schedule = LambdaLR(optimizer, lambda step: self.schedule(step) if self.schedule else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        # Not before: counting the steps starts the loader, which has to know the epoch of a resumed run.
        optim, steps = self.config.optim, int(self.trainer.estimated_stepping_batches)
        self.schedule = WarmupCosine(steps, int(optim.warmup * steps), optim.min_lr)
        schedule = self.lr_schedulers()
        assert isinstance(schedule, LambdaLR)
        for group, lr in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
            group["lr"] = lr * self.schedule(schedule.last_epoch)


class WarmupCosine:
    """Learning-rate factor of a step: linear from 1/warmup to 1, then a cosine to ``floor`` at the last step.

    Args:
        steps: Number of optimizer steps of the run.
        warmup: Steps of the warm-up.
        floor: Factor of the last step.
    """

    def __init__(self, steps: int, warmup: int, floor: float = 0.0) -> None:
        self.steps, self.warmup, self.floor = steps, warmup, floor

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


def parameter_groups(net: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """AdamW's groups: ``decay``, ``no_decay`` (biases, norms, what the model names) and ``position``.

    Position parameters (tables, u, v) get ``position_lr_scale`` times the learning rate and no decay. A parameter is
    in exactly one group; frozen ones are in none.

    Args:
        net: A timm model, not wrapped for compiling or for several processes.
        optim: The optimizer settings.
    """
    named = getattr(net, "no_weight_decay", set)
    position_names = vitrel.position_parameters(net)
    position = {id(p): p for n, p in net.named_parameters() if n in position_names and p.requires_grad}
    groups = param_groups_weight_decay(net, optim.weight_decay, no_weight_decay_list=set(named()))
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in position]
        group["name"] = "decay" if group["weight_decay"] else "no_decay"
    if position:
        lr = optim.lr * optim.position_lr_scale
        groups.append({"params": list(position.values()), "weight_decay": 0.0, "lr": lr, "name": "position"})
    return [group for group in groups if group["params"]]
