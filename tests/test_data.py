"""The data module: batches as the model gets them, order and draws by seed, shares of processes."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from vitrel.training.callbacks import EpochSeed
from vitrel.training.config import from_dict
from vitrel.training.data import PictureDataModule, check_classes, normalize
from vitrel.training.fileio import read_yaml
from vitrel.training.images import DataError, decode
from vitrel.training.run import main, run
from vitrel.training.saved import evaluate
from vitrel.training.settings import DataConfig
from vitrel.training.sources import Source, Split
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
    with pytest.raises(DataError) as e:
        list(data.train_dataloader())
    assert str(e.value).startswith(f"{root}/train/bear/06_broken.jpg: cannot be read as an image (")
    assert "Traceback" not in str(e.value)


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


class OnePicture(Source):
    """Eight times the same picture; leaves a file where it was prepared."""

    def __init__(self, folder):
        self.folder, self.classes = folder, ["a", "b"]

    def prepare(self):
        with open(self.folder / "prepared", "a") as f:
            f.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        (self.folder / "done").touch()

    def split(self, name):
        assert (self.folder / "done").exists()
        picture = np.random.default_rng(0).integers(1, 256, (1, 8, 8, 3), dtype=np.uint8)
        return Split(np.repeat(picture, 8, axis=0), np.zeros(8, np.int64), np.arange(8))


class Keep(pl.LightningModule):
    """Keeps the pictures that it is given."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.weight = folder, torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, index):
        torch.save(batch[0], self.folder / f"{self.current_epoch}-{self.global_rank}-{index}.pt")
        return self.weight * 0

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_augmentation_differs_between_epochs_workers_and_processes_and_repeats(
    tmp_path, monkeypatch, processes, workers
):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")  # what seed_everything sets
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    runs = []
    for seed in (0, 0, 1) if processes == 1 else (0, 0):
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        several = {"devices": processes, "strategy": "ddp_fork" if processes > 1 else "auto"}
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, callbacks=[EpochSeed(seed)], **several,
        )  # fmt: skip
        config = DataConfig(batch_size=2, num_workers=workers, augment="crop_flip", cutout=0.5, crop_padding=4)
        trainer.fit(Keep(folder), datamodule=PictureDataModule(config, INPUTS, OnePicture(folder), seed=seed))
        assert len((folder / "prepared").read_text().split()) == 1  # by one process, before any other reads
        runs.append([torch.load(path) for path in sorted(folder.glob("*.pt"))])
    drawn = torch.cat(runs[0])
    assert drawn.shape == (24, 3, 8, 8)
    assert len({picture.numpy().tobytes() for picture in drawn}) >= 22  # of 81 crops, 2 flips and 49 holes
    assert torch.equal(drawn, torch.cat(runs[1]))
    assert not any(torch.equal(drawn, torch.cat(other)) for other in runs[2:])


@pytest.mark.slow
def test_spawned_workers_draw_what_forked_ones_do():
    drawn = []
    for method in ("fork", "spawn"):
        data = module(fake_images=12, batch_size=4, num_workers=1, augment="crop_flip", cutout=0.5)
        loader = data.train_dataloader()
        loader.multiprocessing_context = method
        drawn.append(torch.cat([pictures for pictures, _ in loader]))
    assert len({picture.numpy().tobytes() for picture in drawn[0]}) == 12
    assert torch.equal(drawn[0], drawn[1])


def test_classes_of_another_order_or_number_are_refused():
    trained = {"PictureDataModule": module().state_dict()}
    names = trained["PictureDataModule"]["classes"]
    check_classes("x.ckpt", trained, list(names))
    check_classes("x.ckpt", {}, ["cat", "dog"])  # a checkpoint that does not say
    with pytest.raises(DataError, match=r"x\.ckpt was trained on 10 classes, the data have 2; give its own data"):
        check_classes("x.ckpt", trained, ["cat", "dog"])
    with pytest.raises(DataError, match=r"x\.ckpt was trained with 'class_3' as class 3, in the data it is 'class_4'"):
        check_classes("x.ckpt", trained, [*names[:3], names[4], names[3], *names[5:]])


IMAGES = {
    "animated_3frames.gif": True, "cmyk_adobe_red.jpg": True, "exif_orientation6.jpg": True,
    "gray16_full_ramp.png": True, "gray_8bit.jpg": True, "gray_alpha.png": True, "huge_10000x10000_1bit.png": False,
    "one_row_1x64.png": True, "palette_alpha_bytes.png": True, "png_named.jpg": True, "rgba_half_transparent.png": True,
    "truncated_half.jpg": False, "zero_byte.jpg": False,
}  # fmt: skip


@pytest.mark.parametrize(("augment", "workers"), [("resized_crop", 0), ("crop_flip", 1)])
def test_an_odd_picture_in_a_class_folder_reaches_the_model_or_is_named(shared, tmp_path, augment, workers):
    cases = shared / "cases" / "images"
    assert {p.name for p in cases.iterdir()} == set(IMAGES)
    for split in ("train", "val"):
        for label in "ab":
            (tmp_path / split / label).mkdir(parents=True)
            Image.new("RGB", (40, 40), "blue").save(tmp_path / split / label / "plain.png")
    for name, readable in IMAGES.items():
        if readable and workers:  # a worker only makes a difference to how an error arrives
            continue
        for split in ("train", "val"):
            odd = tmp_path / split / "b" / name
            odd.write_bytes((cases / name).read_bytes())
            data = module(name="folder", root=str(tmp_path), augment=augment, num_workers=workers, color_jitter=0.2)
            loader = data.train_dataloader() if split == "train" else data.val_dataloader()
            if readable:
                ((pictures, labels),) = list(loader)
                assert (pictures.shape, pictures.dtype) == ((3, 3, 8, 8), torch.uint8)
                assert sorted(labels.tolist()) == [0, 1, 1]
            else:
                with pytest.raises(DataError) as e:
                    list(loader)
                assert str(e.value).startswith(f"{odd}: ")
            odd.unlink()


