import json
import socket
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import ResPostBlock

import vitrel
from vitrel import zoo
from vitrel.relpos import RelPos
from vitrel.training.config import parse
from vitrel.training.saved import open_model
from vitrel.zoo import WEIGHTS, default_cfgs

SHIPPED = sorted(folder.name for folder in WEIGHTS.iterdir())

VARIANTS = {  # width, depth, heads, grid, parameters with the default scheme
    "vitrel_micro_patch4_32": (128, 6, 4, (8, 8), 0.8e6),
    "vitrel_tiny_patch4_32": (192, 12, 3, (8, 8), 5.4e6),
    "vitrel_tiny_patch16_224": (192, 12, 3, (14, 14), 5.7e6),
    "vitrel_small_patch16_224": (384, 12, 6, (14, 14), 22e6),
    "vitrel_base_patch16_224": (768, 12, 12, (14, 14), 86e6),
}


def test_timm_lists_the_variants():
    assert sorted(set(timm.list_models("vitrel*")) - {"vitrel_relativized"}) == sorted(VARIANTS) == sorted(default_cfgs)


@pytest.mark.parametrize("name", VARIANTS)
def test_sizes(name):
    width, depth, heads, grid, parameters = VARIANTS[name]
    with torch.device("meta"):
        model = timm.create_model(name)
    assert (model.embed_dim, len(model.blocks), model.blocks[0].attn.num_heads) == (width, depth, heads)
    assert model.patch_embed.grid_size == grid
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.04)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_user_may_set_what_timm_lets_him_set(name):
    size = 40 if name.endswith("_32") else 64
    model = timm.create_model(name, num_classes=7, in_chans=1, img_size=(size, 64), drop_path_rate=0.1, rel_pos="txl")
    assert model.eval()(torch.randn(1, 1, size, 64)).shape == (1, 7)
    features = timm.create_model(name, features_only=True, img_size=(size, 64)).eval()
    assert [f.shape[1] for f in features(torch.randn(1, 3, size, 64))] == features.feature_info.channels()


def test_no_weights_are_promised_but_those_of_the_package():
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        timm.create_model("vitrel_tiny_patch4_32", pretrained=True)
    assert SHIPPED == ["vitrel_micro_patch4_32.cifar100"]
    assert set(timm.list_models("vitrel*", pretrained=True)) == {"vitrel_micro_patch4_32", *SHIPPED}


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_of_the_package_load_without_network(name, monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", refused)
    stored = load_file(WEIGHTS / name / "model.safetensors")
    for asked in (name, name.split(".")[0]):  # the variant's own weights, timm's way
        model = timm.create_model(asked, pretrained=True)
        assert all(torch.equal(value, stored[key]) for key, value in model.named_parameters())
        assert len(model.pretrained_cfg["label_names"]) == model.num_classes
    assert (WEIGHTS / name / "model.safetensors").stat().st_size < 5e6
    size = model.patch_embed.img_size[0]
    other = timm.create_model(name, pretrained=True, num_classes=7, img_size=(size, 2 * size)).eval()
    assert other(torch.randn(1, 3, size, 2 * size)).shape == (1, 7)
    with pytest.raises(ValueError, match=rf"the weights {name} are of a scheme with terms .*; leave rel_pos out"):
        timm.create_model(name, pretrained=True, rel_pos="irpe_k")
    plain = timm.create_model(name.split(".")[0], rel_pos="irpe_k")  # without weights any scheme may be had
    assert plain.blocks[0].attn.rel_pos.terms == ("query",)


def test_the_stored_body_goes_before_the_variants_own_and_is_saved_again(monkeypatch):
    stored = {"patch_size": 2, "depth": 1, "pos_embed": "learn", "rel_pos": RelPos.preset("txl").as_dict()}
    monkeypatch.setitem(zoo._SHIPPED, "vitrel_micro_patch4_32.cifar100", {"model_args": stored})
    model = zoo.vitrel_micro_patch4_32(pretrained_cfg="cifar100", img_size=16)
    assert (model.patch_embed.patch_size, len(model.blocks), model.patch_embed.grid_size) == ((2, 2), 1, (8, 8))
    assert model.pos_embed is not None
    assert model._model_args == stored
    asked = zoo.vitrel_micro_patch4_32(pretrained_cfg="cifar100", img_size=16, depth=2, rel_pos="bias")
    assert (len(asked.blocks), asked.blocks[0].attn.rel_pos.terms) == (2, ("bias",))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_weights_of_the_package_give_the_accuracy_of_their_card(name, shared):
    """To the digit, on the whole test split."""
    config = parse(["--config", str(Path(__file__).parents[1] / "configs" / "cifar100.yaml")])
    task, data, trainer = open_model(name, config, root=str(shared / "data" / "cifar100"))
    metrics = trainer.test(task, datamodule=data, verbose=False)[0]
    card = (WEIGHTS / name / "README.md").read_text(encoding="utf-8")
    assert f"- **Test accuracy:** {metrics['test/acc']:.4f} top-1, {metrics['test/acc5']:.4f} top-5" in card
    assert len(data.splits["test"]) == 10_000


def test_an_unknown_scheme_is_named():
    with pytest.raises(ValueError, match="rel_pos: preset 'tlx' is unknown"):
        timm.create_model("vitrel_micro_patch4_32", rel_pos="tlx")


@pytest.mark.parametrize("rel_pos", ["bias", "txl", {"preset": "bias", "table": "joint"}, None], ids=str)
def test_saved_model_loads_back_exactly(tmp_path, rel_pos):
    given = {} if rel_pos is None else {"rel_pos": rel_pos}
    model = timm.create_model("vitrel_micro_patch4_32", num_classes=7, img_size=(24, 40), **given).eval()
    for name in model.position_parameters():
        torch.nn.init.normal_(model.get_parameter(name))
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 24, 40)
    assert torch.equal(again(x), model(x))
    assert again.blocks[0].attn.rel_pos == model.blocks[0].attn.rel_pos
    assert vitrel.explain(again) == vitrel.explain(model)


