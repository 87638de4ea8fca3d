"""Callbacks: averaging by hand, maps on disk and in W&B, one line per epoch, seeds per epoch."""

import csv
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import timm
import torch
from PIL import Image

import vitrel
from vitrel.page import report
from vitrel.probe import probes
from vitrel.training import pictures as pictures_room
from vitrel.training.callbacks import EpochSeed, WeightEMA, duration
from vitrel.training.config import parse
from vitrel.training.fileio import ConfigError
from vitrel.training.pictures import render
from vitrel.training.run import run


def test_duration():
    expected = ["0 s", "59 s", "1 min 01 s", "59 min 59 s", "2 h 07 min"]
    assert [duration(s) for s in (0.4, 59, 61, 3599, 7620)] == expected


def test_a_figure_becomes_eight_bit_rgb():
    picture = render(vitrel.plot_bias_maps({"blocks.0": torch.eye(3)[None]}))
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20


class Toy(pl.LightningModule):
    """One weight that grows by 1 each step, and two buffers that count and follow the steps."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("twice", torch.zeros(()), persistent=False)
        self.seen = []

    def training_step(self, batch, index):
        self.steps += 1
        self.twice.copy_(2 * self.steps)
        return -self.weight.sum()

    def validation_step(self, batch, index):
        self.seen.append((float(self.weight.detach()), int(self.steps), float(self.twice)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def toy_trainer(epochs, **settings):
    return pl.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=1, **settings,
    )  # fmt: skip


def test_the_average_follows_from_the_first_step_and_is_what_validation_sees():
    task, ones = Toy(), torch.utils.data.DataLoader(torch.ones(3))
    toy_trainer(2, callbacks=[WeightEMA(0.2)]).fit(task, ones, torch.utils.data.DataLoader(torch.ones(1)))
    averages, average = [], 0.0
    for n, weight in enumerate([1, 2, 3, 4, 5, 6]):
        decay = min(0.2, (1 + n) / (10 + n))
        average = weight if n == 0 else decay * average + (1 - decay) * weight
        averages.append(average)
    assert task.seen == [(0.0, 0, 0.0), (pytest.approx(averages[2]), 3, 6.0), (pytest.approx(averages[5]), 6, 12.0)]
    assert float(task.weight.detach()) == pytest.approx(averages[5])


def test_an_average_that_begins_later_is_not_seen_before(tmp_path):
    task, ones = Toy(), torch.utils.data.DataLoader(torch.ones(3))
    average, saved = WeightEMA(0.2, start=1), []
    keep = pl.callbacks.LambdaCallback(
        on_train_epoch_end=lambda trainer, module: (
            trainer.save_checkpoint(tmp_path / f"{len(saved)}.ckpt") or saved.append(tmp_path / f"{len(saved)}.ckpt")
        )
    )
    toy_trainer(2, callbacks=[average, keep]).fit(task, ones, torch.utils.data.DataLoader(torch.ones(1)))
    mean = 4.0  # the weight after the first step of the second epoch
    for n, weight in ((1, 5), (2, 6)):
        decay = min(0.2, (1 + n) / (10 + n))
        mean = decay * mean + (1 - decay) * weight
    assert task.seen == [(0.0, 0, 0.0), (3.0, 3, 6.0), (pytest.approx(mean), 6, 12.0)]
    first, second = map(torch.load, saved)
    assert float(first["state_dict"]["weight"]) == 3
    assert "averaging_state" not in first
    assert float(second["state_dict"]["weight"]) == pytest.approx(mean)
    assert float(second["current_model_state"]["weight"]) == 6

    task, average = Toy(), WeightEMA(0.2, start=1)
    toy_trainer(2, callbacks=[average]).fit(task, ones, torch.utils.data.DataLoader(torch.ones(1)), ckpt_path=saved[0])
    assert task.seen[-1] == (pytest.approx(mean), 6, 12.0)


def test_an_average_that_would_never_begin_is_refused(tiny):
    with pytest.raises(
        ConfigError, match=r"optim.ema_start: expected 0 or more, and less than trainer.max_epochs, got"
    ):
        run(tiny("--optim.ema_decay", "0.9", "--optim.ema_start", "1"))


def test_every_epoch_and_rank_has_its_own_seed():
    def draws(seed, epoch, rank):
        class Trainer:
            current_epoch, global_rank = epoch, rank

        EpochSeed(seed).on_train_epoch_start(Trainer, None)
        return (float(torch.rand(())), float(np.random.rand()), random.random())  # noqa: NPY002

    table = {key: draws(*key) for key in [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)]}
    for column in zip(*table.values(), strict=True):
        assert len(set(column)) == 4
    assert draws(0, 1, 0) == table[0, 1, 0]


def test_maps_are_drawn_each_k_epochs_and_at_the_end(tiny, capsys, monkeypatch):
    drawn = []
    real = pictures_room.BiasMaps._draw
    monkeypatch.setattr(
        pictures_room.BiasMaps, "_draw", lambda self, trainer, *rest: drawn.append(trainer.current_epoch)
        or real(self, trainer, *rest),
    )  # fmt: skip
    config = tiny("--data.name", "fake", "--trainer.max_epochs", "5", "--logger.maps_every", "2")
    folder = Path(run(config)["folder"])
    assert drawn == [1, 3, 4]
    assert sorted(p.name for p in (folder / "bias_maps").iterdir()) == ["blocks.0.png", "blocks.1.png", "heads.csv"]
    assert np.asarray(Image.open(folder / "bias_maps" / "blocks.0.png")).shape[2] == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 5
    assert re.fullmatch(
        r"epoch 5/5  train/loss \d\.\d{4}  val/loss \d\.\d{4}  val/acc \d\.\d{4}  \d+ s spent  0 s left", lines[-1]
    )
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["maps_absmax/blocks_00"]]
    assert len(rows) == len(drawn)
    for row in rows:
        assert sum(float(row[f"heads_share_{term}/blocks_01"]) for term in ("bias", "content")) == pytest.approx(1)
    model = timm.create_model(f"local-dir:{folder / 'model'}", pretrained=True)
    with (folder / "bias_maps" / "heads.csv").open() as file:
        assert [(r["block"], r["head"]) for r in csv.DictReader(file)] == [
            (f"blocks.{b}", str(h)) for b in range(2) for h in range(model.blocks[0].attn.num_heads)
        ]


def test_the_settings_lie_beside_the_results(tiny):
    config = tiny("--data.name", "fake", "--model.rel_pos.preset", "txl")
    folder = Path(run(config)["folder"])
    assert parse(["--config", str(folder / "config.yaml")]) == config


def test_an_offline_run_holds_every_figure_and_one_set_of_maps_per_drawn_epoch(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny("--data.name", "fake", "--trainer.max_epochs", "2", "--logger.maps_every", "1",
                  "--trainer.log_every_n_steps", "1")  # fmt: skip
    run(config)
    printed = re.search(r"wandb sync (\S+)", capsys.readouterr().out)[1]
    (found,) = (tmp_path / "runs" / "wandb").glob("offline-run-*")
    assert Path(printed) == found
    wandb = Path(sys.executable).with_name("wandb")
    records = subprocess.run(
        [wandb, "leet", "inspect", "--json", *found.glob("*.wandb")], capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in records.stdout.splitlines()]
    history = [row["history"]["item"] for row in rows if row["type"] == "history"]
    for name in ("train/loss", "train/acc", "val/loss", "val/acc", "val/acc5"):
        assert len([1 for item in history if name in item]) == 2, name
    assert any(name.startswith("lr-AdamW") for item in history for name in item)
    assert [1 for item in history if "test/acc" in item] == [1]
    settings = next(row["run"]["config"]["update"] for row in rows if row["type"] == "run" and "config" in row["run"])
    assert settings["optim"]["position_lr_scale"] == 10
    drawn = [item for item in history if "maps/blocks_00._type" in item]
    assert [item["trainer/global_step"] for item in drawn] == [item["trainer/global_step"] for item in history
                                                               if "val/acc" in item]  # fmt: skip
    for item in drawn:  # pictures and numbers of a drawing are one step of the slider
        assert {"maps/blocks_01._type", "heads_distance/blocks_00", "heads_share_bias/blocks_01"} <= set(item)
    for name, rows, columns in (("ablation", 4, "off"), ("sizes", 1 + 3 * 3, "rows")):
        (table,) = (found / "files/media/table/tables").glob(f"{name}_*.json")
        stored = json.loads(table.read_text())
        assert (stored["columns"][0], len(stored["data"])) == (columns, rows)
        assert stored["data"][0][stored["columns"].index("change")] == 0
    pictures = sorted(p.name for p in (found / "files/media/images/maps").iterdir())
    assert [sum(p.startswith(f"blocks_0{b}_") for p in pictures) for b in (0, 1)] == [2, 2]
    picture = np.asarray(Image.open(found / "files/media/images/maps" / pictures[0]))
    assert picture.max() == 255  # a float picture would have come out black
    assert len(np.unique(picture)) > 20


@pytest.mark.parametrize(
    ("scheme", "precision"), [("rope", "bf16-true"), ("irpe_qkv", "32"), ("txl", "bf16-true"), ("none", "32")]
)
def test_every_scheme_is_drawn_while_it_trains(tiny, scheme, precision):
    config = tiny("--data.name", "fake", "--logger.maps_every", "1", "--model.rel_pos", scheme,
                  "--trainer.precision", precision)  # fmt: skip
    folder = Path(run(config)["folder"])
    assert (folder / "bias_maps" / "blocks.1.png").is_file() == (scheme != "none")
    assert ("heads_distance/blocks_01" in (folder / "metrics.csv").read_text()) == (scheme != "none")


def test_drawing_changes_nothing_of_a_run_and_fails_on_no_numbers(tiny):
    options = (
        "--data.name",
        "fake",
        "--model.rel_pos",
        "txl",
        "--data.augment",
        "crop_flip",
        "--trainer.max_epochs",
        "2",
    )
    drawn, bare = (run(tiny(*options, "--logger.maps_every", every)) for every in ("1", "0"))
    assert drawn["test/loss"] == bare["test/loss"]
    net = timm.create_model(f"local-dir:{drawn['folder']}/model", pretrained=True)
    for block, bad in zip(net.blocks, (float("nan"), float("inf")), strict=True):
        torch.nn.init.constant_(block.attn.position.query.table_h, bad)
    seen = probes(net, torch.randn(1, 3, 8, 8))
    for name, maps in vitrel.term_maps(net, seen).items():
        assert render(vitrel.plot_term_maps(maps, name)).shape[2] == 3
    assert len(vitrel.head_numbers(net, seen)) == 4
    assert "blocks.1" in report(net, seen, [np.zeros((8, 8, 3), dtype=np.uint8)])
