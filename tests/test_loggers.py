"""CSV always; W&B online, offline or off, without asking, waiting or failing."""

import os

import pytest
import wandb
from pytorch_lightning.loggers import CSVLogger, WandbLogger

from vitrel.training import loggers
from vitrel.training.fileio import ConfigError
from vitrel.training.loggers import build_loggers, finish_wandb, wandb_mode
from vitrel.training.run import run


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    yield
    finish_wandb()


def test_the_environment_wins_over_the_setting():
    assert wandb_mode("offline", {}) == "offline"
    assert wandb_mode("offline", {"WANDB_MODE": "disabled"}) == "off"
    assert wandb_mode("off", {"WANDB_MODE": "dryrun"}) == "offline"
    assert wandb_mode("offline", {"WANDB_MODE": "online"}) == "online"
    with pytest.raises(ConfigError, match="WANDB_MODE: 'nonsense' is unknown, expected one of online"):
        wandb_mode("offline", {"WANDB_MODE": "nonsense"})


def test_off_leaves_the_csv_file(tiny, offline):
    made = build_loggers(tiny("--logger.mode", "off"))
    assert [type(x) for x in made] == [CSVLogger]
    assert made[0].log_dir.endswith("runs/digits/version_0")


def test_online_without_a_key_stays_offline_and_says_so(tiny, offline, capsys, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda *args, **kwargs: pytest.fail("nothing is started yet"))
    made = build_loggers(tiny("--logger.mode", "online"))
    assert made[1]._wandb_init["mode"] == "offline"
    # wandb adds a line of its own where it was used before in the same process
    line = "".join(text for text in capsys.readouterr().err.splitlines(True) if not text.startswith("wandb:"))
    assert line.startswith("W&B: no API key")
    assert "'wandb sync'" in line
    assert line.count("\n") == 1


def test_online_without_an_answer_stays_offline_and_says_so(tiny, offline, capsys, monkeypatch):
    def fail(*args, mode, settings, **kwargs):
        assert mode == "online"
        assert settings.init_timeout == loggers.INIT_TIMEOUT <= 15
        raise wandb.errors.CommError("no\nnetwork")

    monkeypatch.setattr(loggers, "_has_key", lambda: True)
    monkeypatch.setattr(wandb, "init", fail)
    made = build_loggers(tiny("--logger.mode", "online"))
    assert isinstance(made[1], WandbLogger)
    assert made[1]._wandb_init["mode"] == "offline"
    assert "the server did not answer (no network), so this run is kept offline" in capsys.readouterr().err


def test_a_stored_key_is_found_without_asking(offline, monkeypatch):
    assert loggers._has_key() is False
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert loggers._has_key() is True


def test_a_folder_that_cannot_be_written_ends_no_run(tiny, offline, capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "wandb").write_text("")
    assert [type(x) for x in build_loggers(tiny())] == [CSVLogger]
    expected = f"W&B: not logged, {tmp_path}/runs/wandb cannot be made (File exists)\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("home", [None, "/dev/null/none"])
def test_a_home_that_cannot_be_used_is_replaced(tiny, offline, monkeypatch, tmp_path, home):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    build_loggers(tiny())
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "runs" / "wandb" / ".cache")


def test_a_resumed_run_continues_its_run_of_wandb(tiny, offline, tmp_path, capsys):
    options = ("--data.name", "fake", "--logger.mode", "offline")
    run(tiny(*options))
    run(tiny(*options, "--trainer.max_epochs", "2", "--ckpt_path", "last"))
    (line,) = (text for text in capsys.readouterr().out.splitlines()[5:] if "wandb sync" in text)
    assert line.split("wandb sync ")[1].split() == sorted(map(str, (tmp_path / "runs/wandb").glob("offline-run-*")))
    run(tiny(*options))
    ids = [path.name.split("-")[3] for path in sorted((tmp_path / "runs/wandb").glob("offline-run-*"))]
    assert len(ids) == 3
    assert len(set(ids)) == 2  # the resumed run has the name of the first
