"""Patches by convolutions: a token per patch, saved by name, and mistakes named."""

import json
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf

import vitrel
from vitrel.stem import ConvEmbed
from vitrel.training.fileio import ConfigError
from vitrel.training.model import build_model, patch_pixels
from vitrel.training.run import run
from vitrel.training.settings import ModelConfig
from vitrel.training.studies import sizes_around
from vitrel.training.transforms import InputConfig

MICRO = "vitrel_micro_patch4_32"


def conv(**kwargs):
    torch.manual_seed(0)
    return timm.create_model(MICRO, **{"embed_layer": "conv", "num_classes": 5, "depth": 2, **kwargs}).eval()


@pytest.mark.parametrize("patch", [2, 4, 16])
def test_a_token_per_patch_from_convolutions_of_growing_width(patch):
    model = conv(patch_size=patch, img_size=(32, 48))
    tokens = model.patch_embed(torch.randn(2, 3, 32, 48))
    assert tokens.shape == (2, (32 // patch) * (48 // patch), 128)
    assert model.blocks[0].attn.grid_size == (32 // patch, 48 // patch)
    widths = [m.out_channels for m in model.patch_embed.modules() if isinstance(m, torch.nn.Conv2d)]
    assert widths == [128 // 2**i for i in reversed(range(patch.bit_length() - 1))]
    assert patch_pixels(model) == (patch, patch)


def test_neighbours_are_seen_and_a_patch_lies_where_its_pixels_do():
    embed = conv(img_size=(16, 32)).patch_embed
    x = torch.zeros(1, 3, 16, 32)
    plain = embed(x)
    x[..., 8:12, 20:24] = 1  # row 2, column 5 of 4 x 8 patches
    moved = (embed(x) - plain).abs().sum(-1).view(4, 8)
    assert moved.nonzero().tolist() == [[2, 5], [2, 6], [3, 5], [3, 6]]  # those below and right look 3 px back


def test_it_is_saved_by_name_and_loaded_with_the_same_logits(tmp_path):
    model, x = conv(rel_pos="txl"), torch.randn(2, 3, 32, 32)
    save_for_hf(model, str(tmp_path), model_args=model._model_args)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_args"]["embed_layer"] == "conv"
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert isinstance(again.patch_embed, ConvEmbed)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


def test_other_sizes():
    model = conv()
    model.set_input_size((48, 24))
    assert model.blocks[0].attn.grid_size == (12, 6)
    assert model(torch.randn(1, 3, 48, 24)).shape == (1, 5)
    dynamic = conv(dynamic_img_size=True)
    fixed = conv()
    fixed.set_input_size((40, 56))
    x = torch.randn(2, 3, 40, 56)
    torch.testing.assert_close(dynamic(x), fixed(x), rtol=1e-5, atol=1e-5)
    assert sizes_around(InputConfig((32, 32), (0.5,) * 3, (0.5,) * 3), conv()) == [(24, 24), (48, 48), (64, 64)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"patch_size": 6}, "patch_size: convolutions of stride 2 give patches of 2, 4, 8, ... px, got 6"),
        ({"patch_size": (4, 8)}, r"patch_size: .*got \(4, 8\)"),
        ({"patch_size": 1}, "patch_size: .*got 1"),
        ({"img_size": 34}, "img_size: expected a multiple of the patch of 4 px, got 34"),
        ({"dynamic_img_pad": True}, "dynamic_img_pad: convolutions have a border of their own; leave it out"),
        ({"embed_layer": "cnv"}, "embed_layer: 'cnv' is unknown, expected one of conv, or a class"),
    ],
)
def test_mistakes_are_named(wrong, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        conv(**wrong)


def test_a_size_or_patch_that_it_cannot_take_is_refused():
    model = conv()
    with pytest.raises(ValueError, match=r"^img_size: expected a multiple of the patch of 4 px, got \(30, 32\)$"):
        model.set_input_size((30, 32))
    with pytest.raises(ValueError, match=r"^patch_size: convolutions cannot be resized to it, got 8; build"):
        model.set_input_size(patch_size=8)
    with pytest.raises(TypeError, match="ConvEmbed looks beyond a patch, and would see a seam"):
        vitrel.StripReader(model, strip_rows=2, memory_rows=2)
    with pytest.raises(ConfigError, match="img_size: expected a multiple of the patch of 4 px, got 30"):
        build_model(ModelConfig(arch=MICRO, img_size=30, kwargs={"embed_layer": "conv"}), 3)


def test_a_run_trains_with_it(tiny):
    config = tiny("--model.kwargs.embed_layer", "conv", "--data.name", "fake")
    saved = json.loads((Path(run(config)["folder"]) / "model" / "config.json").read_text())
    assert saved["model_args"]["embed_layer"] == "conv"
