"""What a trained model makes of its test pictures without its terms, at other sizes, and class by class.

Every figure comes with the standard error of its difference to the whole model on the same pictures.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitrel.ablate import switchable, switched_off
from vitrel.attention import RelativeAttention2d
from vitrel.learned import LearnedTable
from vitrel.resize import RESIZE
from vitrel.stretched import Stretched
from vitrel.training.data import PictureDataModule, normalize
from vitrel.training.fileio import ConfigError
from vitrel.training.model import patch_pixels
from vitrel.training.transforms import InputConfig

Answers = NDArray[np.bool_]
Row = dict[str, Any]
RULES = tuple(rule for rule in RESIZE if rule != "crop")  # crop reads what clamp reads


class Study:
    """A trained model and the test pictures of its data.

    Args:
        net: A timm model; it stays as it is.
        data: The data module of the run, or one like it.
        device: Where to compute.
        at_most: Number of test pictures to take, evenly spread over the split; None for all.
    """

    def __init__(
        self, net: nn.Module, data: PictureDataModule, device: torch.device | str = "cpu", at_most: int | None = None
    ) -> None:
        self.net = copy.deepcopy(net).to(device).eval().requires_grad_(False)  # a copy is not compiled
        self.data, self.device, self.at_most = data, torch.device(device), at_most
        self.size = data.inputs.size

    @property
    def pictures(self) -> int:
        """How many pictures are taken."""
        return len(self._module(self.size).splits["test"])

    def check(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Sees that the model can take these sizes, before anything is evaluated.

        Raises:
            ConfigError: If it cannot.
        """
        for size in sizes:
            self._resized(size)

    def ablation(self) -> list[Row]:
        """Top-1 of the whole model, without each position term, and without all of them where there are several.

        Returns:
            Rows with ``off``, ``top1``, ``change``, ``standard_error`` (parts of 1) and ``pictures``; the whole model
            first, with nothing off.

        Raises:
            ConfigError: If the model has no position terms.
        """
        terms = switchable(self.net)
        if not terms:
            raise ConfigError("ablation: the model has no position terms to switch off; take one with model.rel_pos")
        ways: dict[str, Callable[[], AbstractContextManager[None]]] = {"nothing": nullcontext}
        ways.update({t: partial(switched_off, self.net, t) for t in terms})
        if len(terms) > 1:
            ways["all of them"] = partial(switched_off, self.net)
        right = self._right(self.net, self.size, ways)
        return [{"off": off, **_compared(answers, right["nothing"])} for off, answers in right.items()]

    def sizes(self, sizes: Sequence[tuple[int, int]]) -> list[Row]:
        """Top-1 at other input sizes under each rule by which tables are resized.

        Args:
            sizes: (rows, columns) in pixels.

        Returns:
            Rows with ``rows``, ``cols``, ``rule``, ``top1``, ``change``, ``standard_error`` (parts of 1) and
            ``pictures``; the trained size first. Where no table is resized the rule is ``none``.

        Raises:
            ConfigError: If the model cannot take a size.
        """
        nets = {size: self._resized(size) for size in sizes if size != self.size}
        base = self._right(self.net, self.size, {"": nullcontext})[""]
        rows = [{"rows": self.size[0], "cols": self.size[1], "rule": "trained size", **_compared(base, base)}]
        for size, by_rule in nets.items():
            for rule, net in by_rule.items():
                right = self._right(net, size, {"": nullcontext})[""]
                rows.append({"rows": size[0], "cols": size[1], "rule": rule, **_compared(right, base)})
        return rows

    def per_class(self) -> list[Row]:
        """Top-1 of each class, the lowest first: rows with ``class``, ``top1`` and ``pictures``.

        Classes without a test picture are left out.
        """
        right = self._right(self.net, self.size, {"": nullcontext})[""]
        split = self._module(self.size).splits["test"]
        labels = split.labels[split.indices]
        found = [(name, right[labels == i]) for i, name in enumerate(self.data.classes)]
        rows = [{"class": n, "top1": float(r.mean()), "pictures": len(r)} for n, r in found if len(r)]
        return sorted(rows, key=lambda row: row["top1"])

    def _resized(self, size: tuple[int, int]) -> dict[str, nn.Module]:
        """The model at another size, per rule that makes a difference to it."""
        check_patches(self.net, size)
        nets: dict[str, nn.Module] = {}
        for rule in RULES:
            net = copy.deepcopy(self.net)
            _set_rule(net, rule)
            before = _entries(net)
            try:
                net.set_input_size(img_size=size)  # type: ignore[operator]  # timm's
            except Exception as e:  # timm asserts, or has no such method
                reason = " ".join(str(e).split()) or type(e).__name__
                raise ConfigError(f"sizes: {size[0]}x{size[1]} px does not fit this model ({reason})") from None
            if _entries(net) == before and not any(isinstance(m, Stretched) for m in net.modules()):
                return {"none": net}
            nets[rule] = net
        return nets

    def _module(self, size: tuple[int, int]) -> PictureDataModule:
        inputs = replace(self.data.inputs, size=size)
        module = PictureDataModule(self.data.config, inputs, self.data.source)
        module.trainer = self.data.trainer
        module.splits = dict(self.data.splits)
        module.setup("test")
        split = module.splits["test"]
        if self.at_most is not None and len(split) > self.at_most:
            chosen = np.linspace(0, len(split) - 1, self.at_most).round().astype(int)
            module.splits["test"] = replace(split, indices=split.indices[chosen])
        return module

    @torch.no_grad()
    def _right(
        self, net: nn.Module, size: tuple[int, int], ways: Mapping[str, Callable[[], AbstractContextManager[None]]]
    ) -> dict[str, Answers]:
        """Which test pictures a model gets right, in each way of running it, in one pass over the pictures."""
        module = self._module(size)
        dtype = next(net.parameters()).dtype
        right: dict[str, list[torch.Tensor]] = {name: [] for name in ways}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a grid of .* reads relative positions beyond")  # that is the question
            for raw, labels in module.test_dataloader():
                pictures = normalize(raw.to(self.device), module.inputs).to(dtype)
                for name, way in ways.items():
                    with way():
                        right[name].append(net(pictures).argmax(-1).cpu() == labels.cpu())
        return {name: torch.cat(parts).numpy() for name, parts in right.items()}


