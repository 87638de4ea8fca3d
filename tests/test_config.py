"""Settings from files and options: what they become, and every message once."""

import re
import runpy
from pathlib import Path

import pytest

from vitrel.training.checks import check
from vitrel.training.config import dump, find_config, from_dict, parse
from vitrel.training.fileio import ConfigError, read_yaml
from vitrel.training.settings import TrainConfig

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = sorted(p.name for p in CONFIGS.glob("*.yaml"))


def refused(*options):
    with pytest.raises(ConfigError) as e:
        parse(options, [CONFIGS])
    assert "\n" not in str(e.value)
    return str(e.value)


def test_there_are_the_configs():
    assert NAMES == ["cifar10.yaml", "cifar100.yaml", "digits.yaml", "folder.yaml", "strips.yaml"]


@pytest.mark.parametrize("name", NAMES)
def test_every_config_builds_and_survives_the_round_trip(name, tmp_path):
    config = parse(["--config", name], [CONFIGS])
    check(config)
    assert config.name == name.removesuffix(".yaml")
    assert config.optim.position_lr_scale == 10
    (tmp_path / "config.yaml").write_text(dump(config))
    assert parse(["--config", str(tmp_path / "config.yaml")]) == config
    assert from_dict(config.as_dict()) == config
    assert (CONFIGS / name).read_text().startswith("# ")
    assert "python scripts/train.py" in (CONFIGS / name).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_spoiled_config_is_refused_or_read_the_same(name, tmp_path):
    text = (CONFIGS / name).read_text()
    spoiled = tmp_path / "c.yaml"

    def outcome(content):
        spoiled.write_text(content, encoding="utf-8")
        try:
            return parse(["--config", str(spoiled)])
        except ConfigError as e:
            return str(e)

    assert outcome("\ufeff" + text) == parse(["--config", name], [CONFIGS])
    assert "key 'optim' is repeated" in outcome(text + "optim:\n  lr: 1\n")
    assert outcome(text + "zz_unknown_key: 1\n").startswith("unknown setting 'zz_unknown_key'")
    tabbed = outcome(text.replace("\n  batch_size", "\n\tbatch_size"))
    assert "a tab indents this line" in tabbed
    assert f"{spoiled}, line {text[: text.index('  batch_size')].count(chr(10)) + 1}" in tabbed


def test_options_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("optim:\n  lr: 1e-2\n  warmup: 0.3\ntrainer:\n  max_epochs: 3\n")
    config = parse(["--config", str(tmp_path / "c.yaml"), "--optim.lr", "5e-1", "--trainer.devices", "2"])
    assert (config.optim.lr, config.optim.warmup, config.optim.weight_decay) == (0.5, 0.3, 0.05)
    assert config.trainer == {"max_epochs": 3, "gradient_clip_val": 1.0, "devices": 2}


def test_any_argument_of_the_model_is_a_setting(tmp_path):
    config = parse(["--model.img_size", "[24, 32]", "--model.drop_path_rate", "0.1", "--model.depth", "3"])
    assert (config.model.img_size, config.model.drop_path_rate, config.model.kwargs) == ([24, 32], 0.1, {"depth": 3})
    (tmp_path / "c.yaml").write_text("model:\n  depth: 3\n  kwargs:\n    qk_norm: true\n")
    assert parse(["--config", str(tmp_path / "c.yaml")]).model.kwargs == {"depth": 3, "qk_norm": True}


@pytest.mark.parametrize(("word", "value"), [("on", True), ("off", False), ("yes", True), ("no", False)])
def test_on_and_off_are_booleans_where_one_is_expected(word, value, tmp_path):
    (tmp_path / "c.yaml").write_text(f"data:\n  download: {word}\ntrainer:\n  enable_progress_bar: {word}\n")
    config = parse(["--config", str(tmp_path / "c.yaml")])
    assert config.data.download is value
    assert config.trainer["enable_progress_bar"] is value
    assert parse(["--data.download", word]).data.download is value
    (tmp_path / "c.yaml").write_text(f"model:\n  class_token: {word}\n")
    assert parse(["--config", str(tmp_path / "c.yaml")]).model.kwargs == {"class_token": value}
    assert parse(["--model.keep_absolute", word]).model.kwargs == {"keep_absolute": value}
    (tmp_path / "c.yaml").write_text("logger:\n  mode: off\n")
    assert parse(["--config", str(tmp_path / "c.yaml")]).logger.mode == "off"


