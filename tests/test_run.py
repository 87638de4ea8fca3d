"""Whole runs: what they leave, that they repeat, resume and agree between processes, and how mistakes end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import timm
import torch

from vitrel.relpos import PRESETS
from vitrel.training.callbacks import EpochSeed
from vitrel.training.data import PictureDataModule
from vitrel.training.fileio import ConfigError
from vitrel.training.run import main, run
from vitrel.training.saved import evaluate
from vitrel.training.sources import Fake
from vitrel.training.task import ClassificationTask
from vitrel.training.transforms import InputConfig

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
HARD = [
    *("--data.name", "fake", "--data.augment", "crop_flip", "--data.mixup", "0.2", "--data.cutmix", "1"),
    *("--optim.ema_decay", "0.9", "--model.rel_pos", "txl", "--model.drop_path_rate", "0.2"),
]


def weights(folder, name="last"):
    (path,) = Path(folder, "checkpoints").glob(f"{name}*.ckpt")
    return torch.load(path)["state_dict"]  # the safe loader reads it


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_leaves_what_it_promises(tiny, capsys):
    config = tiny("--trainer.max_epochs", "2", "--model.img_size", "[16, 8]", "--model.rel_pos", "txl")
    results = run(config)
    folder = Path(results["folder"])
    assert folder.name == "version_0"
    expected = {"config.yaml", "metrics.csv", "hparams.yaml", "checkpoints", "model", "results.json"}
    assert {p.name for p in folder.iterdir()} == expected
    assert {p.name.split("-")[0] for p in (folder / "checkpoints").iterdir()} == {"best", "last.ckpt"}
    written = json.loads((folder / "results.json").read_text())
    assert written == results
    assert written["epochs"] == 2
    assert written["steps"] == 2 * 41  # 1293 images in batches of 32
    assert written["test/acc"] * 360 == pytest.approx(round(written["test/acc"] * 360), abs=1e-3)
    assert {"test/loss", "test/acc5", "seconds", "parameters", "versions", "device"} <= set(written)

    model = timm.create_model(f"local-dir:{folder / 'model'}", pretrained=True).eval()
    (best,) = (folder / "checkpoints").glob("best-*.ckpt")
    task = ClassificationTask.load_from_checkpoint(best).eval()
    pictures = torch.randn(5, 3, 16, 8)
    assert torch.equal(model(pictures), task(pictures))
    assert written["parameters"] == sum(p.numel() for p in model.parameters())
    label_names = json.loads((folder / "model" / "config.json").read_text())["label_names"]
    assert label_names == [str(i) for i in range(10)]

    data = PictureDataModule(config.data, InputConfig.of(task.net, config.data))
    data.setup("test")
    right = [model(data.on_after_batch_transfer(b, 0)[0]).argmax(1) == b[1] for b in data.test_dataloader()]
    assert float(torch.cat(right).float().mean()) == pytest.approx(written["test/acc"])
    for path in (folder, best):
        assert evaluate(path)["test/acc"] == pytest.approx(written["test/acc"])

    lines = capsys.readouterr().out.splitlines()
    accuracy = next(i for i, line in enumerate(lines) if line.startswith("test accuracy"))
    assert f"{written['test/acc']:.4f}" in lines[accuracy]
    assert lines[accuracy + 1] == f"run folder {folder}"
    assert lines[accuracy + 2].startswith('import timm, vitrel; model = timm.create_model("local-dir:')


def test_one_seed_gives_one_result_and_another_seed_another(tiny):
    results = [run(tiny(*HARD, "--seed", seed)) for seed in ("3", "3", "4")]
    assert [Path(r["folder"]).name for r in results] == ["version_0", "version_1", "version_2"]
    assert results[0]["test/loss"] == results[1]["test/loss"] != results[2]["test/loss"]
    assert same(weights(results[0]["folder"]), weights(results[1]["folder"]))


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_resumed_run_ends_as_if_it_had_not_stopped(tiny, workers, monkeypatch):
    options = [*HARD, "--data.num_workers", workers, "--trainer.max_epochs", "3"]
    straight = run(tiny(*options, "--name", "straight"))

    with monkeypatch.context() as patch:
        patch.setattr(EpochSeed, "on_train_epoch_start", _stopping(EpochSeed.on_train_epoch_start))
        with pytest.raises(KeyError):
            run(tiny(*options, "--name", "stopped"))
    resumed = run(tiny(*options, "--name", "stopped", "--ckpt_path", "last"))
    assert Path(resumed["folder"]).name == "version_1"
    assert resumed["epochs"] == straight["epochs"] == 3
    assert same(weights(resumed["folder"]), weights(straight["folder"]))
    assert resumed["checkpoint"] == straight["checkpoint"]
    assert resumed["test/loss"] == straight["test/loss"]


def _stopping(real):
    def hook(self, trainer, module):
        if trainer.current_epoch == 2:
            raise KeyError
        real(self, trainer, module)

    return hook


def test_the_average_is_what_is_tested_and_exported(tiny):
    results = run(tiny("--data.name", "fake", "--optim.ema_decay", "0.5", "--trainer.max_epochs", "2"))
    folder = Path(results["folder"])
    checkpoint = torch.load(next((folder / "checkpoints").glob("best-*.ckpt")))
    assert not same(checkpoint["state_dict"], checkpoint["current_model_state"])
    exported = timm.create_model(f"local-dir:{folder / 'model'}", pretrained=True).state_dict()
    assert same(exported, {k.removeprefix("net."): v for k, v in checkpoint["state_dict"].items()})


def test_seven_pictures_and_an_odd_last_batch(tiny, shared):
    root = str(shared / "cases" / "folders" / "seven_images")
    for batch in ("4", "2"):
        results = run(
            tiny("--data.name", "folder", "--data.root", root, "--data.mixup", "0.2", "--data.cutmix", "1",
                 "--data.augment", "resized_crop", "--data.batch_size", batch)
        )  # fmt: skip
        assert results["steps"] == -(-7 // int(batch))


def test_a_trial_of_a_few_batches_writes_nothing(tiny, tmp_path):
    results = run(tiny("--trainer.fast_dev_run", "true"))
    assert results["folder"] is None
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("rel_pos", ["bias", "txl"])
def test_low_precision_runs_and_moves_the_tables(tiny, precision, rel_pos):
    results = run(tiny("--trainer.precision", precision, "--model.rel_pos", rel_pos))
    model = timm.create_model(f"local-dir:{results['folder']}/model", pretrained=True)
    tables = [model.get_parameter(name) for name in sorted(model.position_parameters())]
    assert np.isfinite(results["test/loss"])
    assert all(t.isfinite().all() and t.any() for t in tables)


def test_runs_without_validation_or_checkpoints(tiny):
    results = run(tiny("--data.name", "fake", "--trainer.limit_val_batches", "0"))
    assert results["checkpoint"] == "last.ckpt"
    results = run(tiny("--data.name", "fake", "--trainer.enable_checkpointing", "false"))
    assert results["checkpoint"] is None
    assert not (Path(results["folder"]) / "checkpoints").exists()
    assert (Path(results["folder"]) / "model" / "model.safetensors").is_file()


class Gather(pl.Callback):
    """Writes each process's weights and validation figures."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, module):
        flat = torch.cat([p.detach().flatten() for p in module.net.parameters()])
        np.save(self.folder / f"weights{trainer.global_rank}.npy", flat.numpy())
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        assert trainer.global_step == 3
        (self.folder / f"metrics{trainer.global_rank}.json").write_text(json.dumps(metrics))