def check_patches(net: nn.Module, size: tuple[int, int]) -> None:
    """Sees that a size (rows, columns) in pixels is one of whole patches.

    Raises:
        ConfigError: If it is not.
    """
    patch = patch_pixels(net) or (1, 1)
    if any(side % p for side, p in zip(size, patch, strict=True)):
        raise ConfigError(
            f"sizes: {size[0]}x{size[1]} px is not a multiple of the model's patch of {patch[0]}x{patch[1]} px"
        )


def sizes_around(inputs: InputConfig, net: nn.Module) -> list[tuple[int, int]]:
    """Sizes of three quarters, three halves and twice the model's own, in whole patches; none if it has no patches."""
    patch = patch_pixels(net)
    if patch is None or not hasattr(net, "set_input_size"):
        return []
    sides = [
        tuple(max(p, round(side * part / p) * p) for side, p in zip(inputs.size, patch, strict=True))
        for part in (0.75, 1.5, 2.0)
    ]
    return [(rows, cols) for rows, cols in dict.fromkeys(sides) if (rows, cols) != inputs.size]


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table to read: shares in percent."""
    percent = ("top1", "change", "standard_error")
    names = list(rows[0])
    cells = [[f"{100 * r[n]:+.2f}" if n == "change" else f"{100 * r[n]:.2f}" if n in percent else str(r[n])
              for n in names] for r in rows]  # fmt: skip
    head = [f"{n.replace('_', ' ')} %" if n in percent else n for n in names]
    widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
    text = [isinstance(rows[0][n], str) for n in names]
    return "\n".join(
        "  ".join(c.ljust(n) if left else c.rjust(n) for c, n, left in zip(row, widths, text, strict=True)).rstrip()
        for row in [head, *cells]
    )


def _compared(right: Answers, base: Answers) -> Row:
    difference = right.astype(float) - base
    error = float(difference.std(ddof=1)) / math.sqrt(len(right)) if len(right) > 1 else math.nan
    return {"top1": float(right.mean()), "change": float(difference.mean()), "standard_error": error,
            "pictures": len(right)}  # fmt: skip


def _set_rule(net: nn.Module, rule: str) -> None:
    for module in net.modules():
        if isinstance(module, RelativeAttention2d):
            module._spec = replace(module._spec, resize=rule)
            module.position_terms.rel_pos = module._spec
        elif isinstance(module, (LearnedTable, Stretched)):
            module.resize = rule


def _entries(net: nn.Module) -> list[torch.Size]:
    return [p.shape for m in net.modules() if isinstance(m, LearnedTable) for p in m.parameters()]
