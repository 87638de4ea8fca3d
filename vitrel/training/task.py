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
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import vitrel
from vitrel.position import PositionTerms
from vitrel.training.config import from_dict
from vitrel.training.data import PictureDataModule
from vitrel.training.model import build_model
from vitrel.training.settings import ModelConfig, OptimConfig, TrainConfig
from vitrel.training.transforms import mix_transform

ABSOLUTE = "pos_embed"
"""timm's name of an absolute position embedding."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient that is not finite; the message is one line for the user."""


class ClassificationTask(pl.LightningModule):
    """Trains one timm model, ``net``, on labelled pictures.

    Beside the metrics it logs the gradient norm of each step before clipping, and the norm of each block's position
    parameters at the end of each epoch. A step whose loss or gradient is not finite raises :class:`NonFiniteError`
    before the weights change, or is left out with ``optim.skip_nonfinite`` and counted in ``skipped_steps``.

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
        self.skipped_steps = 0
        self._skipped_before = 0
        self._batches: list[tuple[int, Tensor, Tensor]] = []
        self.train_loss = MeanMetric(nan_strategy="ignore")  # skipped steps have no loss
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
        self._batches.append((batch_idx, loss.detach(), logits.detach()))
        # A mixed picture counts as the class that has the larger part of it.
        self.train_acc.update(logits, targets if targets.ndim == 1 else targets.argmax(dim=1))
        self.train_loss.update(loss.detach().nan_to_num(torch.nan, torch.nan, torch.nan), weight=len(labels))
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

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        batches, self._batches = self._batches, []
        norm = get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])
        self.log("train/grad_norm", norm, on_step=True, on_epoch=False)
        finite = torch.stack([loss.isfinite() for _, loss, _ in batches]).all()
        if getattr(self.trainer.precision_plugin, "scaler", None) is None:  # which meets infinite gradients by design
            finite = finite & norm.isfinite()
        if self.trainer.strategy.reduce_boolean_decision(bool(finite)):
            return
        if not self.config.optim.skip_nonfinite:
            raise NonFiniteError(self._describe(batches, norm, optimizer))
        self.skipped_steps += 1
        optimizer.zero_grad(set_to_none=True)  # parameters without a gradient are passed over, state included

    def _describe(
        self, batches: list[tuple[int, Tensor, Tensor]], norm: Tensor, optimizer: torch.optim.Optimizer
    ) -> str:
        epoch, step = self.current_epoch, self.global_step
        bad = [batch for batch in batches if not batch[1].isfinite()]
        what = f"the loss is {float(bad[0][1])}" if bad else f"the gradient norm is {float(norm)}"
        rates = ", ".join(f"{group['lr']:.3g} ({group['name']})" for group in optimizer.param_groups)
        return (
            f"{what} in step {step + 1} (epoch {epoch + 1}); learning rates {rates}; {_largest_entry(self.net)};"
            f" pictures: {self._names(bad or batches)}. Lower optim.lr, look at these pictures, or leave such steps out"
            " with --optim.skip_nonfinite true"
        )

    def _names(self, batches: list[tuple[int, Tensor, Tensor]]) -> str:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, PictureDataModule):
            return "unknown"
        names = []
        for index, _, logits in batches:
            culprits = ~logits.isfinite().all(dim=1)
            some = bool(culprits.any()) and self.mix is None  # a mixed picture spoils its partner's too
            batch = data.names_of_batch(self.current_epoch, index)
            names += [n for n, bad in zip(batch, culprits.tolist(), strict=True) if bad or not some]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    def on_train_epoch_start(self) -> None:
        self._skipped_before = self.skipped_steps

    def on_train_epoch_end(self) -> None:
        norms = {f"tables/{name}_norm": norm for name, norm in table_norms(self.net).items()}
        self.log_dict(norms, sync_dist=True)
        if not self.config.optim.skip_nonfinite:
            return
        self.log("train/skipped_steps", float(self.skipped_steps), sync_dist=True)
        steps = math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)
        if self.skipped_steps - self._skipped_before >= steps:
            raise NonFiniteError(
                f"no step of epoch {self.current_epoch + 1} had a finite loss and gradient;"
                f" {_largest_entry(self.net)}. Lower optim.lr, or look at the data"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped_steps"] = self.skipped_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.skipped_steps = checkpoint.get("skipped_steps", 0)

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


def table_norms(net: nn.Module) -> dict[str, Tensor]:
    """Norm of each block's position parameters (tables, u, v), all of them taken as one vector."""
    grouped: dict[str, list[Tensor]] = {}
    parameters = dict(net.named_parameters())
    for name in sorted(vitrel.position_parameters(net)):
        if name in parameters:
            grouped.setdefault(name.split(".attn.", 1)[0], []).append(parameters[name].detach())
    return {block: get_total_norm(tensors) for block, tensors in grouped.items()}


def _largest_entry(net: nn.Module) -> str:
    parameters = dict(net.named_parameters())
    largest = {
        name: float(parameters[name].detach().abs().max())
        for name in sorted(vitrel.position_parameters(net))
        if name in parameters
    }
    if not largest:
        return "no position parameters"
    # A value that is not a number counts as the largest.
    name = max(largest, key=lambda n: math.inf if math.isnan(largest[n]) else largest[n])
    return f"largest table entry {largest[name]:.3g} in {name}"


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

    Position parameters (tables, u, v) get ``position_lr_scale`` times the learning rate and no decay; they are one
    group, or ``position_TERM`` for each term with factors by term, which may name timm's absolute embedding too
    (``pos_embed``). A parameter is in exactly one group; frozen ones are in none.

    Args:
        net: A timm model, not wrapped for compiling or for several processes.
        optim: The optimizer settings.
    """
    scale = optim.position_lr_scale
    named = set(scale) if isinstance(scale, dict) else set()
    position = {term: p for term, p in position_by_term(net).items() if term != ABSOLUTE or term in named}
    apart = {id(p) for params in position.values() for p in params}
    kept = set(getattr(net, "no_weight_decay", set)())
    groups = param_groups_weight_decay(net, optim.weight_decay, no_weight_decay_list=kept)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in apart]
        group["name"] = "decay" if group["weight_decay"] else "no_decay"
    if not isinstance(scale, dict):
        everything = [p for params in position.values() for p in params]
        groups.append({"params": everything, "weight_decay": 0.0, "lr": optim.lr * scale, "name": "position"})
    else:
        for term, params in position.items():
            lr = optim.lr * scale.get(term, 1.0)
            groups.append({"params": params, "weight_decay": 0.0, "lr": lr, "name": f"position_{term}"})
    return [group for group in groups if group["params"]]


def position_by_term(net: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Trainable position parameters by term, each once, ``prefix`` and the absolute ``pos_embed`` among them."""
    found: dict[int, tuple[str, nn.Parameter]] = {
        id(p): (name.split(".")[0], p)
        for module in net.modules()
        if isinstance(module, PositionTerms)
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    grouped: dict[str, list[nn.Parameter]] = {}
    for term, p in found.values():
        grouped.setdefault(term, []).append(p)
    absolute = [p for name, p in net.named_parameters() if name.split(".")[-1] == ABSOLUTE and p.requires_grad]
    return {**grouped, ABSOLUTE: absolute} if absolute else grouped