def test_a_relpos_object_is_saved_as_plain_data(tmp_path):
    model = timm.create_model("vitrel_micro_patch4_32", rel_pos=vitrel.RelPos.preset("swin")).eval()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert again.blocks[0].attn.rel_pos == vitrel.RelPos.preset("swin")


def test_layers_are_saved_by_name(tmp_path):
    given = {"block_fn": ResPostBlock, "norm_layer": {"eps": 1e-3}, "final_norm": {"eps": 1e-2}, "init_values": 0.1}
    model = timm.create_model("vitrel_micro_patch4_32", depth=2, **given).eval()
    assert [type(block) for block in model.blocks] == [ResPostBlock] * 2
    assert (model.blocks[1].norm2.eps, model.fc_norm.eps) == (1e-3, 1e-2)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    assert json.loads((tmp_path / "config.json").read_text())["model_args"]["block_fn"] == "ResPostBlock"
    again, x = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval(), torch.randn(1, 3, 32, 32)
    assert torch.equal(again(x), model(x))
    assert vitrel.explain(again) == vitrel.explain(model)


def test_the_resolved_scheme_is_saved_and_no_name(tmp_path):
    timm.models.save_for_hf(timm.create_model("vitrel_micro_patch4_32", rel_pos="txl"), tmp_path)
    assert (
        json.loads((tmp_path / "config.json").read_text())["model_args"]["rel_pos"] == vitrel.RelPos.of("txl").as_dict()
    )


@pytest.mark.parametrize("rel_pos", ["rope", "bias"])
def test_weights_assigned_to_a_model_built_without_memory(rel_pos):
    model = timm.create_model("vitrel_micro_patch4_32", rel_pos=rel_pos).eval()
    empty = timm.create_model("vitrel_micro_patch4_32", rel_pos=rel_pos, device="meta").eval()
    empty.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(empty(x), model(x))


def test_another_attention_layer_is_refused():
    with pytest.raises(ValueError, match="attn_layer: the attention of these models is RelativeAttention2d"):
        timm.create_model("vitrel_micro_patch4_32", attn_layer="diff")
