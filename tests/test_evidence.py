"""Experiments: every planned run is one, a driver that goes on, and pages whose tables follow from results/."""

import fcntl
import json
import os
import re
import shutil
from decimal import Decimal
from pathlib import Path

import preloaded
import pytest
from evidence import plan as plans
from evidence import rows, tables, train

from vitrel.training.config import parse
from vitrel.training.fileio import ConfigError
from vitrel.training.model import check_model

REPOSITORY = Path(__file__).parents[1]
SMALL = """config: base.yaml
settings: {trainer.max_epochs: 2}
rows:
  bias: {model.rel_pos: bias, seeds: [0, 1], sizes: [24], ablate: true}
  none: {model.rel_pos: null, model.img_size: [16, 24]}
"""
BASE = """data: {name: fake, fake_images: 24, fake_classes: 3, batch_size: 8}
model: {arch: vitrel_micro_patch4_32, img_size: 16, depth: 1, embed_dim: 16, num_heads: 2}
trainer: {accelerator: cpu}
logger: {maps_every: 0}
"""


LINE = {"parameters": 1234, "test/acc": 0.5, "val/acc": [0.1, 0.25], "epochs": 2}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Configs and results of one small group."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "small.yaml").write_text(SMALL)
    (tmp_path / "base.yaml").write_text(BASE)
    monkeypatch.setattr(plans, "CONFIGS", tmp_path)
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    return tmp_path


def test_every_planned_run_has_settings_that_build_a_model():
    every = plans.plan()
    assert len({run.name for run in every}) == len(every) > 20
    for run in every:
        check_model(parse(run.options, folders=[plans.CONFIGS]).model)
        assert run.settings["data.name"] == "cifar100"


def test_every_kept_row_is_of_a_planned_run():
    planned = {(run.group, run.row, run.seed): run for run in plans.plan()}
    for file in rows.RESULTS.glob("*.jsonl"):
        for row in rows.read(file.stem):
            assert rows.of(row, planned[file.stem, row["row"], row["seed"]]), (file.stem, row["row"])
            assert row["epochs"] == len(row["val/acc"]) == row["settings"]["trainer.max_epochs"]


