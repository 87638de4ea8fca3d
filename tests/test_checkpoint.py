"""Starting from a saved model: its settings, its weights at another size, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from vitrel.training.checkpoint import stored_settings, weights_file
from vitrel.training.config import from_dict, parse
from vitrel.training.export import export
from vitrel.training.fileio import ConfigError
from vitrel.training.model import build_model, check_model, save_model_folder
from vitrel.training.run import run
from vitrel.training.saved import evaluate
from vitrel.training.settings import ModelConfig

CONFIGS = Path(__file__).parents[1] / "configs"
DATA = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "interpolation": "bicubic", "crop_pct": 0.8}
BODY = {"embed_dim": 16, "depth": 2, "num_heads": 2, "class_token": True}
SAVED = {**BODY, "global_pool": "avg"}  # timm writes how it pools


def model(rel_pos="txl+bias", size=(48, 32), classes=3, **arguments):
    torch.manual_seed(0)
    made = timm.create_model(
        "vitrel_micro_patch4_32", num_classes=classes, img_size=size, rel_pos=rel_pos, **{**BODY, **arguments}
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return made.eval()


@pytest.fixture
def saved(tmp_path):
    save_model_folder(model(), tmp_path / "run" / "model", ["a", "b", "c"], DATA)
    return tmp_path / "run" / "model"


@pytest.fixture
def pictures(tmp_path):
    """Five classes of three pictures of odd sizes, in train/ and val/."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in "vwxyz":
            folder = tmp_path / "pictures" / split / label
            folder.mkdir(parents=True)
            for i in range(3):
                pixels = generator.integers(0, 256, (40 + i, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "pictures"


def test_a_run_a_folder_and_a_file_are_found(saved):
    expected = saved / "model.safetensors"
    assert [weights_file(str(p)) for p in (saved.parent, saved, expected)] == [expected] * 3
    with pytest.raises(ConfigError, match=r"model\.checkpoint: nowhere is neither a folder with model\.safetensors"):
        weights_file("nowhere")


def test_the_model_section_describes_the_saved_model(saved):
    settings = stored_settings(str(saved))
    again = build_model(from_dict({"model": settings}).model, 3)
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model().state_dict().items()}
    assert settings["arch"] == "vitrel_micro_patch4_32"
    assert settings["img_size"] == [48, 32]
    assert settings["kwargs"] == SAVED


def test_the_saved_body_comes_before_the_files_and_options_before_both(saved):
    """folder.yaml names an arch, a rel_pos, an image size and a drop path rate of its own."""
    options = ["--config", "folder", "--model.checkpoint", str(saved), "--model.img_size", "[64, 32]"]
    config = parse(options, [CONFIGS]).model
    assert (config.arch, config.kwargs) == ("vitrel_micro_patch4_32", SAVED)
    assert config.rel_pos["terms"] == list(model().blocks[0].attn.rel_pos.terms)
    assert config.img_size == [64, 32]
    assert config.drop_path_rate == 0.1
    assert parse([*options, f"--model.checkpoint={saved.parent}"], [CONFIGS]).model.checkpoint == str(saved.parent)
    assert parse(options[:2], [CONFIGS]).model.arch == "vitrel_tiny_patch16_224"
    assert parse([*options[:2], "--model.checkpoint", "null"], [CONFIGS]).model.arch == "vitrel_tiny_patch16_224"


def test_a_config_file_may_name_the_checkpoint(saved, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"model:\n  checkpoint: {saved}\n  img_size: [32, 32]\n")
    config = parse(["--config", str(file)])
    assert (config.model.kwargs, config.model.img_size) == (SAVED, [32, 32])
    shutil.rmtree(saved)  # what has been resolved does not need the folder again
    assert from_dict(config.as_dict()) == config


@pytest.mark.filterwarnings("ignore:a grid of:UserWarning")  # positions beyond the trained ones
@pytest.mark.parametrize("pos_embed", ["none", "learn"])
@pytest.mark.parametrize("size", [(48, 32), (32, 32), (64, 64)])
def test_weights_at_another_size_and_another_number_of_classes(tmp_path, size, pos_embed):
    start = model(pos_embed=pos_embed)
    save_model_folder(start, tmp_path / "model", ["a", "b", "c"], DATA)
    settings = stored_settings(str(tmp_path / "model")) | {"checkpoint": str(tmp_path / "model"), "img_size": [*size]}
    config = from_dict({"model": settings}).model
    check_model(config)
    made, moved = build_model(config, 3).eval(), start
    moved.set_input_size(size)
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(made(x), moved(x), rtol=0, atol=1e-5)
    wider = build_model(config, 5)
    assert wider.head.weight.shape == (5, 16)
    assert torch.equal(wider.blocks[1].attn.qkv.weight, start.blocks[1].attn.qkv.weight)
    known = timm.data.resolve_model_data_config(wider)
    assert (tuple(known["mean"]), known["crop_pct"]) == (DATA["mean"], 0.8)


def test_a_run_from_an_exported_folder(saved, pictures, tmp_path, capsys):
    """Other classes and another size; the run stands alone afterwards."""
    results = {"test/acc": 0.5, "test/acc5": 1.0, "data": "digits", "epochs": 1}
    (saved.parent / "results.json").write_text(json.dumps(results))
    folder = export(saved.parent, tmp_path / "shared")
    options = [
        "--config", "folder.yaml", "--data.root", str(pictures), "--model.checkpoint", str(folder),
        "--model.img_size", "[64, 48]", "--runs", str(tmp_path / "runs"), "--trainer.max_epochs", "1",
        "--trainer.accelerator", "cpu", "--optim.lr", "1e-9", "--logger.maps_every", "0", "--data.augment", "none",
    ]  # fmt: skip
    done = run(parse(options, [CONFIGS]))
    assert f"weights from {folder}; a new classifier" in capsys.readouterr().out
    shutil.rmtree(folder)
    tuned = timm.create_model(f"local-dir:{done['folder']}/model", pretrained=True)
    assert tuned.head.weight.shape == (5, 16)
    assert tuned.patch_embed.grid_size == (16, 12)
    assert tuned.blocks[0].attn.rel_pos == model().blocks[0].attn.rel_pos
    torch.testing.assert_close(  # at this learning rate the weights stay
        tuned.blocks[1].attn.qkv.weight, model().blocks[1].attn.qkv.weight, rtol=0, atol=1e-5
    )
    table, start = tuned.blocks[0].attn.position.bias.table_h, model().blocks[0].attn.position.bias.table_h
    stretched = torch.nn.functional.interpolate(start[None], 31, mode="linear", align_corners=True)[0]
    torch.testing.assert_close(table, stretched, rtol=0, atol=1e-5)
    assert evaluate(done["folder"])["test/acc"] == pytest.approx(done["test/acc"])
    assert tuple(timm.data.resolve_model_data_config(tuned)["mean"]) == DATA["mean"]
    again = run(parse([*options, "--model.checkpoint", done["folder"], "--model.img_size", "[48, 48]"], [CONFIGS]))
    assert "a new classifier" not in capsys.readouterr().out
    assert timm.create_model(f"local-dir:{again['folder']}/model", pretrained=True).patch_embed.grid_size == (12, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arch": "vitrel_tiny_patch4_32"}, r"model\.arch: .*model holds a vitrel_micro_patch4_32, the settings say"),
        ({"rel_pos": "bias"}, r"model\.rel_pos: .* was trained with terms \[.*\] \(settings: \['bias'\]\).*; leave"),
        ({"kwargs": {**BODY, "depth": 3}}, r"model\.checkpoint: .*blocks\.2\..* is not in it \(\d+ such names\)"),
        ({"kwargs": {**BODY, "depth": 1}}, r"model\.checkpoint: .*blocks\.1\..* is only in"),
        ({"kwargs": {**BODY, "embed_dim": 32}}, r"size mismatch for cls_token"),
        ({"pretrained": True}, r"model\.pretrained and model\.checkpoint: two sets of weights"),
    ],
)
def test_another_model_is_refused_in_one_line(saved, settings, message):
    given = {**stored_settings(str(saved)), "checkpoint": str(saved), **settings}
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(from_dict({"model": given}).model, 5)
    assert "\n" not in str(caught.value)


