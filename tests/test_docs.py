"""The pages say what the code does."""

import itertools
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from vitrel.position import PositionTerms
from vitrel.relpos import DISTANCES, PRESETS, RelPos
from vitrel.resize import RESIZE
from vitrel.terms import TERMS
from vitrel.training.config import parse

PAGE = (Path(__file__).parents[1] / "docs" / "presets.md").read_text(encoding="utf-8")


def test_every_preset_is_listed_with_its_parameters():
    listed = {}
    for line in PAGE.splitlines():
        if match := re.match(r"\| `(\w+)` \|", line):
            cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
            listed[match[1]] = int(cells[3])
    counted = {
        name: sum(p.numel() for p in PositionTerms(RelPos.preset(name), 384, 6, 64, (14, 14)).parameters())
        for name in PRESETS
    }
    assert listed == counted


def test_every_term_and_choice_is_named():
    for name in [*TERMS, *DISTANCES, *RESIZE]:
        assert re.search(rf"\b{name}\b", PAGE), name


TROUBLE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SETTINGS = re.findall(r"`(--(?:model|optim|trainer|data)\.[^`]+)`", TROUBLE)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_that_mends_something_is_one(setting):
    words = shlex.split(setting)
    for name, value in itertools.zip_longest(words[::2], words[1::2], fillvalue="1"):
        if name == "--model.checkpoint":
            continue
        parse([name, value])


def test_the_commands_that_show_a_cause_are_understood(monkeypatch):
    """Each is run up to its first look at a run, which is not there, or to the settings of a training."""
    commands = [line for block in re.findall(r"```bash\n(.*?)```", TROUBLE, re.S) for line in block.splitlines()]
    assert {shlex.split(c)[1] for c in commands} == {
        f"scripts/{n}.py" for n in ("train", "evaluate", "bias_maps", "benchmark")
    }
    for command in commands:
        script, *options = shlex.split(command)[1:]
        if script == "scripts/train.py":
            parse(options, folders=[Path(__file__).parents[1] / "configs"])
        elif script != "scripts/benchmark.py":
            monkeypatch.setattr(sys, "argv", [script, *options])
            with pytest.raises(SystemExit) as end:
                runpy.run_path(str(Path(__file__).parents[1] / script), run_name="__main__")
            assert end.value.code == 2


def test_the_python_of_the_page_does_what_it_says():
    (planted,) = [block for block in re.findall(r"```python\n(.*?)```", TROUBLE, re.S) if "small" in block]
    exec("import timm, vitrel\n" + planted, {})
