"""A run as a folder to share: it gives the model back, at other sizes too, and is whole or not there."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import preloaded
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from timm.models import _hub

import vitrel
from vitrel.training import export as module
from vitrel.training.config import dump, parse
from vitrel.training.export import export
from vitrel.training.fileio import ConfigError
from vitrel.training.model import save_model_folder

SCRIPT = Path(__file__).parents[1] / "scripts" / "export.py"
LABELS = ["cat", "dog", "newt"]
DATA = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "interpolation": "bilinear", "crop_pct": 0.9}
RESULTS = {
    "test/acc": 0.8125, "test/acc5": 1.0, "data": "folder", "epochs": 7, "versions": {"torch": "2.14.1"},
}  # fmt: skip


def trained(rel_pos="txl+bias", size=(48, 32), **arguments):
    """A small model with random weights and tables, ``size`` in pixels on patches of 4."""
    torch.manual_seed(0)
    body = {"embed_dim": 32, "depth": 2, "num_heads": 2, "class_token": True, "reg_tokens": 2}
    model = timm.create_model(
        "vitrel_micro_patch4_32", num_classes=3, img_size=size, rel_pos=rel_pos, **{**body, **arguments}
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def finished_run(folder, model):
    save_model_folder(model, folder / "model", LABELS, DATA)
    (folder / "results.json").write_text(json.dumps(RESULTS))
    return folder


@pytest.fixture
def run(tmp_path):
    return finished_run(tmp_path / "runs" / "version_0", trained())


def load(folder, **arguments):
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **arguments).eval()


def images(rows, columns, channels=3):
    return torch.randn(2, channels, rows, columns, generator=torch.Generator().manual_seed(1))


def test_the_folder_gives_the_model_back_to_the_bit(run, tmp_path):
    folder = export(run, tmp_path / "shared")
    assert {p.name for p in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert torch.equal(load(folder)(images(48, 32)), trained()(images(48, 32)))
    config = json.loads((folder / "config.json").read_text())
    assert config["label_names"] == LABELS
    assert vitrel.RelPos(**config["model_args"]["rel_pos"]) == vitrel.RelPos.preset("txl+bias")
    known = timm.data.resolve_model_data_config(load(folder))
    assert (tuple(known["mean"]), tuple(known["std"])) == (DATA["mean"], DATA["std"])
    assert known["input_size"] == (3, 48, 32)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.filterwarnings("ignore:a grid of:UserWarning")  # positions beyond the trained ones
@pytest.mark.parametrize("rel_pos", ["bias", "swin", "beit", "txl+value", "cpb", "rope_mixed", "irpe_qkv"])
@pytest.mark.parametrize("resize", ["clamp", "interpolate", "geometric"])
def test_a_grid_of_12_by_8_loads_into_others(tmp_path, rel_pos, resize):
    """From the folder and, strictly, from the state alone; the same size to the bit."""
    spec = {**vitrel.RelPos.of(rel_pos).as_dict(), "resize": resize}
    model = trained(spec)
    folder = export(finished_run(tmp_path / "run", model), tmp_path / "shared")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    for rows, columns in ((8, 8), (16, 16), (12, 8)):
        size = (4 * rows, 4 * columns)
        built = trained(spec, size)
        built.load_state_dict(state, strict=True)
        loaded = load(folder, img_size=size)
        assert loaded.patch_embed.grid_size == (rows, columns)
        assert torch.equal(loaded(images(*size)), built(images(*size)))
        fresh = trained(spec, size).state_dict()
        shapes = {k: v.shape for k, v in loaded.state_dict().items()}
        assert shapes == {k: v.shape for k, v in fresh.items()}
        moved = trained(spec)
        moved.set_input_size(size)
        torch.testing.assert_close(loaded(images(*size)), moved(images(*size)), rtol=0, atol=1e-5)
    assert torch.equal(load(folder, img_size=(48, 32))(images(48, 32)), model(images(48, 32)))


@pytest.mark.parametrize("pos_embed", ["none", "learn"])
def test_other_classes_channels_and_an_absolute_embedding(tmp_path, pos_embed):
    model = trained(pos_embed=pos_embed)
    folder = export(finished_run(tmp_path / "run", model), tmp_path / "shared")
    wider = load(folder, num_classes=5, in_chans=1, img_size=(48, 32))
    assert wider.head.weight.shape == (5, 32)
    assert torch.equal(wider.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)
    assert wider(images(48, 32, channels=1)).shape == (2, 5)
    larger = load(folder, img_size=(64, 32), num_classes=0)
    assert larger.patch_embed.grid_size == (16, 8)
    if pos_embed == "learn":
        assert larger.pos_embed.shape == (1, 3 + 16 * 8, 32)
        assert torch.equal(load(folder).pos_embed, model.pos_embed)


@pytest.mark.parametrize(("rel_pos", "name"), [("swin", "bias.table"), ("txl", "query.table_h"), ("beit", "prefix")])
def test_a_shape_that_cannot_be_is_refused_by_name(tmp_path, rel_pos, name):
    model = trained(rel_pos)
    folder = export(finished_run(tmp_path / "run", model), tmp_path / "shared")
    state = model.state_dict()
    key = f"blocks.1.attn.position.{name}"
    wrong = {**state, key: torch.zeros(5, *state[key].shape[1:])}  # five heads
    message = rf"{key}.*\(\[?5, "
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(wrong)
    safetensors.torch.save_file(wrong, folder / "model.safetensors")
    for arguments in ({}, {"num_classes": 7}, {"img_size": (32, 32)}):
        with pytest.raises(RuntimeError, match=message):
            load(folder, **arguments)


def test_a_table_of_an_even_side_belongs_to_no_grid(run, tmp_path):
    folder = export(run, tmp_path / "shared")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    key = "blocks.0.attn.position.bias.table_w"
    state[key] = torch.zeros(2, 14)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    with pytest.raises(
        RuntimeError, match=rf"{key}: the stored table has shape \(2, 14\), expected \(2, 15\) or one of"
    ):
        load(folder)


def test_from_the_hub_as_from_the_folder(run, tmp_path, monkeypatch):
    folder = export(run, tmp_path / "shared")
    monkeypatch.setattr(_hub, "hf_hub_download", lambda repo_id, filename, **_: str(folder / filename))
    model = timm.create_model("hf-hub:somebody/shared", pretrained=True).eval()
    assert torch.equal(model(images(48, 32)), trained()(images(48, 32)))


def test_the_card_says_when_the_accuracy_is_that_of_validation(run, tmp_path):
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**results, "tested_on": "val"}))
    card = (export(run, tmp_path / "newts") / "README.md").read_text()
    assert "- **Validation accuracy:** 0.8125 top-1, 1.0000 top-5\n" in card
    assert "Test accuracy" not in card


def test_the_card_has_the_measured_accuracy_and_its_snippet_runs(run, tmp_path, monkeypatch, capsys):
    folder = export(run, tmp_path / "newts", license="cc-by-4.0")
    card = (folder / "README.md").read_text()
    assert card.startswith("---\ntags:\n- image-classification\n- timm\n- vitrel\n")
    assert "\nlicense: cc-by-4.0\n" in card
    assert json.loads((folder / "config.json").read_text())["pretrained_cfg"]["license"] == "cc-by-4.0"
    assert "- **Test accuracy:** 0.8125 top-1, 1.0000 top-5\n" in card
    assert "- **Trained on:** folder, 7 epochs\n" in card
    assert "- **Relative position:** bias+query+u+v, separable tables\n" in card
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)).save("image.png")
    (snippet,) = re.findall(r"```python\n(.*?)```", card, flags=re.S)
    assert snippet.startswith("import timm, torch, vitrel")
    exec(snippet, {})
    label, probability = capsys.readouterr().out.split()
    assert label in LABELS
    assert 1 / 3 <= float(probability) <= 1


def test_the_card_has_the_recipe(run, tmp_path):
    options = ["--data.augment", "resized_crop", "--data.scale", "[0.5, 1]", "--trainer.precision", "bf16-mixed"]
    (run / "config.yaml").write_text(dump(parse([*options, "--optim.weight_decay", "0.1", "--seed", "3"])))
    card = (export(run, tmp_path / "newts") / "README.md").read_text()
    assert (
        "weight decay 0.1, position parameters at 10 times the learning rate, warm-up over 10 % of the steps, cosine,"
        " augmentation resized_crop of 50 to 100 % of the area, precision bf16-mixed, seed 3\n"
    ) in card
    (run / "config.yaml").write_text(dump(parse([])))
    card = (export(run, tmp_path / "newts") / "README.md").read_text()
    assert card.split("**Recipe:** ")[1].splitlines()[0].endswith("cosine, augmentation none, seed 0")


def test_models_of_timm_have_a_card_too(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=24, depth=1, num_heads=2, num_classes=3, img_size=32)
    folder = export(finished_run(tmp_path / "run", model), tmp_path / "shared")
    assert "Relative position" not in (folder / "README.md").read_text()
    assert torch.equal(load(folder)(images(32, 32)), model.eval()(images(32, 32)))


@pytest.mark.parametrize("rel_pos", ["bias", pytest.param("txl+key+value", marks=pytest.mark.slow)])
def test_onnx_agrees(tmp_path, rel_pos):
    for name in module.ONNX_PACKAGES:
        pytest.importorskip(name, reason="needs vitrel's extra 'export'")
    import onnxruntime

    model = trained(rel_pos)
    folder = export(finished_run(tmp_path / "run", model), tmp_path / "shared", onnx=True)
    assert "- **ONNX:** `model.onnx`: `images` (batch, 3, 48, 32) to `logits`\n" in (folder / "README.md").read_text()
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    for batch in (1, 4):
        x = images(48, 32).repeat(2, 1, 1, 1)[:batch]
        (got,) = session.run(None, {"images": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(x), rtol=0, atol=1e-4)


def test_an_earlier_export_is_replaced_and_other_files_are_not(run, tmp_path):
    target = tmp_path / "shared"
    target.mkdir()  # an empty folder is as good as none
    export(run, target)
    (target / "model.onnx").write_bytes(b"old")
    export(run, target)
    assert {p.name for p in target.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="shared: is not empty and no earlier export; give a new folder"):
        export(run, target)
    with pytest.raises(ConfigError, match="model: is not empty and no earlier export"):
        export(run, run / "model")
    with pytest.raises(ConfigError, match=r"notes\.txt: is a file; give a folder"):
        export(run, target / "notes.txt")
    assert (target / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("earlier", [False, True])
def test_nothing_is_left_half_written(run, tmp_path, monkeypatch, earlier):
    target = tmp_path / "there" / "shared"
    if earlier:
        export(run, target)
    before = {p.name: p.read_bytes() for p in target.iterdir()} if earlier else {}

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "generate_readme", fail)
    with pytest.raises(OSError, match="No space left"):
        export(run, target)
    assert [p.name for p in target.parent.iterdir()] == (["shared"] if earlier else [])
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before if earlier else not target.exists()


def mistakes(run):
    """A fault in a run by its name: what to do to the run, and the line that says it."""
    model, results = run / "model", run / "results.json"
    config, weights = model / "config.json", model / "model.safetensors"
    return {
        "gone": (lambda: shutil.rmtree(run), "no such folder; give a run folder, for example runs/digits"),
        "unfinished": (lambda: shutil.rmtree(model), r"not a finished run, there is no model/config\.json; a run"),
        "unmeasured": (lambda: results.unlink(), r"there is no results\.json"),
        "damaged config": (lambda: config.write_text("{"), r"model/config\.json: damaged JSON"),
        "damaged results": (lambda: results.write_text("[]"), r"results\.json: expected a mapping, got list"),
        "no accuracy": (lambda: results.write_text("{}"), r"results\.json: there is no 'test/acc' in it"),
        "damaged weights": (lambda: weights.write_bytes(b"xx"), "model: the model cannot be read: .*[Hh]eader"),
    }


@pytest.mark.parametrize("fault", mistakes(Path()))
def test_a_wrong_run_is_said_in_one_line(run, tmp_path, fault):
    spoil, message = mistakes(run)[fault]
    spoil()
    with pytest.raises(ConfigError, match=message) as caught:
        export(run, tmp_path / "shared")
    assert "\n" not in str(caught.value)
    assert str(run) in str(caught.value)
    assert not (tmp_path / "shared").exists()


def test_a_model_folder_is_no_run(run, tmp_path):
    with pytest.raises(ConfigError, match=r"model: not a finished run.* this is a model folder; give the run"):
        export(run / "model", tmp_path / "shared")


def test_missing_packages_are_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ONNX_PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(ConfigError, match="--onnx needs no_such_package: pip install no_such_package"):
        export(run, tmp_path / "shared", onnx=True)


@pytest.mark.slow
def test_the_script(run, tmp_path):
    def script(*words):
        return preloaded.run([str(SCRIPT), *map(str, words)], tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})

    done = script(run, "shared")
    assert done == (0, "shared\n")
    assert torch.equal(load(tmp_path / "shared")(images(48, 32)), trained()(images(48, 32)))
    status, said = script("nowhere", "other")
    assert status == 2
    assert said.startswith("error: nowhere: no such folder; ")
    assert said.count("\n") == 1
