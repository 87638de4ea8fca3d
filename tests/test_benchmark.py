"""The benchmark: what it compares is comparable, its ratios are those of pairs, and the pages' commands are its own."""

import contextlib
import io
import json
import re
import runpy
import shlex
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from benchmark import arguments
from benchmarks.attention import WIDTH, naive_txl, scheme
from benchmarks.memory import fresh
from benchmarks.models import models
from benchmarks.pairs import paired, ratio_rows

from vitrel.attend import reference
from vitrel.attention import RelativeAttention2d
from vitrel.grid import Grid

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / name for name in ("README.md", "RESULTS.md", "docs/troubleshooting.md")]
COMMAND = re.compile(r"python scripts/benchmark\.py[^`#]*")
COMMANDS = [found.group().replace("\\\n", "") for page in PAGES for found in COMMAND.finditer(page.read_text("utf-8"))]
MICRO = ["--arch", "vitrel_micro_patch4_32", "--batch", "2", "--repeats", "1"]


def benchmark(monkeypatch, *words):
    """Exit status of the script with these options, in this process."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(REPOSITORY / "scripts" / "benchmark.py"), run_name="__main__")
    return end.value.code


@pytest.fixture
def here(monkeypatch):
    """What would be measured in fresh processes is measured in this one, and the commands are kept."""
    commands = []

    def measured(words):
        commands.append(words)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert benchmark(monkeypatch, *words) == 0
        return float(printed.getvalue())

    for name in ("memory", "models", "strips"):
        monkeypatch.setattr(f"benchmarks.{name}.fresh", measured)
    return commands


def test_ratios_are_taken_pair_by_pair():
    rows = ratio_rows({"none": [1.0, 2.0, 4.0], "slow": [3.0, 2.0, 8.0]}, "none", grid="8x8")
    assert rows[0] == {"grid": "8x8", "name": "none", "seconds": 2.0, "ratio": 1.0, "from": 1.0, "to": 1.0}
    assert rows[1] == {"grid": "8x8", "name": "slow", "seconds": 3.0, "ratio": 2.0, "from": 1.0, "to": 3.0}


def test_steps_are_taken_in_turn_after_a_round_that_is_not_counted():
    order = []
    seconds = paired({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, lambda: None)
    assert order == ["a", "b"] * 3
    assert [len(s) for s in seconds.values()] == [2, 2]


def test_the_naive_four_terms_are_those_of_the_scheme():
    """A comparison with something that computes less would be worth nothing."""
    grid = Grid(3, 4)
    attn = RelativeAttention2d(2 * WIDTH, 2, grid_size=(3, 4), rel_pos="txl")
    terms = attn.position_terms
    for parameter in terms.parameters():
        torch.nn.init.normal_(parameter)
    q, k, v = torch.randn(3, 2, 2, 12, WIDTH)
    position = terms((3, 4))
    rows, cols = torch.arange(12) // 4, torch.arange(12) % 4
    r = terms.query.table_h[:, rows[:, None] - rows + 2] + terms.query.table_w[:, cols[:, None] - cols + 3]
    ours = reference(q, k, v, position, grid, grid)
    torch.testing.assert_close(naive_txl(q, k, v, r, terms.u[:, None], terms.v[:, None]), ours, rtol=1e-4, atol=1e-4)


def test_peers_have_the_body_of_the_model():
    args = Namespace(presets=["learned", "bias", "txl:prefix=2"], backends=["auto", "dense"], peers=True)
    built = models("vitrel_micro_patch4_32", args)
    assert list(built) == [
        "none", "learned", "bias", "bias dense", "txl:prefix=2", "txl:prefix=2 dense", "timm vit_relpos", "timm rope",
    ]  # fmt: skip
    products = {
        name: sum(m.weight.numel() for m in model.blocks.modules() if isinstance(m, torch.nn.Linear))
        for name, model in built.items()
    }
    assert set(products.values()) == {products["none"]}
    tokens = {n: len(built[n].get_intermediate_layers(torch.randn(1, 3, 32, 32))[0][0]) for n in ("none", "learned")}
    assert set(tokens.values()) == {64}
    assert built["txl:prefix=2"].num_prefix_tokens == 2


@pytest.mark.parametrize(
    ("preset", "terms", "table", "prefix"),
    [
        ("bias", ("bias",), "separable", 0),
        ("bias:joint", ("bias",), "joint", 0),
        ("shaw:prefix=3", ("query", "value"), "separable", 3),
    ],
)
def test_a_preset_may_carry_a_table_and_prefix_tokens(preset, terms, table, prefix):
    spec, tokens = scheme(preset)
    assert (spec.terms, spec.table, tokens) == (terms, table, prefix)
    assert spec.prefix == ("learned" if prefix else "none")


def test_attention_has_a_row_for_each_name_grid_and_pass(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "rows.json"
    words = ["--what", "attention", "--grids", 2, 3, "--batch", 1, "--repeats", 1, "--peers", "--json", kept]
    assert benchmark(monkeypatch, *words, "--presets", "bias", "txl:prefix=2", "--backends", "auto", "written") == 0
    rows = json.loads(kept.read_text())["rows"]
    peers = ["timm RelPosBias", "timm rope", "timm samvit", "naive txl"]
    names = ["none", "bias", "bias written", "txl:prefix=2", "txl:prefix=2 written", *peers]
    assert [(r["grid"], r["pass"], r["name"]) for r in rows] == [
        (grid, way, name) for grid in ("2x2", "3x3") for way in ("forward", "forward+backward") for name in names
    ]
    assert all(row["ratio"] == 1 for row in rows if row["name"] == "none")
    assert all(row["ratio"] > 0 and row["seconds"] > 0 for row in rows)
    assert {row["backend"] for row in rows if row["name"].endswith("written")} == {"written"}
    assert capsys.readouterr().out.count("\n") == len(rows) + 2


@pytest.mark.slow
@pytest.mark.parametrize("what", ["train", "model"])
def test_whole_models_have_their_peaks_taken_one_by_one(what, tmp_path, monkeypatch, here):
    kept = tmp_path / "rows.json"
    words = ["--what", what, *MICRO, "--presets", "bias", "--backends", "auto", "dense", "--peers"]
    assert benchmark(monkeypatch, *words, "--peak", "--json", kept) == 0
    rows = json.loads(kept.read_text())["rows"]
    names = ["none", "bias", "bias dense", "timm vit_relpos", "timm rope"]
    assert [row["name"] for row in rows] == names
    assert all(row["peak MB"] >= 0 for row in rows)
    assert [command[command.index("--only") + 1] for command in here] == [n for n in names for _ in range(3)]


def test_memory_is_what_goes_beyond_plain_attention(tmp_path, monkeypatch, here):
    kept = tmp_path / "rows.json"
    words = ["--what", "memory", "--grids", 4, "--presets", "bias", "--peers", "--repeats", 1, "--json", kept]
    assert benchmark(monkeypatch, *words) == 0
    rows = json.loads(kept.read_text())["rows"]
    names = ["none", "bias", "timm RelPosBias", "timm rope", "timm samvit"]
    assert [(r["pass"], r["name"]) for r in rows] == [(w, n) for w in ("forward", "forward+backward") for n in names]
    assert [row["extra MB"] for row in rows if row["name"] == "none"] == [0, 0]


@pytest.mark.slow
def test_strips_are_read_at_every_height(tmp_path, monkeypatch, here):
    kept = tmp_path / "rows.json"
    words = ["--what", "strips", "--presets", "bias", "--rows", 14, 28, "--repeats", 1, "--json", kept]
    assert benchmark(monkeypatch, *words) == 0
    rows = json.loads(kept.read_text())["rows"]
    ways = [("strips, memory 28", 14), ("strips, memory 28", 28), ("strips, memory 0", 14), ("strips, memory 0", 28)]
    assert [(r["how"], r["rows"]) for r in rows] == [("one pass", 14), *ways]
    assert [r["time"] for r in rows if r["rows"] == 14] == [1, 1, 1]


@pytest.mark.slow
def test_a_fresh_process_gives_its_peak_and_says_what_went_wrong():
    assert fresh(["--what", "memory", "--presets", "bias", "--only", "bias", "32", "1"]) > 1
    with pytest.raises(ValueError, match="bias:wide"):
        fresh(["--what", "memory", "--presets", "bias:wide", "--only", "bias", "8", "1"])


@pytest.mark.slow
def test_the_loader_is_compared_with_batches_in_memory(tmp_path, monkeypatch):
    kept = tmp_path / "rows.json"
    words = ["--what", "loader", "--config", "digits.yaml", "--steps", 2, "--repeats", 1, "--json", kept]
    assert benchmark(monkeypatch, *words, "--trainer.accelerator", "cpu") == 0
    assert [row["name"] for row in json.loads(kept.read_text())["rows"]] == ["memory", "loader"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--what", "attention", "--peak"], "--peak: is for --what model and train"),
        (["--what", "train", "--peak", "--compile"], "--peak: on the CPU the compiler's own memory would be in it"),
        (["--repeats", "0"], "--repeats: expected at least 1, got 0"),
        (["--batch", "-1"], "--batch: expected at least 0, got -1"),
        (["--what", "train", "--model.rel_pos", "bias"], "unrecognized arguments: --model.rel_pos bias"),
        (["--what", "attention", "--grids", "2", "--presets", "bias:wide"], "--presets bias:wide: 'wide' is unknown"),
        (["--what", "attention", "--grids", "2", "--presets", "no"], "preset 'no' is unknown"),
        (["--what", "train", "--arch", "vitrel_no"], "vitrel_no"),
        (["--what", "loader", "--config", "no.yaml"], "no.yaml"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(words, message, monkeypatch, capsys):
    assert benchmark(monkeypatch, *words) == 2
    out, err = capsys.readouterr()
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_pages_are_understood(command):
    for kind in ("train", "model") if "train|model" in command else ("",):
        words = shlex.split(command.replace("train|model", kind).replace("PRESETS", "bias txl"))
        args, rest = arguments(words[2:])
        for preset in args.presets:
            assert preset == "learned" or scheme(preset)
        assert not rest or args.what == "loader"


def test_the_pages_have_commands():
    assert len(COMMANDS) >= 7