def test_what_disagrees_is_found_before_data_are_read(saved):
    with pytest.raises(ConfigError, match=r"model\.rel_pos: .* was trained with"):
        check_model(parse(["--model.checkpoint", str(saved), "--model.rel_pos", "swin"]).model)


def test_the_resize_rule_may_be_another(saved):
    spec = {**stored_settings(str(saved))["rel_pos"], "resize": "interpolate"}
    given = {**stored_settings(str(saved)), "checkpoint": str(saved), "rel_pos": spec, "img_size": [64, 64]}
    made = build_model(from_dict({"model": given}).model, 3).eval()
    made(torch.randn(1, 3, 64, 64))  # the whole table is stretched: no warning of untrained entries
    assert made.blocks[0].attn.rel_pos.resize == "interpolate"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"num_heads": 4},
            r"blocks\.0\.attn\.num_heads is 2 there, and 4 by the settings; leave the settings of its body",
        ),
        ({"act_layer": "relu"}, r"the kind of blocks\.0\.mlp\.act is GELU there, and ReLU by"),
        ({"global_pool": "max"}, r"global_pool is avg there, and max by"),
        ({"norm_layer": {"eps": 1e-3}}, r"blocks\.0\.norm1\.eps is 1e-06 there, and 0\.001 by"),
    ],
)
def test_bodies_of_the_same_weights_are_told_apart(tmp_path, body, message):
    save_model_folder(model("rope"), tmp_path / "model", ["a", "b", "c"], DATA)
    given = {**stored_settings(str(tmp_path / "model")), "checkpoint": str(tmp_path / "model")}
    given["kwargs"] = {**given["kwargs"], **body}
    for act in (check_model, lambda config: build_model(config, 3)):
        with pytest.raises(ConfigError, match=r"model\.checkpoint: .*model holds another model .*" + message):
            act(from_dict({"model": given}).model)