def test_names_choose_runs(place):
    names = [run.name for run in plans.plan()]
    assert names == ["small.bias.0", "small.bias.1", "small.none.0"]
    assert [run.name for run in plans.plan(["small.bias.1", "small.none"])] == names[1:]
    assert [run.name for run in plans.plan(["small"])] == names
    with pytest.raises(ConfigError, match=r"no experiment 'small\.bia'; the groups are small"):
        plans.plan(["small.bia"])
    bias, _, none = plans.plan()
    assert bias.settings["model.rel_pos.terms"] == ["bias"]
    assert none.settings["model.rel_pos"] is None
    assert (bias.settings["trainer.max_epochs"], bias.settings["data.batch_size"]) == (2, 8)
    assert not {"seed", "name", "data.root", "model.rel_pos.resize"} & set(bias.settings)
    assert (bias.own, none.own) == ("rel_pos bias", "rel_pos None, img_size [16, 24]")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "model.rel_pos: bias",
            "model.rel_poss: bias",
            r"small\.yaml: bias: unknown setting 'model\.rel_poss'; did you",
        ),
        (
            "settings:",
            "setings:",
            r"small\.yaml: unknown key 'setings', expected ablate, config, rows, settings, sizes",
        ),
        ("config: base.yaml", "", r"small\.yaml: expected config, and rows"),
        ("seeds: [0, 1]", "seeds: 0", r"small\.yaml: bias: seeds: expected different numbers of 0 or more, got 0"),
        ("seeds: [0, 1]", "seeds: [0, 0]", r"small\.yaml: bias: seeds: expected different numbers"),
        ("seeds: [0, 1]", "seeds: [-1]", r"small\.yaml: bias: seeds: expected different numbers"),
        ("ablate: true", "ablate: 'no'", r"small\.yaml: bias: ablate: expected true or false, got 'no'"),
        ("  bias:", "  a/b:", r"small\.yaml: a/b: expected a name of letters, digits and underscores"),
        ("sizes: [24]", "sizes: [banana]", r"small\.yaml: bias: sizes: expected pixels such as 48, or 48x32 for rows"),
        ("sizes: [24]", "sizes: 24", r"small\.yaml: bias: sizes: expected a list of pixels"),
        ("base.yaml", "other.yaml", r"small\.yaml: bias: --config: there is no"),
    ],
)
def test_a_mistake_in_a_file_is_named(place, old, new, message):
    assert old in SMALL
    (place / "experiments" / "small.yaml").write_text(SMALL.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        plans.plan()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("settings", [], r"settings: expected the settings by name, got \[\]"),
        ("seed", "0", 'seed: expected a whole number, got "0"'),
        ("parameters", None, "parameters: expected a whole number, got null"),
        ("test/acc", float("nan"), "test/acc: expected a number from 0 to 1, got NaN"),
        ("test/acc", "0.5", "test/acc: expected a number from 0 to 1"),
        ("val/acc", [], "val/acc: expected such numbers"),
        ("val/acc", [0.1, 52], "val/acc: expected such numbers"),
        ("sizes", [{}], "sizes: expected rows, cols, rule and top1 each"),
        ("sizes", "abc", "sizes: expected rows, cols, rule and top1 each"),
        ("ablation", [{"off": "bias"}], "ablation: expected off and top1 each"),
    ],
)
def test_a_line_that_tables_cannot_be_made_of_is_named(place, key, value, message):
    one = plans.plan()[0]
    with pytest.raises(ValueError, match=message):
        rows.keep(one, {**LINE, key: value})
    assert rows.read("small") == []
    rows.keep(one, LINE)
    file = place / "results" / "small.jsonl"
    (row,) = rows.read("small")
    file.write_text(file.read_text() + json.dumps({**row, "seed": 1, key: value}) + "\n")
    with pytest.raises(ConfigError, match=rf"small\.jsonl, line 2: not the line of a run \({message}"):
        rows.find(one)


@pytest.mark.parametrize("line", [b"<<<<<<< HEAD", b"[]", b'"\xff"', b'{"row": "bias"}'])
def test_a_damaged_line_is_named(place, line):
    (place / "results").mkdir()
    file = place / "results" / "small.jsonl"
    file.write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match=r"small\.jsonl, line 1: not the line of a run"):
        rows.find(plans.plan()[0])
    file.unlink()
    rows.keep(plans.plan()[0], LINE)
    file.write_text(2 * file.read_text())
    with pytest.raises(ConfigError, match=r"line 2: not the line of a run \(there is another line of bias, seed 0\)"):
        rows.find(plans.plan()[0])