@pytest.mark.parametrize("preset", [*PRESETS, "bias+kernel"])
def test_two_processes_agree_and_validate_like_one(tiny, tmp_path, preset):
    """Three steps without find_unused_parameters, then the figures on a validation split of odd size."""
    fake = ("--data.name", "fake", "--data.fake_images", "41", "--data.batch_size", "8", "--model.kwargs.depth", "1")
    config = tiny(*fake, "--model.rel_pos", preset)

    def trainer(**settings):
        return pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, **settings,
        )  # fmt: skip

    task = ClassificationTask(config.as_dict(), 10)
    data = PictureDataModule(config.data, InputConfig.of(task.net, config.data))
    two = trainer(devices=2, strategy="ddp_fork", max_epochs=1, callbacks=[EpochSeed(0), Gather(tmp_path)])
    two.fit(task, datamodule=data)
    first, second = (np.load(tmp_path / f"weights{rank}.npy") for rank in (0, 1))
    assert (first == second).all()
    metrics = [json.loads((tmp_path / f"metrics{rank}.json").read_text()) for rank in (0, 1)]
    assert metrics[0] == metrics[1]
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(torch.from_numpy(first), task.net.parameters())
    one = trainer(devices=1).validate(task, datamodule=data, verbose=False)[0]
    assert one == pytest.approx(metrics[0], abs=1e-6)


