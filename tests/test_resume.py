"""Going on with a run: which checkpoint, what has to agree, and what a stop of any kind leaves."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vitrel.training import loggers
from vitrel.training.callbacks import EpochLine, EpochSeed
from vitrel.training.config import parse
from vitrel.training.fileio import ConfigError
from vitrel.training.images import DataError
from vitrel.training.loggers import build_loggers
from vitrel.training.resume import find_resume
from vitrel.training.run import StoppedError, main, run

FAKE = ("--data.name", "fake", "--data.batch_size", "8", "--name", "r")


def options(config):
    """The command line of a config made by ``tiny``."""
    path = Path(config.runs).parent / "config.yaml"
    path.write_text(json.dumps({**config.as_dict(), "ckpt_path": None}))
    return ["--config", str(path)]


def stop_at(monkeypatch, epoch, act):
    """Calls ``act`` in the first step of an epoch, counted from 0."""
    real = EpochSeed.on_train_epoch_start

    def hook(self, trainer, module):
        real(self, trainer, module)
        if trainer.current_epoch == epoch:
            act()

    monkeypatch.setattr(EpochSeed, "on_train_epoch_start", hook)


def same_weights(a, b, name="last.ckpt"):
    first, second = (torch.load(Path(x["folder"], "checkpoints", name))["state_dict"] for x in (a, b))
    return all(torch.equal(first[k], second[k]) for k in first)


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """A shell starts a job in the background with Ctrl-C ignored, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_in_one_line_that_says_how_to_go_on(tiny, monkeypatch, capsys, tmp_path, number, status):
    words = options(tiny(*FAKE, "--trainer.max_epochs", "3"))
    with monkeypatch.context() as patch:
        stop_at(patch, 0, lambda: os.kill(os.getpid(), number))
        assert main(words) == status
        assert capsys.readouterr().err == "stopped: nothing is saved, since no epoch was complete\n"
    last = tmp_path / "runs/r/version_1/checkpoints/last.ckpt"
    with monkeypatch.context() as patch:
        stop_at(patch, 2, lambda: os.kill(os.getpid(), number))
        assert main(words) == status
        expected = f"stopped: 2 epochs are saved in {last}; --ckpt_path last goes on from there\n"
        assert capsys.readouterr().err == expected
    assert not (last.parents[1] / "results.json").exists()
    if number == signal.SIGTERM:
        return

    assert main([*words, "--ckpt_path", "last"]) == 0
    assert f"continues {last}: after 2 epochs\n" in capsys.readouterr().out
    results = json.loads((tmp_path / "runs/r/version_2/results.json").read_text())
    assert (results["epochs"], results["resumed_from"]) == (3, str(last))
    straight = run(tiny(*FAKE[:4], "--trainer.max_epochs", "3", "--name", "straight"))
    assert same_weights(results, straight)


def test_another_global_batch_is_said(tiny, capsys):
    first = run(tiny(*FAKE))
    capsys.readouterr()
    run(tiny(*FAKE, "--ckpt_path", "last", "--trainer.max_epochs", "2", "--trainer.accumulate_grad_batches", "2"))
    said = capsys.readouterr().err
    assert "trainer.accumulate_grad_batches None is now 2: optim.lr stays" in said
    assert first["epochs"] == 1


def test_a_finished_run_is_not_run_again_but_goes_on_to_more_epochs(tiny, capsys):
    first = run(tiny(*FAKE))
    with pytest.raises(ConfigError, match=r"has 1 epochs already and its run is finished; raise trainer.max_epochs"):
        run(tiny(*FAKE, "--ckpt_path", "last"))
    assert len(list(Path(first["folder"]).parent.iterdir())) == 1
    assert run(tiny(*FAKE, "--ckpt_path", "last", "--trainer.max_epochs", "2"))["epochs"] == 2


def test_a_run_that_was_killed_in_its_test_is_only_tested(tiny, capsys):
    first = run(tiny(*FAKE))
    Path(first["folder"], "results.json").unlink()
    again = run(tiny(*FAKE, "--ckpt_path", "last"))
    assert "last.ckpt: only the test is left" in capsys.readouterr().out
    assert [again[k] for k in ("epochs", "test/loss", "checkpoint")] == [1, first["test/loss"], first["checkpoint"]]
    assert same_weights(first, again)
    with pytest.raises(ConfigError, match="its run is finished"):
        run(tiny(*FAKE, "--ckpt_path", "last"))