def test_a_config_is_found_as_a_path_then_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("digits", [CONFIGS]) == find_config("digits.yaml", [CONFIGS]) == CONFIGS / "digits.yaml"
    Path("digits.yaml").write_text("seed: 5\n")
    assert find_config("digits.yaml", [CONFIGS]) == Path("digits.yaml")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar.yaml", "there is no 'cifar.yaml' in {here}, {configs}; did you mean cifar10?"),
        ("nope.yaml", "there is no 'nope.yaml' in {here}, {configs}; there are {names}"),
        ("nope", "there is no 'nope' in {here}, {configs}; there are {names}"),
        ("sub/nope.yaml", "there is no 'sub/nope.yaml' in {here}/sub, {configs}; there are {names}"),
        ("/none/nope.yaml", "there is no '/none/nope.yaml' in /none"),
        ("", "expected a path or a name, got ''"),
        (".", ". is a folder; give a YAML file"),
        ("x" * 300, "there is no '" + "x" * 300 + "' in {here}, {configs}; there are {names}"),
        ("a\0b", "there is no 'a\\x00b' in {here}, {configs}; there are {names}"),
    ],
)
def test_a_config_that_is_not_there(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    expected = message.format(here=tmp_path, configs=CONFIGS, names=", ".join(NAMES))
    assert refused("--config", name) == f"--config: {expected}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optim.lrr", "1"], "unknown setting 'optim.lrr'; did you mean optim.lr?"),
        (["--lr", "1"], "unknown setting 'lr'; did you mean optim.lr?"),
        (["--model.dept", "1"], "unknown setting 'model.dept'; did you mean model.depth?"),
        (["--trainer.max_epoch", "1"], "unknown setting 'trainer.max_epoch'; did you mean trainer.max_epochs?"),
        (["--zzz", "1"], "unknown setting 'zzz'; --help lists all settings"),
        (["--data.batch_size", "1.5"], "data.batch_size: expected int, got 1.5"),
        (["--data.name", "cifar"], "data.name: expected one of digits, cifar10, cifar100, folder, fake, got cifar"),
        (["--model.class_token", "ture"], "model.class_token: expected bool, got ture"),
        (["--model.kwargs.keep_absolute", "1"], "model.keep_absolute: expected bool, got 1"),
        (["--data.scale", "[1, x]"], "data.scale: expected float, got x"),
        (["--trainer.max_epochs", "many"], "trainer.max_epochs: expected int or null, got many"),
        (["--trainer.callbacks", "[]"], "trainer.callbacks is set by the run itself"),
        (["--trainer.logger", "false"], "trainer.logger is set by the run itself; use logger.mode"),
        (["--data", "x.yaml"], "--data is a section; set one of its members, for example --data.name"),
        (["--seed"], "seed: expected one argument"),
        (["--config"], "--config: expected one argument"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_mistake_in_the_options_is_one_line(options, message):
    assert refused(*options) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: 3", "data: expected a section with settings below it, got 3"),
        ("trainer: 3", "trainer: expected a mapping of names to values, got 3"),
        ("seed:", "seed: expected int, got null; give a value or remove the line"),
        ("optim:\n  lr: fast", "optim.lr: expected float, got fast"),
        ("model:\n  rel_pos: 3", "model.rel_pos: expected str or dict or null, got 3"),
        ("learning_rate: 3", "unknown setting 'learning_rate'; --help lists all settings"),
        ("data:\n  lr: 3", "unknown setting 'data.lr'; did you mean optim.lr?"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    assert refused("--config", str(tmp_path / "c.yaml")) == message


def test_case_configs(shared):
    folder = shared / "cases" / "configs"
    assert "line 20: key 'optim' is repeated" in refused("--config", str(folder / "duplicate_top_key.yaml"))
    assert "tab_indent.yaml, line 13: a tab" in refused("--config", str(folder / "tab_indent.yaml"))
    assert read_yaml(folder / "sci_float_1e-3.yaml")["optim"]["lr"] == 0.001
    assert read_yaml(folder / "utf8_bom.yaml")["seed"] == 0
    unknown = refused("--config", str(folder / "unknown_top_key.yaml"))
    assert unknown.startswith("unknown setting 'model.name'")
    assert "; unknown too: " in unknown
    assert unknown.endswith(", learning_rate")
    assert read_yaml(folder / "on_off_boolean.yaml")["logger"]["wandb"] == "off"


@pytest.mark.parametrize("name", NAMES)
def test_case_mutations(shared, name, tmp_path):
    """What ``mutate.py`` makes of our own configs."""
    script = runpy.run_path(str(shared / "cases" / "configs" / "mutate.py"))
    spoiled, seen = tmp_path / "c.yaml", set()
    for fault, text, expected in script["mutations"]((CONFIGS / name).read_text()):
        if text is None:
            assert fault == "on_off_boolean"  # none of our configs sets one; see the test of on and off
            continue
        seen.add(fault)
        spoiled.write_text(text, encoding="utf-8", newline="")
        options = ("--config", str(spoiled))
        if fault == "duplicate_top_key":
            first = text[: text.index("name:")].count("\n") + 1
            assert refused(*options).endswith(f": key 'name' is repeated (first in line {first}); keep one")
        elif fault == "tab_indent":
            line = re.search(r"line (\d+)$", expected)[0]
            assert refused(*options) == f"{spoiled}, {line}: a tab indents this line; use spaces"
        elif fault == "unknown_top_key":
            assert refused(*options) == "unknown setting 'zz_unknown_key'; --help lists all settings"
        elif fault == "sci_float_1e-3":
            section, leaf = expected.split()[0].split(".")
            assert getattr(getattr(parse(options), section), leaf) == 0.001
        else:
            assert fault == "utf8_bom"
            assert parse(options) == parse(["--config", name], [CONFIGS])
    assert seen == {"duplicate_top_key", "tab_indent", "unknown_top_key", "sci_float_1e-3", "utf8_bom"}


def test_a_setting_given_twice_under_two_names_is_refused(tmp_path):
    (tmp_path / "c.yaml").write_text("model:\n  depth: 3\n  kwargs:\n    depth: 4\n")
    assert refused("--config", str(tmp_path / "c.yaml")).startswith("model.depth is given twice")


def test_every_unknown_setting_of_a_file_is_named_at_once(tmp_path):
    (tmp_path / "c.yaml").write_text("optim:\n  lrr: 3\nseeed: 3\ndata:\n  roott: x\n")
    message = "unknown setting 'optim.lrr'; did you mean optim.lr?; unknown too: seeed, data.roott"
    assert refused("--config", str(tmp_path / "c.yaml")) == message


def test_help_and_print_config_end_without_a_run(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in ("model.arch", "data.root", "optim.position_lr_scale", "ckpt_path"))
    assert "gradient_clip_val" in text
    with pytest.raises(SystemExit, match="0"):
        parse(["--print_config", "--seed", "4"])
    assert from_dict({"seed": 4}) == parse(["--seed", "4"])
    assert "seed: 4\n" in capsys.readouterr().out


def test_defaults_are_those_of_the_sections():
    assert parse([]).as_dict() == {**TrainConfig().as_dict(), "name": "digits"}


def test_one_parse_leaves_nothing_for_the_next():
    first = parse(
        ["--data.scale", "[0.1, 0.2]", "--model.depth", "3", "--optim.betas", "[0.5, 0.5]", "--trainer.devices", "2"]
    )
    first.data.scale.append(9.0)
    first.model.kwargs["x"] = 1
    second = parse([])
    second.data.scale.append(9.0)
    second.trainer["x"] = 1
    assert parse([]).as_dict() == {**TrainConfig().as_dict(), "name": "digits"}