def test_grey_is_normalised_with_the_statistics_of_each_channel(shared):
    content = (shared / "cases" / "images" / "gray_8bit.jpg").read_bytes()
    picture = decode(content, "x")
    alone = torch.from_numpy(picture).permute(2, 0, 1)[None]
    out = normalize(alone, INPUTS)
    for channel, (mean, std) in enumerate(zip(INPUTS.mean, INPUTS.std, strict=True)):
        torch.testing.assert_close(out[0, channel], (alone[0, 0] / 255 - mean) / std)


def test_a_run_says_what_it_left_out_and_what_it_was_tested_on(tiny, shared, capsys):
    root = str(shared / "cases" / "folders" / "one_truncated")
    options = ["--data.name", "folder", "--data.root", root, "--data.skip_damaged", "true"]
    results = run(tiny(*options))
    assert (results["skipped_files"], results["tested_on"]) == (1, "val")
    written = json.loads((Path(results["folder"]) / "results.json").read_text())
    assert written == results
    out = capsys.readouterr().out
    assert "damaged pictures left out: 1\n" in out
    assert f"validation accuracy {results['test/acc']:.4f}" in out
    results = run(tiny("--data.name", "fake"))
    assert (results["skipped_files"], results["tested_on"]) == (0, "test")


def test_a_damaged_picture_ends_a_run_in_one_line_that_names_it(tmp_path, shared, monkeypatch, capsys):
    root = str(shared / "cases" / "folders" / "one_truncated")
    monkeypatch.chdir(tmp_path)
    for workers in ("0", "1"):
        options = ["--data.name", "folder", "--data.root", root, "--data.num_workers", workers, *SMALL]
        assert main(options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {root}/train/bear/06_broken.jpg: cannot be read as an image (")


SMALL = [
    *("--model.img_size", "8", "--model.patch_size", "4", "--model.depth", "1", "--trainer.accelerator", "cpu"),
    *("--trainer.max_epochs", "1", "--logger.maps_every", "0", "--data.batch_size", "4"),
]


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("stray_files", ["--data.val_size", "5000"], None),  # there is a val split
        (None, ["--data.val_size", "5000"], "error: data.val_size: 5000.0 of 1437 training images cannot be held out"),
        ("nowhere", [], "error: no pictures under "),
    ],
)
def test_data_that_cannot_be_split_are_found_before_a_run_folder_is_made(
    tmp_path, shared, monkeypatch, capsys, case, options, message
):
    monkeypatch.chdir(tmp_path)
    data = ["--data.name", "folder", "--data.root", str(shared / "cases" / "folders" / case)] if case else []
    status = main([*data, *SMALL, *options])
    if message is None:
        assert status == 0
        return
    assert status == 2
    assert capsys.readouterr().err.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_leaves_settings_that_can_be_run_again(tiny):
    first = run(tiny("--data.name", "fake"))
    second = run(tiny("--data.name", "fake", "--trainer.max_epochs", "2", "--ckpt_path", "last"))
    assert second["epochs"] == 2
    stored = from_dict(read_yaml(Path(second["folder"]) / "config.yaml"))
    assert stored.ckpt_path is None
    again = run(stored)
    assert again["epochs"] == 2
    assert len({r["folder"] for r in (first, second, again)}) == 3


def test_data_of_other_classes_are_refused(tiny, tmp_path, shared):
    cases = shared / "cases" / "folders"
    first = run(tiny("--data.name", "folder", "--data.root", str(cases / "stray_files")))
    for split in ("train", "val"):
        shutil.copytree(cases / "stray_files" / split, tmp_path / "other" / split)
        (tmp_path / "other" / split / "apple").rename(tmp_path / "other" / split / "cherry")
    message = r"ckpt was trained with 'apple' as class 0, in the data it is 'bear'"
    with pytest.raises(DataError, match=message):
        evaluate(first["folder"], root=str(tmp_path / "other"))
    with pytest.raises(DataError, match=message):
        run(tiny("--data.name", "folder", "--data.root", str(tmp_path / "other"), "--ckpt_path", "last",
                 "--trainer.max_epochs", "2"))  # fmt: skip
    assert [p.name for p in Path(first["folder"]).parent.iterdir()] == ["version_0"]
    assert evaluate(first["folder"], root=str(cases / "stray_files"))["test/acc"] == pytest.approx(first["test/acc"])


NO_NETWORK = """
import socket, sys

def refuse(self, address):
    if self.family == socket.AF_UNIX:  # how loader workers hand tensors over
        return connect(self, address)
    asked.append(address)
    raise OSError(f"no network: {address}")

def ask(name, *rest, **kwargs):
    asked.append(name)
    raise socket.gaierror(f"no network: {name}")

asked, connect = [], socket.socket.connect
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = socket.gethostbyname = ask
import vitrel.training.run as room
options = sys.argv[1:]
assert room.main(["--data.name", "fake", "--data.augment", "crop_flip", "--data.num_workers", "1", *options]) == 0
assert asked == [], asked
"""


@pytest.mark.slow
def test_importing_and_training_ask_no_network(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_ALBUMENTATIONS_UPDATE", "WANDB_API_KEY")}
    ended = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:albumentations", "-c", NO_NETWORK, *SMALL], cwd=tmp_path,
        env={**environ, "WANDB_MODE": "off", "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr
    assert "test accuracy" in ended.stdout
