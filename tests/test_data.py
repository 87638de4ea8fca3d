"""The data module: batches as the model gets them, order and draws by seed, shares of processes."""

import pytest
import pytorch_lightning as pl
import torch

from vitrel.training.data import PictureDataModule, normalize
from vitrel.training.images import DataError
from vitrel.training.settings import DataConfig
from vitrel.training.transforms import InputConfig

INPUTS = InputConfig((8, 8), (0.1, 0.2, 0.3), (0.5, 0.4, 0.2))


def module(seed=0, **settings):
    data = PictureDataModule(DataConfig(**{"name": "fake", "batch_size": 16, **settings}), INPUTS, seed=seed)
    data.prepare_data()
    data.setup("fit")
    return data


def test_pictures_travel_as_bytes_and_are_normalised_in_the_batch():
    pictures, labels = next(iter(module().train_dataloader()))
    assert pictures.dtype == torch.uint8
    assert pictures.shape == (16, 3, 8, 8)
    assert labels.dtype == torch.int64
    out, same = module().on_after_batch_transfer((pictures, labels), 0)
    assert out.dtype == torch.float32
    assert same is labels
    for channel, (mean, std) in enumerate(zip(INPUTS.mean, INPUTS.std, strict=True)):
        expected = (pictures[:, channel].double() / 255 - mean) / std
        torch.testing.assert_close(out[:, channel].double(), expected, atol=1e-6, rtol=0)


def test_normalising_does_not_touch_the_pictures():
    pictures = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    assert normalize(pictures, INPUTS)[0, :, 0, 0].tolist() == pytest.approx([1.8, 2.0, 3.5])
    assert (pictures == 255).all()


def test_the_last_batch_is_used_in_training_and_evaluation():
    data = module(fake_images=35)
    assert [len(y) for _, y in data.train_dataloader()] == [16, 16, 3]
    assert [len(y) for _, y in data.val_dataloader()] == [16, 16, 3]


def test_evaluation_keeps_the_order_and_training_does_not():
    data = module(fake_images=64)
    labels = data.splits["val"].labels.tolist()
    assert torch.cat([y for _, y in data.val_dataloader()]).tolist() == labels
    train = data.splits["train"].labels.tolist()
    shuffled = torch.cat([y for _, y in data.train_dataloader()]).tolist()
    assert shuffled != train
    assert sorted(shuffled) == sorted(train)


def test_order_depends_on_seed_and_epoch_only():
    def epochs(seed, first):
        data = module(seed=seed, fake_images=64)
        loader = data.train_dataloader()
        result = []
        for epoch in range(first, 3):
            torch.rand(5)  # what else is drawn does not matter
            data.seed_order(epoch)
            result.append(torch.cat([y for _, y in loader]).tolist())
        return result

    straight = epochs(seed=0, first=0)
    assert straight[0] != straight[1] != straight[2]
    assert epochs(seed=0, first=1) == straight[1:]
    assert epochs(seed=1, first=0) != straight


def test_a_stage_opens_only_the_splits_it_needs():
    data = PictureDataModule(DataConfig(name="fake"), INPUTS)
    data.setup("test")
    assert set(data.splits) == {"test"}
    data.setup("fit")
    assert set(data.splits) == {"train", "val", "test"}


def test_a_damaged_file_is_named_by_a_worker_too(shared):
    root = shared / "cases" / "folders" / "one_truncated"
    data = module(name="folder", root=str(root), num_workers=1, batch_size=4)
    with pytest.raises(DataError, match=r"bear/06_broken\.jpg: cannot be read"):
        list(data.train_dataloader())


def test_processes_share_the_images_without_repeating_any(tmp_path):
    class Count(pl.LightningModule):
        def validation_step(self, batch, index):
            with open(tmp_path / f"{self.global_rank}", "a") as f:
                f.write(f"{len(batch[1])}\n")

    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_fork", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    data = PictureDataModule(DataConfig(name="fake", fake_images=35, batch_size=8), INPUTS)
    trainer.validate(Count(), datamodule=data, verbose=False)
    seen = [[int(n) for n in (tmp_path / rank).read_text().split()] for rank in ("0", "1")]
    assert seen == [[8, 8, 2], [8, 8, 1]]
