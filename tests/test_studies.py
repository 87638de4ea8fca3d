"""Terms switched off, other sizes, classes: each figure against the same thing done by hand."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from vitrel.training.data import PictureDataModule
from vitrel.training.evaluation import examine
from vitrel.training.fileio import ConfigError
from vitrel.training.model import build_model, save_model_folder
from vitrel.training.run import run
from vitrel.training.studies import Study, as_text, sizes_around
from vitrel.training.transforms import InputConfig


def make(config, spread=2.0):
    """A net with large random weights and tables, so that a term or a rule makes a difference, and its data."""
    torch.manual_seed(0)
    net = build_model(config.model, 10).eval()
    for parameter in net.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    for name in sorted(getattr(net, "position_parameters", set)()):
        torch.nn.init.normal_(net.get_parameter(name), std=spread)
    return net, PictureDataModule(config.data, InputConfig.of(net, config.data))


def answers(net, data):
    data.setup("test")
    batches = [(net(data.on_after_batch_transfer(b, 0)[0]).argmax(1), b[1]) for b in data.test_dataloader()]
    return torch.cat([guess for guess, _ in batches]), torch.cat([labels for _, labels in batches])


def test_ablation_is_the_accuracy_with_the_tables_at_zero(tiny):
    config = tiny("--model.rel_pos", "bias+key")
    net, data = make(config)
    rows = Study(net, data).ablation()
    assert [row["off"] for row in rows] == ["nothing", "bias", "key", "all of them"]
    with torch.no_grad():
        guess, labels = answers(net, data)
        whole = guess == labels
        assert rows[0]["top1"] == pytest.approx(float(whole.float().mean()))
        for name in sorted(net.position_parameters()):
            if ".bias." in name:
                net.get_parameter(name).zero_()
        without = answers(net, data)[0] == labels
    difference = without.double() - whole.double()
    assert rows[1]["top1"] == pytest.approx(float(without.float().mean()))
    assert rows[1]["change"] == pytest.approx(float(difference.mean()))
    assert rows[1]["change"] != 0
    assert rows[1]["standard_error"] == pytest.approx(float(difference.std()) / 360**0.5)
    assert rows[1]["pictures"] == 360


@pytest.mark.parametrize("preset", ["bias", "rope"])
def test_sizes_are_the_accuracy_of_the_saved_model_at_that_size_by_that_rule(tiny, tmp_path, preset):
    net, data = make(tiny("--model.rel_pos", preset))
    with torch.no_grad():  # sharp enough for angles to matter
        for block in net.blocks:
            block.attn.qkv.weight.mul_(8)
    before = {n: p.clone() for n, p in net.named_parameters()}
    rows = Study(net, data).sizes([(16, 16), (8, 12), (8, 8)])
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    assert [(row["rows"], row["cols"], row["rule"]) for row in rows] == [
        (8, 8, "trained size"),
        *[(16, 16, rule) for rule in ("clamp", "interpolate", "geometric")],
        *[(8, 12, rule) for rule in ("clamp", "interpolate", "geometric")],
    ]
    save_model_folder(net, tmp_path / "model", data.classes, data.inputs.as_data_config())
    for row in rows[1:]:
        size = (row["rows"], row["cols"])
        spec = {"preset": preset, "resize": row["rule"]}
        loaded = timm.create_model(
            f"local-dir:{tmp_path / 'model'}", pretrained=True, img_size=size, rel_pos=spec
        ).eval()
        module = PictureDataModule(data.config, InputConfig.of(loaded, data.config), data.source)
        with (
            torch.no_grad(),
            pytest.warns(UserWarning, match="beyond the trained ones")
            if (preset, row["rule"]) == ("bias", "clamp")
            else np.errstate(),
        ):
            guess, labels = answers(loaded, module)
        assert row["top1"] == pytest.approx(float((guess == labels).float().mean()))
    assert len({row["top1"] for row in rows[1:4]}) > 1
    assert Study(*make(tiny("--model.rel_pos", "none"))).sizes([(12, 12)])[1]["rule"] == "none"


def test_classes_from_the_worst_to_the_best(tiny):
    net, data = make(tiny())
    rows = Study(net, data).per_class()
    with torch.no_grad():
        guess, labels = answers(net, data)
    assert sum(row["pictures"] for row in rows) == 360
    assert [row["top1"] for row in rows] == sorted(row["top1"] for row in rows)
    for row in rows:
        of_class = labels == int(row["class"])
        assert row["top1"] == pytest.approx(float((guess == labels)[of_class].float().mean()))


def test_a_part_of_the_pictures_is_spread_over_the_split(tiny):
    net, data = make(tiny())
    study = Study(net, data, at_most=40)
    assert study.pictures == study.ablation()[0]["pictures"] == 40
    assert len(np.unique(study._module(data.inputs.size).splits["test"].indices)) == 40


def test_sizes_to_try_are_whole_patches_around_the_trained_one(tiny):
    net, data = make(tiny("--model.img_size", "[8, 12]"))
    assert sizes_around(data.inputs, net) == [(6, 8), (12, 18), (16, 24)]
    assert sizes_around(data.inputs, torch.nn.Linear(2, 2)) == []


def test_a_table_to_read():
    rows = [
        {"off": "nothing", "top1": 0.9, "change": 0.0, "pictures": 10},
        {"off": "u", "top1": 0.4, "change": -0.5, "pictures": 10},
    ]
    assert as_text(rows) == (
        "off      top1 %  change %  pictures\n"
        "nothing   90.00     +0.00        10\n"
        "u         40.00    -50.00        10"
    )  # fmt: skip


@pytest.fixture
def finished(tiny):
    return Path(run(tiny("--data.name", "fake", "--model.rel_pos", "txl"))["folder"])


def test_a_run_is_examined_and_leaves_tables_and_figures(finished, tmp_path, capsys):
    capsys.readouterr()
    tables = examine(finished, ablate=True, sizes=["12", "16x8"], per_class=True)
    printed = capsys.readouterr().out
    end = printed.index("\n}") + 2
    accuracy = json.loads(printed[:end])["test/acc"]
    assert tables["ablation"][0]["top1"] == tables["sizes"][0]["top1"] == pytest.approx(accuracy)
    assert [row["off"] for row in tables["ablation"]] == ["nothing", "query", "u", "v", "all of them"]
    folder = finished / "evaluation"
    assert sorted(p.name for p in folder.iterdir()) == [
        "ablation.csv", "ablation.png", "per_class.csv", "sizes.csv", "sizes.png",
    ]  # fmt: skip
    assert [line for line in printed[end:].splitlines() if line.startswith(str(folder))] == [
        str(folder / f"{name}.{kind}") for name in ("ablation", "sizes", "per_class") for kind in ("csv", "png")
    ][:-1]  # fmt: skip
    with (folder / "sizes.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(r["rows"], r["cols"]) for r in read[::3][1:]] == [("12", "12"), ("16", "8")][-len(read[::3][1:]) :]
    examine(finished / "checkpoints" / "last.ckpt", per_class=True, out=tmp_path / "elsewhere")
    assert [p.name for p in (tmp_path / "elsewhere").iterdir()] == ["per_class.csv"]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("13", r"sizes: 13x13 px is not a multiple of the model's patch of 2x2 px"),
        ("12x", r"--sizes: expected pixels such as 48, or 48x32 for rows x columns, got '12x'"),
        ("0", r"--sizes: expected pixels"),
    ],
)
def test_a_wrong_size_is_refused_before_anything_is_evaluated(finished, size, message, capsys):
    capsys.readouterr()
    with pytest.raises(ConfigError, match=message):
        examine(finished, ablate=True, sizes=["12", size])
    assert capsys.readouterr().out == ""
    assert not (finished / "evaluation").exists()


def test_a_model_without_position_cannot_be_ablated(tiny):
    folder = run(tiny("--data.name", "fake", "--model.rel_pos", "none"))["folder"]
    with pytest.raises(ConfigError, match="--ablate: the model has no position terms to switch off"):
        examine(folder, ablate=True)
