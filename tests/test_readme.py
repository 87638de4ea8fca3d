"""Every command of the README runs; trainings are cut short."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import preloaded
import pytest
from PIL import Image
from timm.models import get_pretrained_cfg

import vitrel  # noqa: F401 (registers the names)

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8").replace("\\\n", "")  # continued lines in one
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.S)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line.strip()]
CIFAR100 = get_pretrained_cfg("vitrel_micro_patch4_32.cifar100").label_names
SHORT = [
    "--trainer.max_epochs",
    "1",
    "--trainer.limit_train_batches",
    "2",
    "--trainer.limit_val_batches",
    "1",
    "--data.val_size",
    "0.34",
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder that looks like the repository to a command, with a data set of class folders at DIR."""
    place = tmp_path_factory.mktemp("readme")
    for name in ("scripts", "configs"):
        (place / name).symlink_to(REPOSITORY / name)
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in CIFAR100:
            folder = place / "DIR" / split / label
            folder.mkdir(parents=True)
            for i in range(3):
                Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return place


def python(arguments, place):
    status, output = preloaded.run(arguments, place, {**os.environ, "WANDB_MODE": "disabled"})
    assert status == 0, f"{arguments}: {output}"


def test_the_readme_has_commands_of_each_kind():
    assert {"make train", "make test"} <= set(COMMANDS)
    assert {shlex.split(c)[1] for c in COMMANDS if c.startswith("python")} == {
        "scripts/train.py",
        "scripts/bias_maps.py",
        "scripts/evaluate.py",
        "scripts/export.py",
    }


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_knows_the_target(command):
    """What the targets do is run by the other tests; here make would call itself."""
    made = subprocess.run(
        [*shlex.split(command), "--dry-run"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert ".venv/bin/python" in made.stdout


@pytest.mark.slow
def test_the_commands_and_the_python_run_in_order(workplace):
    for kind, text in BLOCKS:
        if kind == "python":
            python(["-c", text], workplace)
        for line in text.splitlines() if kind == "bash" else []:
            words = shlex.split(line)
            if words[:1] == ["python"]:
                short = SHORT if words[1] == "scripts/train.py" else []
                more = ["--trainer.max_epochs", "2"] if "--ckpt_path" in words else []  # the run before is finished
                python([*words[1:], *short, *more], workplace)
    assert list(workplace.glob("runs/digits/version_0/bias_maps/*.png"))


def test_every_file_of_the_map_is_there_and_every_module_is_in_the_map():
    named = re.findall(r"^\| (`.*?`) \|", README.split("## Files")[1], flags=re.M)
    paths = {path for cell in named for path in re.findall(r"`([^`]+)`", cell)}
    folder = "vitrel/"
    for path in paths:
        found = (REPOSITORY / path).exists() or (REPOSITORY / folder / path).exists()
        assert found, path
    modules = {p.name for p in (REPOSITORY / "vitrel").glob("*.py")} - {"__init__.py"}
    assert modules == {Path(p).name for p in paths if p.endswith(".py")}


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (REPOSITORY / target).exists(), target