def test_two_processes_leave_one_run_one_set_of_maps_and_the_best_model(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    real = Fake.prepare
    monkeypatch.setattr(Fake, "prepare", lambda self: (tmp_path / f"prepared{os.getpid()}").touch() or real(self))
    results = run(
        tiny("--data.name", "fake", "--data.fake_images", "41", "--data.batch_size", "8", "--trainer.max_epochs", "3",
             "--trainer.devices", "2", "--trainer.strategy", "ddp_fork", "--logger.maps_every", "3",
             "--model.rel_pos", "bias",  # whose first epoch is its best
             "--optim.lr", "0.01", "--seed", "3", "--data.mean", "[0.5, 0.5, 0.5]", "--data.std", "[0.5, 0.5, 0.5]")
    )  # fmt: skip
    folder = Path(results["folder"])
    assert [p.name for p in (tmp_path / "runs" / "fake").iterdir()] == ["version_0"]
    assert (results["processes"], results["global_batch"]) == (2, 16)
    assert (results["epochs"], results["steps"], results["checkpoint"]) == (3, 9, "best-epoch000.ckpt")
    (kept,) = (tmp_path / "runs" / "wandb").glob("offline-run-*")
    pictures = sorted("_".join(p.name.split("_")[:2]) for p in (kept / "files/media/images/maps").iterdir())
    assert pictures == ["blocks_00", "blocks_01"]
    assert len(list(tmp_path.glob("prepared*"))) == 3  # by one process each for the check, the training and the test
    exported = timm.create_model(f"local-dir:{folder / 'model'}", pretrained=True).state_dict()
    assert same(exported, {k.removeprefix("net."): v for k, v in weights(folder, "best-").items()})
    assert evaluate(folder)["test/acc"] == pytest.approx(results["test/acc"])
    assert capsys.readouterr().out.count("global batch 16 = 8 x 2 devices") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optim.lrr", "1"], "error: unknown setting 'optim.lrr'; did you mean optim.lr?\n"),
        (["--data.batch_size", "0"], "error: data.batch_size: expected an integer of at least 1, got 0\n"),
        (["--model.rel_pos", "biass"], "error: model.rel_pos: preset 'biass' is unknown"),
        (["--data.name", "cifar10"], "error: CIFAR10 is not under"),
        (["--ckpt_path", "last"], "error: ckpt_path: no last.ckpt below"),
        (["--trainer.accelerator", "nope"], "error: trainer: "),
    ],
)
def test_a_mistake_ends_in_one_line_before_anything_is_written(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(options, [CONFIGS], "digits.yaml") == 2
    written = capsys.readouterr()
    assert written.err.startswith(message)
    assert written.err.count("\n") == 1
    assert written.out == ""
    assert list(tmp_path.iterdir()) == []


def script(name, *options, cwd, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / name, *options], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=300, env={**clean, "HOME": str(cwd), "OMP_NUM_THREADS": "1", **environ},
    )  # fmt: skip


@pytest.mark.slow
def test_the_scripts_run_from_anywhere_without_key_network_or_terminal(tmp_path):
    options = ("--config", "digits", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2")
    nowhere = {"HOME": "/dev/null/none", "MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    trained = script("train.py", *options, cwd=tmp_path, WANDB_MODE="online", **nowhere)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr.startswith("W&B: no API key")
    assert trained.stderr.count("\n") == 1
    assert len(trained.stdout.splitlines()) == 6
    assert list((tmp_path / "runs" / "wandb").glob("offline-run-*"))
    tested = script("evaluate.py", "runs/digits/version_0", cwd=tmp_path)
    results = json.loads((tmp_path / "runs/digits/version_0/results.json").read_text())
    assert json.loads(tested.stdout)["test/acc"] == pytest.approx(results["test/acc"])
    refused = script("evaluate.py", "runs/none", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: runs/none: there is no ")


@pytest.mark.slow
def test_digits_reach_what_the_config_says(tmp_path):
    results = [script("train.py", "--runs", f"r{i}", cwd=tmp_path, WANDB_MODE="off") for i in (0, 1)]
    figures = [json.loads((tmp_path / f"r{i}/digits/version_0/results.json").read_text()) for i in (0, 1)]
    assert [r.returncode for r in results] == [0, 0]
    assert figures[0]["test/acc"] >= 0.97
    assert figures[0]["test/acc"] == figures[1]["test/acc"]
    assert figures[0]["test/loss"] == figures[1]["test/loss"]


def test_resuming_another_model_or_a_damaged_checkpoint_is_refused_before_a_folder_is_made(tiny, tmp_path):
    first = run(tiny())
    with pytest.raises(ConfigError, match=r"was trained with model.rel_pos None, now it is txl"):
        run(tiny("--ckpt_path", "last", "--model.rel_pos", "txl"))
    (tmp_path / "bad.ckpt").write_bytes(b"xx")
    with pytest.raises(ConfigError, match=r"bad.ckpt: damaged, or no checkpoint of a run"):
        run(tiny("--ckpt_path", str(tmp_path / "bad.ckpt")))
    with pytest.raises(ConfigError, match=r"there is no file .*none\.ckpt"):
        run(tiny("--ckpt_path", str(tmp_path / "none.ckpt")))
    for path in Path(first["folder"]).glob("checkpoints/best-*.ckpt"):
        path.write_bytes(b"xx")
    with pytest.raises(ConfigError, match="damaged, or no checkpoint of a run"):
        evaluate(first["folder"])
    assert len(list(Path(first["folder"]).parent.iterdir())) == 1
