#!/usr/bin/env python
"""Times things side by side in one run and prints the ratios as Markdown: medians of interleaved repeats.

python scripts/benchmark.py --what train --presets bias txl shaw          # a training step against rel_pos none
python scripts/benchmark.py --what loader --config cifar100.yaml --data.root DIR   # an epoch against tensors in memory
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
import timm
import torch
from torch.utils.data import DataLoader

from vitrel.relpos import PRESETS
from vitrel.training.config import parse
from vitrel.training.data import PictureDataModule, normalize
from vitrel.training.model import build_model
from vitrel.training.run import guarded
from vitrel.training.sources import find_source
from vitrel.training.task import ClassificationTask
from vitrel.training.transforms import InputConfig

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def paired(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, taken in turn, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if count:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def print_ratios(seconds: dict[str, list[float]], base: str) -> None:
    """One row per name: the median, and the ratio to ``base`` pair by pair (median, smallest and largest)."""
    print(f"| {base} = 1 | seconds | ratio | from | to |\n|---|---|---|---|---|")
    for name, own in seconds.items():
        ratios = sorted(a / b for a, b in zip(own, seconds[base], strict=True))
        cells = (statistics.median(own), statistics.median(ratios), ratios[0], ratios[-1])
        print(f"| {name} | " + " | ".join(f"{c:.3f}" for c in cells) + " |")


def train(presets: list[str], arch: str, batch: int, repeats: int) -> None:
    """A forward and backward pass of a batch."""
    size = timm.get_pretrained_cfg(arch).input_size
    pictures, labels = torch.randn(batch, *size), torch.randint(0, 100, (batch,))

    def step(name: str) -> Callable[[], object]:
        model = timm.create_model(arch, num_classes=100, rel_pos=name)
        return lambda: torch.nn.functional.cross_entropy(model(pictures), labels).backward()

    print_ratios(paired({name: step(name) for name in ["none", *presets]}, repeats), "none")


def loader(argv: list[str], steps: int, repeats: int) -> None:
    """``steps`` steps of the Lightning run of a config, from its loader and from batches already in memory."""
    config = parse(argv, [CONFIGS])
    source = find_source(config.data)
    net = build_model(config.model, len(source.classes))
    inputs = InputConfig.of(net, config.data)
    data = PictureDataModule(config.data, inputs, source)
    data.setup("fit")
    batches = [(normalize(x, inputs), y) for (x, y), _ in zip(data.train_dataloader(), range(steps), strict=False)]

    class Memory(PictureDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(batches, batch_size=None)

        def on_after_batch_transfer(self, batch: object, dataloader_idx: int) -> object:
            return batch

    def fit(kind: type[PictureDataModule]) -> None:
        module = kind(config.data, inputs, source)
        module.splits = data.splits
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(
            max_epochs=1, limit_train_batches=steps, limit_val_batches=0, enable_model_summary=False, **quiet
        )
        trainer.fit(ClassificationTask(config.as_dict(), len(source.classes), net), datamodule=module)

    print_ratios(paired({"memory": lambda: fit(Memory), "loader": lambda: fit(PictureDataModule)}, repeats), "memory")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["train", "loader"], default="train")
    parser.add_argument("--presets", nargs="+", default=[p for p in PRESETS if p != "none"], help="for train")
    parser.add_argument("--arch", default="vitrel_micro_patch4_32", help="for train")
    parser.add_argument("--batch", type=int, default=64, help="for train")
    parser.add_argument("--steps", type=int, default=100, help="for loader")
    parser.add_argument("--repeats", type=int, default=10)
    args, rest = parser.parse_known_args()
    if args.what == "loader":
        return guarded(lambda: loader(rest, args.steps, args.repeats))
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        train(args.presets, args.arch, args.batch, args.repeats)
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error).splitlines()[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