@pytest.mark.parametrize(
    ("then", "now", "field"),
    [
        ("none", "rope", r"terms \[\] \(settings: \['rotary'\]\)"),
        ("rope", "none", r"terms \['rotary'\] \(settings: \[\]\)"),
        ("rope", {"preset": "rope", "theta": 10}, r"theta None \(settings: 10\)"),
        ("txl", {"preset": "txl", "scale": "seed"}, r"scale sum \(settings: seed\)"),
        ("sam", {"terms": ["query"]}, r"scale content \(settings: sum\)"),
        ("none", None, r"terms \[\] \(settings: \['bias', 'kernel'\]\)"),
    ],
)
def test_schemes_of_the_same_weights_are_told_apart(tmp_path, then, now, field):
    save_model_folder(model(then), tmp_path / "model", ["a", "b", "c"], DATA)
    given = {**stored_settings(str(tmp_path / "model")), "checkpoint": str(tmp_path / "model"), "rel_pos": now}
    config = from_dict({"model": given}).model
    for act in (check_model, lambda config: build_model(config, 3)):
        with pytest.raises(ConfigError, match=r"model\.rel_pos: .*model was trained with " + field):
            act(config)
    check_model(from_dict({"model": {**given, "rel_pos": then}}).model)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"architecture": "x", "num_classes": 2}'])
def test_a_damaged_configuration_is_named(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.checkpoint: .*config\.json is no configuration of a timm model"):
        parse(["--model.checkpoint", str(saved)])


def test_a_file_of_weights_alone_takes_the_settings_of_the_run(saved, tmp_path):
    file = tmp_path / "weights.safetensors"
    (saved / "model.safetensors").rename(file)
    config = parse(["--model.checkpoint", str(file), "--model.rel_pos", "txl+bias", "--model.img_size", "[48, 32]"])
    assert (config.model.arch, config.model.kwargs) == ("vitrel_micro_patch4_32", {})
    made = build_model(ModelConfig(rel_pos="txl+bias", img_size=[32, 32], kwargs=BODY, checkpoint=str(file)), 3)
    assert torch.equal(made.blocks[1].attn.qkv.weight, model().blocks[1].attn.qkv.weight)


def test_weights_without_their_configuration_are_taken_on_trust_and_it_is_said(tiny, tmp_path, capsys):
    first = run(tiny("--data.name", "fake", "--model.rel_pos", "rope"))
    file = tmp_path / "weights.safetensors"
    shutil.copyfile(Path(first["folder"], "model", "model.safetensors"), file)
    run(tiny("--data.name", "fake", "--model.rel_pos", "rope", "--model.checkpoint", str(file)))
    assert f"weights from {file}; there is no config.json beside them, so that their heads" in capsys.readouterr().out