def test_the_newest_checkpoint_that_can_be_read_is_taken(tiny, capsys):
    config = tiny(*FAKE, "--ckpt_path", "last", "--trainer.max_epochs", "9")
    older = Path(run(tiny(*FAKE))["folder"], "checkpoints", "last.ckpt")
    newer = older.parents[2] / "version_1" / "checkpoints" / "last.ckpt"
    shutil.copytree(older.parents[1], newer.parents[1])
    os.utime(newer, (2e9, 2e9))
    assert find_resume(config).path == newer
    newer.write_bytes(older.read_bytes()[:5000])
    capsys.readouterr()
    assert find_resume(config).path == older
    assert capsys.readouterr().err.startswith(f"ckpt_path: {newer}: damaged")
    older.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"last.ckpt: damaged, or no checkpoint of a run"):
        find_resume(config)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("--optim.lr", "0.5", r"was trained with optim.lr 0.001, now it is 0.5; give the same"),
        ("--optim.ema_decay", "0.9", r"was trained with optim.ema_decay None, now it is 0.9; give the same"),
        ("--data.fake_classes", "7", r"last.ckpt was trained on 10 classes, the data have 7; give its own data"),
    ],
)
def test_settings_that_would_be_passed_over_are_refused(tiny, setting, value, message):
    first = run(tiny(*FAKE))
    with pytest.raises((ConfigError, DataError), match=message):
        run(tiny(*FAKE, "--ckpt_path", "last", "--trainer.max_epochs", "2", setting, value))
    assert len(list(Path(first["folder"]).parent.iterdir())) == 1


@pytest.mark.filterwarnings("ignore:a grid of 6x6:UserWarning")  # validation before the first step says so
def test_a_fine_tuned_run_goes_on_without_the_model_it_began_from(tiny, tmp_path, monkeypatch):
    first = run(tiny("--data.name", "digits", "--model.rel_pos", "txl", "--trainer.limit_train_batches", "2"))
    tune = (
        *("--runs", str(tmp_path / "runs"), *FAKE[:4], "--model.checkpoint", first["folder"], "--model.img_size", "12"),
        *("--trainer.max_epochs", "2", "--trainer.accelerator", "cpu", "--data.fake_images", "40"),
    )
    straight = run(parse([*tune, "--name", "straight"]))
    with monkeypatch.context() as patch:
        stop_at(patch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(StoppedError, match="1 epoch is saved"):
            run(parse([*tune, "--name", "tuned"]))
    shutil.rmtree(first["folder"])
    resumed = run(parse([*tune, "--name", "tuned", "--ckpt_path", "last"]))
    assert same_weights(resumed, straight)
    assert resumed["test/loss"] == straight["test/loss"]
    stored = json.loads(Path(resumed["folder"], "model", "config.json").read_text())
    known = json.loads(Path(straight["folder"], "model", "config.json").read_text())
    assert stored["pretrained_cfg"]["mean"] == known["pretrained_cfg"]["mean"]
    with pytest.raises(ConfigError, match=r"was trained with model.img_size 12, now it is 16"):
        run(parse([*tune, "--name", "tuned", "--ckpt_path", "last", "--model.img_size", "16"]))


def test_a_disk_that_takes_no_more_is_one_line_and_keeps_the_last_checkpoint(tiny, monkeypatch, capsys, tmp_path):
    words = options(tiny(*FAKE, "--trainer.max_epochs", "3"))
    last = tmp_path / "runs/r/version_0/checkpoints/last.ckpt"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    real = EpochLine.on_train_epoch_end

    def hook(self, trainer, module):
        real(self, trainer, module)
        if trainer.current_epoch == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (last.stat().st_size // 2, limits[1]))

    monkeypatch.setattr(EpochLine, "on_train_epoch_end", hook)
    try:
        assert main(words) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    written = capsys.readouterr().err
    assert written.startswith(f"error: {last.parent}/")
    assert written.endswith(f".ckpt: File too large; 1 epoch is saved in {last}; --ckpt_path last goes on from there\n")
    assert written.count("\n") == 1
    assert sorted(p.name for p in last.parent.iterdir()) == ["best-epoch000.ckpt", "last.ckpt"]
    monkeypatch.undo()
    monkeypatch.setenv("WANDB_MODE", "off")
    assert main([*words, "--ckpt_path", "last"]) == 0


def test_runs_that_start_at_once_get_a_folder_each(tiny, monkeypatch):
    config = tiny("--logger.mode", "off")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: build_loggers(config)[0].log_dir, range(24)))
    assert sorted(int(name.rsplit("_", 1)[1]) for name in made) == list(range(24))
    monkeypatch.setattr(loggers.rank_zero_only, "rank", 1)
    build_loggers(config)
    assert len(list(Path(config.runs, config.name).iterdir())) == 24


@pytest.mark.slow
def test_runs_survive_kills_at_any_moment():
    kills = os.environ.get("VITREL_KILLS", "2")
    script = Path(__file__).parent / "faults" / "kills.py"
    done = subprocess.run([sys.executable, script, "--kills", kills], capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["kills"] >= int(kills)
    assert figures["lost or different"] == 0
