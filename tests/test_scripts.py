"""How the scripts end on a mistake: status 2 and one line that begins with ``error:`` and names the file."""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image

from vitrel.training.config import parse
from vitrel.training.data import PictureDataModule, normalize
from vitrel.training.model import save_model_folder
from vitrel.training.sources import find_source
from vitrel.training.transforms import InputConfig

SCRIPTS = Path(__file__).parents[1] / "scripts"
CONFIG, WEIGHTS = "model/config.json", "model/model.safetensors"
DATA = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic", "crop_pct": 1.0}


def script(name, *words, monkeypatch, capsys):
    """Exit status and what was written, of a script run in this process."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    status = 0
    try:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr()


@pytest.fixture
def run(tmp_path):
    model = timm.create_model("vitrel_micro_patch4_32", depth=1, embed_dim=16, num_heads=2, num_classes=3)
    save_model_folder(model, tmp_path / "run" / "model", ["a", "b", "c"], DATA)
    return tmp_path / "run"


def test_bias_maps_are_drawn_beside_the_model(run, monkeypatch, capsys):
    status, written = script("bias_maps.py", run, monkeypatch=monkeypatch, capsys=capsys)
    assert status in (None, 0)
    assert written.out == f"{run / 'bias_maps' / 'blocks.0.png'}\n"
    assert (run / "bias_maps" / "blocks.0.png").is_file()
    Image.fromarray(np.zeros((20, 30, 3), dtype=np.uint8)).save(run / "a.png")
    words = ("bias_maps.py", run / "model", "--pictures", run / "a.png")
    for more, made in (
        (["--out", run / "o"], ["o/blocks.0.png", "o/heads.csv"]),
        (["--html", run / "page.html"], ["page.html"]),
        (["--together", run / "all.png", "--blocks", 0], ["all.png"]),
    ):
        status, written = script(*words, *more, monkeypatch=monkeypatch, capsys=capsys)
        assert status in (None, 0), written.err
        assert written.out.split() == [str(run / name) for name in made]
        assert all((run / name).stat().st_size > 200 for name in made)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bias_maps.py", "--html", "p.html", "--blocks", "0"), "--html: the page has all blocks; leave out"),
        (("bias_maps.py", "--html", "p.html", "--together", "a.png"), "--html: the page has all blocks; leave out"),
        (("bias_maps.py", "--together", "a.png", "--out", "o"), "--out: expected with neither --html nor --together"),
        (("bias_maps.py", "--together", "a.txt"), "--together: expected a file that ends in .png, got a.txt"),
        (("bias_maps.py", "--html", "page"), "--html: expected a file that ends in .html, got page"),
        (("bias_maps.py", "--out", __file__), f"--out: {__file__} is a file, expected a folder"),
        (("bias_maps.py", "--data.root", "o"), "is no run, and has no data; give image files with --pictures"),
    ],
)
def test_options_without_an_effect_are_refused(run, words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, written = script(words[0], run / "model", *words[1:], monkeypatch=monkeypatch, capsys=capsys)
    assert (status, written.out) == (2, "")
    assert message in written.err
    assert written.err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_reader_that_has_gone_is_no_error(tmp_path):
    words = [sys.executable, str(SCRIPTS / "experiments.py"), "--list"]
    with (tmp_path / "said").open("w") as said:
        read, write = os.pipe()
        os.close(read)
        status = subprocess.run(words, stdout=write, stderr=said, check=False).returncode
        os.close(write)
    assert status == 128 + signal.SIGPIPE
    assert (tmp_path / "said").read_text() == ""


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("bias_maps.py", lambda run: (run / CONFIG).write_text("{"), "{run}/model/config.json: not the configuration"),
        ("bias_maps.py", lambda run: (run / CONFIG).write_text("{}"), "{run}/model/config.json: not the configuration"),
        ("bias_maps.py", lambda run: (run / WEIGHTS).unlink(), "{run}: No suitable checkpoints"),
        ("bias_maps.py", lambda run: (run / WEIGHTS).write_bytes(b"x"), "{run}: Error while deserial"),
        ("bias_maps.py", lambda run: (run / "model").rename(run / "other"), "{run}: expected a run folder with model/"),
        ("bias_maps.py", lambda run: run.rename(run.with_name("x")), "{run}: no such folder, and no model of that"),
        ("evaluate.py", lambda run: run.rename(run.with_name("x")), "{run}: there is no such run folder or checkpoint"),
        ("evaluate.py", lambda run: None, "{run}: there is no {run}/config.yaml; give a run folder"),
        ("export.py", lambda run: None, "{run}: not a finished run, there is no results.json"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_status_2(run, name, spoil, message, monkeypatch, capsys):
    spoil(run)
    words = [run, run.parent / "exported"] if name == "export.py" else [run]
    status, written = script(name, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2
    assert written.out == ""
    assert written.err.startswith("error: " + message.format(run=run))
    assert written.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--blocks", 1], "--blocks: block 1 has no map; there are 0"),
        (["--pictures", "none.png"], "none.png: No such file"),
        (["--pictures", "{run}/model/config.json"], "{run}/model/config.json: cannot be read as an image"),
    ],
)
def test_what_cannot_be_drawn_is_said(run, words, message, monkeypatch, capsys):
    words = [str(word).format(run=run) for word in words]
    status, written = script("bias_maps.py", run, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2
    assert written.out == ""
    assert written.err.startswith("error: " + message.format(run=run))
    assert written.err.count("\n") == 1


def test_a_scheme_without_maps_is_said(run, monkeypatch, capsys):
    config = json.loads((run / "model/config.json").read_text())
    model = timm.create_model("vitrel_micro_patch4_32", depth=1, embed_dim=16, num_heads=2, rel_pos="rope")
    save_model_folder(model, run / "model", config["label_names"], DATA)
    status, written = script("bias_maps.py", run, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2
    assert written.err.startswith(f"error: {run}: nothing to draw; ")


def test_the_data_of_an_evaluation_may_lie_elsewhere(monkeypatch, capsys):
    for option in ("--data.root", "--root"):
        status, written = script("evaluate.py", "nowhere", option, "DIR", monkeypatch=monkeypatch, capsys=capsys)
        assert status == 2
        said = "there is no such run folder or checkpoint; a model's name needs --config"
        assert written.err == f"error: nowhere: {said}\n"


FAKE = (
    "data:\n  name: fake\n  fake_images: 12\n  fake_classes: 3\n  batch_size: 5\nmodel: {arch: vitrel_tiny_patch4_32}\n"
)


def test_a_saved_model_is_evaluated_on_the_data_of_a_config(run, tmp_path, monkeypatch, capsys):
    """The figures are those of the model on those pictures; the names of the classes have to be theirs."""
    (tmp_path / "fake.yaml").write_text(FAKE)
    names = find_source(parse(["--config", str(tmp_path / "fake.yaml")]).data).classes
    words = ("evaluate.py", run / "model", "--config", tmp_path / "fake.yaml")
    status, written = script(*words, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2
    assert written.err == (
        f"error: {run / 'model'}: the model has classes such as a, b, c, and the data 3 such as {', '.join(names)}; "
        "give the settings of the data that it was trained on\n"
    )
    model = timm.create_model(f"local-dir:{run / 'model'}", pretrained=True).eval()
    save_model_folder(model, run / "model", names, DATA)
    status, written = script(*words, "--ablate", "--out", tmp_path / "out", monkeypatch=monkeypatch, capsys=capsys)
    assert status in (None, 0), written.err
    metrics = json.loads(written.out[: written.out.index("}") + 1])
    data = PictureDataModule(
        parse(["--config", str(tmp_path / "fake.yaml")]).data,
        InputConfig((32, 32), **{k: DATA[k] for k in ("mean", "std")}),
    )
    data.setup("test")
    right = total = 0
    for pictures, labels in data.test_dataloader():
        right += int((model(normalize(pictures, data.inputs)).argmax(-1) == labels).sum())
        total += len(labels)
    assert total == 12
    assert metrics["test/acc"] == pytest.approx(right / total)
    assert (tmp_path / "out" / "ablation.csv").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vitrel_micro_patch4_33", "vitrel_micro_patch4_33: no such folder, and no model of that name"),
        ("vitrel_tiny_patch4_32", "vitrel_tiny_patch4_32: No pretrained weights exist"),
    ],
)
def test_a_model_without_weights_is_not_evaluated(name, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "fake.yaml").write_text(FAKE)
    words = ("evaluate.py", name, "--config", tmp_path / "fake.yaml")
    status, written = script(*words, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2
    assert written.out == ""
    assert written.err.startswith(f"error: {message}")
    assert written.err.count("\n") == 1
