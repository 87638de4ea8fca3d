"""A relativized model by name: saved, loaded, resized, trained from settings."""

import json

import pytest
import timm
import torch
from timm.models import save_for_hf

import vitrel
from vitrel.training.config import from_dict
from vitrel.training.run import run

BASES = {
    "vit_tiny_patch16_224": {"img_size": (48, 80), "reg_tokens": 2},
    "eva02_tiny_patch14_224": {"img_size": (42, 70)},
    "naflexvit_base_patch16_gap": {},
}


def made(base, rel_pos="txl", **asked):
    torch.manual_seed(0)
    model = timm.create_model(base, depth=3, embed_dim=48, num_heads=2, num_classes=10, **BASES[base])
    if base.startswith("naflex"):
        asked["grid_size"] = (3, 5)
    vitrel.relativize(model, rel_pos, **asked)
    with torch.no_grad():
        for name in model.position_parameters():
            model.get_parameter(name).normal_(std=0.3)
    return model.eval()


@pytest.mark.parametrize("asked", [{}, {"keep_absolute": False}, {"blocks": [-1, 0], "backend": "dense"}], ids=str)
@pytest.mark.parametrize("base", BASES)
def test_a_saved_folder_gives_the_model_back(base, asked, tmp_path):
    model, x = made(base, **asked), torch.randn(2, 3, 48, 80)
    x = x[..., :42, :70] if base.startswith("eva") else x
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(loaded) is type(model)
    assert torch.equal(loaded(x), model(x))
    assert [r.block for r in vitrel.explain(loaded)] == [r.block for r in vitrel.explain(model)]
    held = json.loads((tmp_path / "config.json").read_text())
    assert held["architecture"] == "vitrel_relativized"
    assert held["model_args"]["base"] == base
    assert held["model_args"]["rel_pos"] == vitrel.RelPos.of("txl").as_dict()
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=7).eval()
    assert other(x).shape == (2, 7)
    assert torch.equal(other.forward_features(x), model.forward_features(x))


@pytest.mark.filterwarnings("ignore:a grid of:UserWarning")  # positions beyond the trained ones
def test_another_size_resizes_tables_and_the_absolute_embedding(tmp_path):
    model = made("vit_tiny_patch16_224")
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    larger = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=(80, 80)).eval()
    table = larger.blocks[0].attn.position.query
    assert table.table_h.shape[1] == 9
    assert torch.equal(table.table_w, model.blocks[0].attn.position.query.table_w)
    model.set_input_size((80, 80))
    x = torch.randn(1, 3, 80, 80)
    torch.testing.assert_close(larger(x), model(x), rtol=0, atol=1e-5)


def test_plain_gives_the_name_back(tmp_path):
    model = made("vit_tiny_patch16_224")
    vitrel.plain(model)
    assert model.pretrained_cfg["architecture"] == "vit_tiny_patch16_224"
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(1, 3, 48, 80)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_plain_remembers_that_the_absolute_embedding_is_gone(base, again, tmp_path):
    model = vitrel.plain(made(base, keep_absolute=False))
    if again:
        vitrel.relativize(model, "bias")
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(1, 3, 42, 70) if base.startswith("eva") else torch.randn(1, 3, 48, 80)
    assert torch.equal(loaded(x), model(x))


def test_a_model_made_without_create_model_has_the_name_too(tmp_path):
    model = timm.models.vision_transformer.vit_tiny_patch16_224().eval()
    vitrel.relativize(model, "rope")
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(1, 3, 224, 224)
    assert torch.equal(loaded(x), model(x))


def test_blocks_may_be_a_range(tmp_path):
    body = {"base": "vit_tiny_patch16_224", "depth": 3, "embed_dim": 48, "num_heads": 2}
    model = timm.create_model("vitrel_relativized", blocks=range(2), **body)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    assert json.loads((tmp_path / "config.json").read_text())["model_args"]["blocks"] == [0, 1]


def test_by_name_and_by_hand_are_the_same():
    torch.manual_seed(0)
    named = timm.create_model("vitrel_relativized", base="vit_tiny_patch16_224", rel_pos="shaw", depth=1, num_classes=3)
    torch.manual_seed(0)
    by_hand = vitrel.relativize(timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3), "shaw")
    for (name, new), (other, old) in zip(named.named_parameters(), by_hand.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(new, old)
    assert named.pretrained_cfg["mean"] == by_hand.pretrained_cfg["mean"]


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"base": "vit_tyni"}, ValueError, "base: no timm model is called 'vit_tyni'"),
        ({"base": "vit_tiny_patch16_224.nope"}, ValueError, "base: "),
        ({"base": "convnext_atto"}, TypeError, "cannot serve ConvNeXt"),
        ({"base": "resnet18", "img_size": 96}, TypeError, "cannot serve ResNet"),
        ({"drop_paht_rate": 0.1}, TypeError, "drop_paht_rate"),
    ],
)
def test_mistakes_are_named(given, error, match):
    with pytest.raises(error, match=match):
        timm.create_model("vitrel_relativized", **given)


@pytest.mark.slow
def test_a_run_trains_a_timm_model_made_relative_and_gives_it_back(tmp_path):
    body = {"base": "vit_tiny_patch16_224", "depth": 1, "embed_dim": 48, "num_heads": 2, "class_token": True}
    settings = {
        "runs": str(tmp_path),
        "model": {"arch": "vitrel_relativized", "rel_pos": "bias", "img_size": 16, "patch_size": 4, "kwargs": body},
        "trainer": {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1},
        "logger": {"mode": "off"},
    }
    folder = run(from_dict(settings))["folder"]
    model = timm.create_model(f"local-dir:{folder}/model", pretrained=True)
    assert [r.terms for r in vitrel.explain(model)] == ["bias"]
    assert model.pos_embed is not None
