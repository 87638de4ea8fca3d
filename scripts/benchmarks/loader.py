"""The steps of a Lightning run from its loader, against batches already in memory."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch.utils.data import DataLoader

from benchmarks.pairs import Run, paired, ratio_rows
from vitrel.training.config import parse
from vitrel.training.data import PictureDataModule, normalize
from vitrel.training.model import build_model
from vitrel.training.sources import find_source
from vitrel.training.task import ClassificationTask
from vitrel.training.transforms import InputConfig

CONFIGS = Path(__file__).parents[2] / "configs"


def loader(argv: list[str], steps: int, repeats: int, sync: Run) -> list[dict[str, Any]]:
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

    seconds = paired({"memory": lambda: fit(Memory), "loader": lambda: fit(PictureDataModule)}, repeats, sync)
    return ratio_rows(seconds, "memory")
