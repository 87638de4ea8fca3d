"""The data module: pictures of a source, transformed, in batches that are normalised on the device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vitrel.training.images import DataError
from vitrel.training.settings import DataConfig
from vitrel.training.sources import Source, Split, SplitName, find_source
from vitrel.training.stack import StackedPictures, cell
from vitrel.training.transforms import InputConfig, PictureTransform, eval_transform, train_transform


class PictureDataset(Dataset[tuple[Tensor, int]]):
    """A split with its transform: pairs of a (3, h, w) uint8 tensor and a class index."""

    def __init__(self, split: Split, transform: PictureTransform) -> None:
        self.split, self.transform = split, transform

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        i = int(self.split.indices[index])
        return self.transform(self.split.pictures[i]), int(self.split.labels[i])


class PictureDataModule(pl.LightningDataModule):
    """Loaders of one data set.

    ``prepare_data`` (one process) downloads, ``setup`` (every process) opens the splits that the stage needs.
    Validation and test are shared among processes without repeating an image, so that their figures do not depend on
    how many processes there are.

    Args:
        config: The data settings.
        inputs: What the model expects.
        source: The data set; found by the settings if not given.
        seed: Seed of the order of the training images.
    """

    def __init__(self, config: DataConfig, inputs: InputConfig, source: Source | None = None, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.order = torch.Generator()
        self._seeded: int | None = None
        self.config, self.inputs = config, inputs
        self.picture = cell(inputs, config.stack)  # what one picture has to be
        self.source = source or find_source(config)
        self.splits: dict[SplitName, Split] = {}

    @property
    def classes(self) -> list[str]:
        """Class names in the order of the labels."""
        return self.source.classes

    def prepare_data(self) -> None:
        self.source.prepare()

    def state_dict(self) -> dict[str, Any]:
        """The classes, for a checkpoint: what its outputs stand for."""
        return {"classes": list(self.classes)}

    def setup(self, stage: str) -> None:
        needed: dict[str, list[SplitName]] = {"fit": ["train", "val"], "validate": ["val"], "test": ["test"]}
        for name in needed.get(stage, ["test"]):
            if name not in self.splits:
                self.splits[name] = self.source.split(name)

    def seed_order(self, epoch: int) -> None:
        """Seeds order and loader workers of an epoch, once: a resumed epoch starts as it would have without a stop."""
        if self._seeded != epoch:
            self._seeded = epoch
            self.order.manual_seed(self._order_seed(epoch))

    def names_of_batch(self, epoch: int, index: int) -> list[str]:
        """The training pictures that this process has read as batch ``index`` of an epoch; the loader is not used."""
        loader: Any = self.trainer.train_dataloader if self.trainer else None
        split = self.splits["train"]
        self.order.manual_seed(self._order_seed(epoch))
        torch.empty((), dtype=torch.int64).random_(generator=self.order)  # the loader's own draw, for its workers
        batch = next(itertools.islice(loader.batch_sampler, index, None))
        names, root = getattr(split.pictures, "names", None), getattr(split.pictures, "root", None)
        indices = [int(split.indices[i]) for i in batch]
        return [f"{root}/{names[i]}" if names else f"picture {i} of {self.config.name}" for i in indices]

    def _order_seed(self, epoch: int) -> int:
        return int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        self._seeded = None
        # Lightning asks before a resumed run has counted its last epoch as completed.
        progress = self.trainer.fit_loop.epoch_progress.current if self.trainer else None
        self.seed_order(getattr(progress, "processed", 0))
        pictures = PictureDataset(self.splits["train"], train_transform(self.picture, self.config))
        return self._loader(self._stacked(pictures), shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._eval_loader("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """uint8 (B, 3, h, w) to normalised pictures of the model's type; a quarter of the bytes have been moved."""
        pictures, labels = batch
        module = self.trainer.lightning_module if self.trainer else None
        dtype = module.dtype if module is not None and isinstance(module.dtype, torch.dtype) else torch.float32
        return normalize(pictures, self.inputs).to(dtype), labels

    def eval_dataset(self, name: SplitName) -> Dataset[tuple[Tensor, int]]:
        """An open split as evaluation sees it: a (3, h, w) uint8 tensor and a class index each."""
        return self._stacked(PictureDataset(self.splits[name], eval_transform(self.picture)), fixed=True)

    def _eval_loader(self, name: SplitName) -> DataLoader[tuple[Tensor, int]]:
        dataset = self.eval_dataset(name)
        sampler = None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            sampler = UnrepeatedDistributedSampler(dataset, shuffle=False)
        return self._loader(dataset, sampler=sampler)

    def _stacked(self, pictures: PictureDataset, fixed: bool = False) -> Dataset[tuple[Tensor, int]]:
        return pictures if self.config.stack == 1 else StackedPictures(pictures, self.config.stack, fixed)

    def _loader(
        self, dataset: Dataset[tuple[Tensor, int]], shuffle: bool = False, sampler: Sampler[int] | None = None
    ) -> DataLoader[tuple[Tensor, int]]:
        device = self.trainer.strategy.root_device.type if self.trainer else "cpu"
        workers = self.config.num_workers
        if workers is None:
            # Beside a model that trains on the CPU, loader processes only take its cores away.
            workers = 0 if device == "cpu" else min(8, os.cpu_count() or 1)
        return DataLoader(
            dataset,
            batch_size=self.config.batch_size,
            shuffle=shuffle,
            sampler=sampler,
            generator=self.order if shuffle else None,
            num_workers=workers,
            pin_memory=device == "cuda",
        )


def normalize(pictures: Tensor, inputs: InputConfig) -> Tensor:
    """uint8 (B, 3, h, w) to float32 with the mean and standard deviation of ``inputs`` taken out."""
    mean = torch.tensor(inputs.mean, device=pictures.device).view(1, 3, 1, 1)
    std = torch.tensor(inputs.std, device=pictures.device).view(1, 3, 1, 1)
    return pictures.float().div_(255).sub_(mean).div_(std)


def check_classes(where: str | Path, checkpoint: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Refuses data whose classes are not those of a checkpoint, in its order.

    Args:
        where: What an error calls the checkpoint.
        checkpoint: What is in it.
        classes: The classes of the data.

    Raises:
        DataError: Naming the first class that differs.
    """
    trained = checkpoint.get(PictureDataModule.__qualname__, {}).get("classes", classes)
    if len(trained) != len(classes):
        raise DataError(
            f"{where} was trained on {len(trained)} classes, the data have {len(classes)}; give its own data"
        )
    for label, (then, now) in enumerate(zip(trained, classes, strict=True)):
        if then != now:
            raise DataError(
                f"{where} was trained with {then!r} as class {label}, in the data it is {now!r}; give its own data, or"
                " name the class folders as they were"
            )
