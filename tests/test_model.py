"""The model of a run, and the folder that gives it back."""

import json

import pytest
import timm
import torch

from vitrel.training.fileio import ConfigError
from vitrel.training.model import build_model, check_model, save_model_folder
from vitrel.training.settings import ModelConfig

SMALL = {"depth": 2, "embed_dim": 16, "num_heads": 2}
DATA = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "interpolation": "bicubic", "crop_pct": 0.9}


def noisy(**settings):
    torch.manual_seed(0)
    model = build_model(ModelConfig(kwargs=dict(SMALL), **settings), num_classes=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize("rel_pos", [None, "txl", {"preset": "bias", "table": "joint"}])
def test_a_model_folder_gives_the_logits_back_exactly(tmp_path, rel_pos):
    model = noisy(img_size=[16, 24], patch_size=8, rel_pos=rel_pos)
    save_model_folder(model, tmp_path / "model", ["a", "b", "c"], DATA)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    x = torch.randn(2, 3, 16, 24)
    assert torch.equal(loaded(x), model(x))
    known = timm.data.resolve_model_data_config(loaded)
    assert tuple(known["mean"]) == DATA["mean"]
    assert tuple(known["std"]) == DATA["std"]
    assert known["crop_pct"] == 0.9
    assert tuple(known["input_size"]) == (3, 16, 24)
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["label_names"] == ["a", "b", "c"]
    assert written["model_args"]["img_size"] == [16, 24]
    assert isinstance(written["model_args"]["rel_pos"], dict)  # no name whose meaning may change


def test_a_run_does_not_carry_the_licence_of_the_weights_that_timm_lists(tmp_path):
    model = noisy(arch="vitrel_micro_patch4_32")
    assert model.pretrained_cfg["license"] == "apache-2.0"
    save_model_folder(model, tmp_path / "model", ["a", "b", "c"], DATA)
    known = json.loads((tmp_path / "model" / "config.json").read_text())["pretrained_cfg"]
    assert not {"license", "tag", "url", "hf_hub_id", "file"} & set(known)


def test_a_new_folder_replaces_the_old_one_and_leaves_nothing_beside(tmp_path):
    for seed_names in (["a", "b", "c"], ["x", "y", "z"]):
        save_model_folder(noisy(), tmp_path / "model", seed_names, DATA)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["label_names"] == ["x", "y", "z"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_run_may_start_from_a_model_folder(tmp_path):
    model = noisy(rel_pos="bias")
    save_model_folder(model, tmp_path / "model", ["a", "b", "c"], DATA)
    start = ModelConfig(rel_pos="bias", kwargs=dict(SMALL), checkpoint=str(tmp_path / "model"))
    check_model(start)
    assert torch.equal(build_model(start, 3).state_dict()["head.weight"], model.state_dict()["head.weight"])
    wider = build_model(start, 5)
    assert wider.head.weight.shape == (5, 16)
    assert torch.equal(wider.patch_embed.proj.weight, model.patch_embed.proj.weight)


def test_what_the_run_sets_is_not_set_twice():
    with pytest.raises(ConfigError, match=r"model\.kwargs\.num_classes: set by the run"):
        build_model(ModelConfig(kwargs={"num_classes": 4}), 3)