@pytest.mark.parametrize("text", ["", '{"rows": []}', '{"rows": [{"name": "none"}]}', "[]"])
def test_damaged_costs_are_named(place, text, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", place)
    (place / "cost.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cost\.json: not what scripts/benchmark\.py --json writes"):
        tables.fill("<!-- table: cost -->\n<!-- end -->")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "sizes: [24]",
            "sizes: [33]",
            r"small\.bias: sizes: 33x33 px is not a multiple of the model's patch of 4x4 px",
        ),
        ("bias, seeds", "none, seeds", r"small\.bias: ablate: the model has no position terms to switch off"),
    ],
)
def test_what_a_model_cannot_be_tested_on_is_refused_before_it_is_trained(place, old, new, message):
    assert old in SMALL
    (place / "experiments" / "small.yaml").write_text(SMALL.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        train.Trainer(place / "runs", [], threads=1).train(plans.plan(), jobs=1)
    assert not (place / "runs").exists()


@pytest.mark.parametrize("options", [["--trainer.max_epochs", "1"], ["--seed", "3"], ["--name=x"]])
def test_options_that_would_change_a_row_are_refused(place, options):
    with pytest.raises(ConfigError, match=r"would change small\.bias\.0, expected options such as --data\.root"):
        train.Trainer(place / "runs", options, threads=1).train(plans.plan(), jobs=1)


def test_a_row_counts_for_the_settings_that_it_was_made_with(place):
    first, second, _ = plans.plan()
    rows.keep(first, LINE)
    rows.keep(second, {**LINE, "test/acc": 0.7})
    assert rows.find(first)["test/acc"] == 0.5
    older = {k: v for k, v in first.settings.items() if k != "data.mixup"}  # a setting that did not exist then
    assert rows.same(older, first.settings)
    assert not rows.same({**older, "data.mixup": 0.2}, first.settings)
    assert rows.same({**older, "data.scale": [0.5, 1.0], "trainer.precision": "32-true"}, first.settings)
    crops = {**older, "data.augment": "resized_crop"}
    assert not rows.same({**crops, "data.scale": [0.5, 1.0]}, crops)
    assert not rows.same({**older, "trainer.precision": "bf16-mixed"}, first.settings)
    (place / "base.yaml").write_text(BASE.replace("batch_size: 8", "batch_size: 4"))
    changed = plans.plan()
    assert [rows.find(run) for run in changed] == [None] * 3
    assert not rows.complete(None, first)
    assert not rows.complete({"sizes": [{"rows": 24, "cols": 24}]}, first)  # no ablation
    assert not rows.complete({"sizes": [{"rows": 32, "cols": 24}], "ablation": []}, first)
    assert rows.complete({"sizes": [{"rows": 24, "cols": 24}], "ablation": []}, first)
    rows.keep(changed[0], {**LINE, "test/acc": 0.6})
    assert [row["test/acc"] for row in rows.read("small")] == [0.7, 0.6]  # the older line of the run is gone


@pytest.mark.slow
def test_the_driver_trains_what_is_missing_and_goes_on_after_a_stop(place, monkeypatch):
    one, _, none = plans.plan()
    trainer = train.Trainer(place / "runs", ["--data.num_workers", "-1"], threads=1)
    (problem,) = trainer.train([none, one], jobs=1)  # the second is not started
    assert problem.startswith("small.none.0: train.py ended with 2 (data.num_workers: expected ")
    assert problem.endswith(f", see {place / 'runs' / 'small.none.0.log'}")
    assert rows.read("small") == []
    assert not (place / "runs" / "small.bias.0.log").exists()

    calls = []

    def call(self, run, command):  # in processes that need not import everything anew
        calls.append(command)
        return preloaded.run([str(train.SCRIPTS / command[0]), *command[1:]], place, self.environment)[0]

    monkeypatch.setattr(train.Trainer, "_call", call)
    trainer = train.Trainer(place / "runs", [], threads=1)
    assert trainer.train([one], jobs=1) == []
    (row,) = rows.read("small")
    assert len(row["val/acc"]) == row["epochs"] == 2
    assert {r["off"] for r in row["ablation"]} == {"nothing", "bias"}
    assert {(r["rows"], r["rule"]) for r in row["sizes"]} == {
        (16, "trained size"), (24, "clamp"), (24, "interpolate"), (24, "geometric"),
    }  # fmt: skip
    assert row["sizes"][0]["top1"] == pytest.approx(row["test/acc"])
    assert trainer.train([one], jobs=1) == []
    assert [command[0] for command in calls] == ["train.py", "evaluate.py"]  # what has its line is passed over

    with (trainer.runs / f".{one.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows.keep(one, LINE)
        assert trainer.train([one], jobs=1) == []  # another process is at it
    assert len(calls) == 2
    results = trainer.runs / one.name / "version_0" / "results.json"
    whole = results.read_text()
    for text in ("", "[]", '{"test/acc": 0.5}'):
        results.write_text(text)
        (problem,) = trainer.train([one], jobs=1)
        assert problem.startswith(f"{one.name}: {'parameters' if text else results}: ")
        assert rows.read("small")[0]["test/acc"] == 0.5
        assert problem.endswith(f", see {trainer.runs / one.name}.log")
    results.write_text(whole)
    shutil.copytree(results.parent, begun := results.parent.with_name("version_1"))  # begun anew, though it had ended
    (begun / "results.json").unlink()
    assert trainer.train([one], jobs=1) == []
    assert rows.read("small")[0]["test/acc"] == row["test/acc"]
    shutil.rmtree(begun)
    del calls[2:]

    results.unlink()  # as if it had been killed before its test
    rows.keep(one, {key: value for key, value in row.items() if key not in ("row", "seed", "settings", "sizes")})
    assert trainer.train([one], jobs=1) == []
    assert calls[2][-2:] == ["--ckpt_path", str(trainer.runs / one.name / "version_0" / "checkpoints" / "last.ckpt")]
    (resumed,) = rows.read("small")
    assert "seconds" not in resumed
    for key in ("test/acc", "test/loss", "val/acc", "sizes", "ablation"):
        assert resumed[key] == row[key]

    (place / "experiments" / "other.yaml").write_text(SMALL.replace("  bias:", "  again:"))
    (again,) = plans.plan(["other.again.0"])
    assert trainer.train([again], jobs=1) == []  # the same run in another group is not trained anew
    assert len(calls) == 5
    assert rows.read("other")[0]["test/acc"] == row["test/acc"]
    (place / "experiments" / "other.yaml").unlink()

    (place / "base.yaml").write_text(BASE.replace("batch_size: 8", "batch_size: 6"))
    changed = plans.plan()[0]
    assert trainer.train([changed], jobs=1) == []  # what was trained with other settings is no part of it
    assert "--ckpt_path" not in calls[5]
    assert rows.read("small")[0]["settings"]["data.batch_size"] == 6
    assert len(rows.read("small")[0]["val/acc"]) == 2


def test_the_tables_of_the_pages_follow_from_the_results():
    for page in tables.PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        assert "<!-- table: " in text
        assert tables.fill(text) == text, f"{page}: run scripts/experiments.py --tables"


def test_the_figures_of_the_prose_are_those_of_the_tables():
    """Each is a cell of a generated table, or the difference of two that stand in the same item."""
    text = (REPOSITORY / "RESULTS.md").read_text(encoding="utf-8")
    cells = set(re.findall(r"\d+\.\d+", "".join(re.findall(r"<!-- table: .*?<!-- end -->", text, re.DOTALL))))
    section = text.split("## CIFAR-100: what a position scheme is worth")[1].split("###")[0]
    items = re.findall(r"^\* .*?(?=^\* |\Z)", section, re.DOTALL | re.MULTILINE)
    assert len(items) > 3
    for item in items:
        figures = re.findall(r"\d+\.\d+", item)
        known = [Decimal(f) for f in figures if f in cells]
        apart = {abs(a - b) for a in known for b in known}
        assert [f for f in figures if f not in cells and Decimal(f) not in apart] == [], item


def test_what_is_said_of_the_weights_is_their_line():
    """The card of the package's weights, the README and the head of the config, against ``results/positions.jsonl``."""
    name = "vitrel_micro_patch4_32.cifar100"
    card = (REPOSITORY / "vitrel" / "weights" / name / "README.md").read_text(encoding="utf-8")
    seed = int(re.search(r"seed (\d+)\n", card)[1])
    lines = {row["seed"]: row for row in rows.read("positions") if row["row"] == "bias_kernel"}
    (top1,) = (size["top1"] for size in lines[seed]["sizes"] if size["rule"] == "trained size")  # in float32
    assert f"{top1:.4f} top-1" in card
    top5 = float(re.search(r"top-1, ([\d.]+) top-5 \(in float32\)", card)[1])  # to the digit in tests/test_zoo.py
    assert top5 == pytest.approx(lines[seed]["test/acc5"], abs=5e-4)
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert f"tested in float32 they have {100 * top1:.2f} % top-1" in page
    head = (REPOSITORY / "configs" / "cifar100.yaml").read_text(encoding="utf-8")
    assert f"10 epochs: {lines[0]['test/acc']:.3f} top-1 ({lines[0]['test/acc5']:.3f} top-5)" in head


def test_a_table_says_what_it_holds(place):
    one, two, _ = plans.plan()
    sizes = [{"rows": 48, "cols": 48, "rule": r, "top1": t} for r, t in (("clamp", 0.2), ("interpolate", 0.45))]
    sizes.insert(0, {"rows": 32, "cols": 32, "rule": "trained size", "top1": 0.48})
    rows.keep(one, {**LINE, "sizes": sizes})
    other = [{**size, "top1": 0.6} if size["rule"] == "trained size" else size for size in sizes]
    rows.keep(two, {**LINE, "test/acc": 0.6, "sizes": other})
    found, missing = tables.by_row("small")
    assert missing == ["none (seed 0)"]
    assert tables.percent(found["bias"]) == "55.0 (50.0, 60.0)"
    assert tables.kept(found["bias"]) == "84.4"  # the mean of 93.75 and 75
    parts = [{**sizes[0]}, {**sizes[2], "top1": 0.24}, {**sizes[1], "rule": "geometric", "top1": 0.36}]
    assert tables.kept([(one, {"sizes": parts})]) == "50.0 (75.0 geometric)"
    assert tables.kept([(one, {"sizes": [parts[0], {**parts[1], "rule": "none"}]})]) == "50.0"
    assert tables.fill("a\n<!-- table: cost -->\nold\n<!-- end -->\nb").startswith(
        "a\n<!-- table: cost -->\n| none = 1 |"
    )
    with pytest.raises(ConfigError, match="table 'cost': there is no '<!-- end -->' below it"):
        tables.fill("<!-- table: cost -->\ntext\n<!-- table: cost -->\n<!-- end -->")
    with pytest.raises(ConfigError, match="no table is called 'nothing'"):
        tables.fill("<!-- table: nothing -->\n<!-- end -->")
    made = tables._group("small")
    assert "| `bias` | rel_pos bias | 1,234 | 10.0 25.0 | 55.0 (50.0, 60.0) |" in made
    assert made.endswith("Not trained so far: none (seed 0).")


def test_terms_switched_off_stand_beside_those_left_out_of_training(place):
    yaml = """config: base.yaml
settings: {trainer.max_epochs: 2}
rows:
  txl: {model.rel_pos: txl, ablate: true}
  without_v: {model.rel_pos: {terms: [query, u]}}
  without_u: {model.rel_pos: {terms: [query, v]}}
"""
    (place / "experiments" / "terms.yaml").write_text(yaml)
    whole, without_v, _ = plans.plan(["terms"])
    off = [{"off": name, "top1": top1} for name, top1 in (("nothing", 0.501), ("u", 0.4), ("v", 0.3))]
    rows.keep(whole, {**LINE, "ablation": off})
    rows.keep(without_v, {**LINE, "test/acc": 0.45})
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables.terms().splitlines()[2:5]] == [
        ["nothing", "50.0", "50.1", "query+u+v"], ["u", "", "40.0", ""], ["v", "45.0", "30.0", "query+u"],
    ]  # fmt: skip
    assert tables.terms().endswith("Not trained so far: without_u (seed 0).")


def test_the_command_line_lists_and_refuses(tmp_path):
    def script(*words):
        return preloaded.run([str(REPOSITORY / "scripts" / "experiments.py"), *words], tmp_path, dict(os.environ))

    status, said = script("--list")
    assert status == 0, said
    assert [line.split()[0] for line in said.splitlines()] == [run.name for run in plans.plan()]
    status, said = script("--run", "nothing")
    assert status == 2
    assert said.startswith("error: there is no experiment 'nothing'; the groups are ")
    assert said.count("\n") == 1


def test_a_line_is_plain_data(place):
    one = plans.plan()[0]
    rows.keep(one, LINE)
    assert json.loads((place / "results" / "small.jsonl").read_text())["settings"] == one.settings
