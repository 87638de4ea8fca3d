"""from_timm: whole timm models, small and random in every parameter, against what they become."""

import copy
from functools import partial

import pytest
import timm
import timm.layers
import torch
from timm.models.beit import Beit
from timm.models.vision_transformer_relpos import RelPosBlock, ResPostRelPosBlock, VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM

import vitrel

BODY = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5, "mlp_ratio": 2.3}
SIZES = [(32, 32), (24, 40), (8, 40)]


def draw(model, dtype=torch.float64):
    """Random parameters everywhere, norms included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1 if parameter.ndim < 2 else 0.3))
    return model.to(dtype).eval()


def image(model, size, batch=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, *size, generator=generator).to(next(model.parameters()))


@torch.no_grad()
def assert_same_function(theirs, size, atol=1e-10):
    ours = vitrel.from_timm(theirs)
    x = image(theirs, size)
    expected = theirs(x)
    assert expected.std() > 1e-2
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=atol)
    return ours


RELPOS = {
    "plain": {},
    "no qkv bias": {"qkv_bias": False},
    "class token": {"class_token": True, "global_pool": "token"},
    "class token, average": {"class_token": True, "global_pool": "avg", "fc_norm": True},
    "shared": {"shared_rel_pos": True},
    "shared, class token": {"shared_rel_pos": True, "class_token": True},
    "res-post": {"block_fn": ResPostRelPosBlock},
    "no layer scale": {"init_values": None, "block_fn": RelPosBlock},
    "query and key norm": {"qk_norm": True},
    "no pooling": {"global_pool": ""},
    "no head": {"num_classes": 0},
    "other layers": {"norm_layer": partial(torch.nn.LayerNorm, eps=1e-3), "act_layer": torch.nn.SiLU},
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", RELPOS)
def test_vit_relpos(name, size):
    theirs = draw(VisionTransformerRelPos(**{**BODY, "img_size": size, "rel_pos_type": "bias", **RELPOS[name]}))
    ours = assert_same_function(theirs, size)
    tables = [n for n in ours.state_dict() if n.endswith("bias.table")]
    assert len(tables) == (1 if "shared" in name else 2)
    assert any(n.endswith("position.prefix") for n in ours.state_dict()) == ("class token" in name)


@pytest.mark.parametrize("kind", ["mlp", "mlp_swin"])
@pytest.mark.parametrize("name", ["plain", "class token", "shared", "res-post"])
@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_vit_relpos_with_an_mlp(name, kind, size):
    """timm makes the coordinates in float32: 1e-5; its swin mode is NaN on a side of 1."""
    theirs = VisionTransformerRelPos(
        **{**BODY, "img_size": size, "rel_pos_type": kind, "rel_pos_dim": 16, **RELPOS[name]}
    )
    assert_same_function(draw(theirs), size, atol=1e-5)


BEIT = {
    "per layer": {"use_rel_pos_bias": True, "use_abs_pos_emb": False},
    "shared": {"use_shared_rel_pos_bias": True, "use_abs_pos_emb": False},
    "both": {"use_shared_rel_pos_bias": True, "use_rel_pos_bias": True},
    "absolute alone": {},
    "layer scale": {"use_rel_pos_bias": True, "init_values": 0.1},
    "token": {"use_rel_pos_bias": True, "global_pool": "token"},
    "norm before pooling": {"use_rel_pos_bias": True, "use_fc_norm": False},
    "no qkv bias": {"use_rel_pos_bias": True, "qkv_bias": False},
    "gated mlp": {"use_rel_pos_bias": True, "swiglu_mlp": True},
    "gated mlp with a norm": {"use_rel_pos_bias": True, "swiglu_mlp": True, "scale_mlp": True},
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", BEIT)
def test_beit(name, size):
    ours = assert_same_function(draw(Beit(**{**BODY, "img_size": size, **BEIT[name]})), size)
    tables = [n for n in ours.state_dict() if n.endswith("bias.table")]
    assert len(tables) == {"shared": 1, "absolute alone": 0}.get(name, 2)


SAM = {
    "no neck": {"neck_chans": None},
    "neck": {"neck_chans": 6},
    "neck, no head": {"neck_chans": 6, "num_classes": 0},
    "largest": {"neck_chans": 6, "global_pool": "max"},
    "no absolute": {"use_abs_pos": False, "neck_chans": None},
    "no relative": {"use_rel_pos": False, "neck_chans": None},
    "norm first": {"pre_norm": True, "neck_chans": None},
    "layer scale": {"init_values": 0.1, "qk_norm": True, "neck_chans": None},
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", SAM)
def test_samvit(name, size):
    args = {**BODY, "img_size": size, "window_size": 0, "use_rel_pos": True, **SAM[name]}
    assert_same_function(draw(VisionTransformerSAM(**args)), size)


def test_a_window_as_large_as_the_grid_is_the_grid():
    args = {**BODY, "img_size": 32, "window_size": 4, "global_attn_indexes": (1,), "use_rel_pos": True}
    assert_same_function(draw(VisionTransformerSAM(**args)), (32, 32))


@pytest.mark.parametrize("name", ["vit_relpos_small_patch16_224", "test_vit_relpos"])
def test_named_models_in_float32(name):
    theirs = timm.create_model(name, rel_pos_type="bias").eval()
    torch.manual_seed(0)
    for parameter_name, parameter in theirs.named_parameters():
        if "table" in parameter_name or "gamma" in parameter_name:  # timm's start at nearly nothing
            torch.nn.init.normal_(parameter, std=0.5)
    ours = vitrel.from_timm(theirs)
    x = image(theirs, theirs.pretrained_cfg["input_size"][1:])
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-4)
    assert timm.data.resolve_model_data_config(ours) == timm.data.resolve_model_data_config(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "vit_relpos_base_patch16_clsgap_224",
        "vit_srelpos_small_patch16_224",
        "vit_relpos_small_patch16_rpn_224",
        "beit_base_patch16_224",
        "beitv2_base_patch16_224",
        "samvit_base_patch16_224",
    ],
)
def test_larger_named_models(name):
    theirs = timm.create_model(name).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        if parameter.ndim < 3:
            parameter.data.add_(torch.randn_like(parameter) * 0.02)
    with torch.no_grad():
        x = image(theirs, (224, 224), batch=1)
        torch.testing.assert_close(vitrel.from_timm(theirs)(x), theirs(x), rtol=0, atol=1e-4)


def tiny_relpos(**kwargs):
    return VisionTransformerRelPos(**{**BODY, "img_size": (24, 40), "rel_pos_type": "bias", **kwargs})


def test_the_result_stands_alone():
    theirs = draw(tiny_relpos(drop_rate=0.1, drop_path_rate=0.2), torch.float32).train()
    ours = vitrel.from_timm(theirs)
    assert ours.training
    assert ours.head_drop.p == 0.1
    assert ours.blocks[1].drop_path1.drop_prob == pytest.approx(0.2)
    assert not {p.data_ptr() for p in ours.parameters()} & {p.data_ptr() for p in theirs.parameters()}
    assert all(p.requires_grad for p in ours.parameters())
    assert not [n for n in ours.state_dict() if "index" in n or "coord" in n]
    assert ours.position_parameters() == {f"blocks.{i}.attn.position.bias.table" for i in range(2)}
    assert next(vitrel.from_timm(theirs.bfloat16()).parameters()).dtype == torch.bfloat16


def test_a_converted_model_changes_size_and_head():
    ours = vitrel.from_timm(draw(VisionTransformerSAM(**BODY, img_size=32, window_size=0, neck_chans=6)))
    ours = copy.deepcopy(ours)
    ours.set_input_size((24, 40))
    ours.reset_classifier(3)
    ours.double()
    assert ours(image(ours, (24, 40))).shape == (2, 3)


def test_a_table_is_refused_by_name_and_shape():
    theirs = tiny_relpos()
    theirs.blocks[1].attn.rel_pos.relative_position_bias_table = torch.nn.Parameter(torch.zeros(44, 2))
    with pytest.raises(
        ValueError, match=r"blocks\.1\.attn\.rel_pos\.relative_position_bias_table: has shape \(44, 2\)"
    ):
        vitrel.from_timm(theirs)


def test_a_table_of_another_grid_with_as_many_rows_is_refused():
    """3x5 and 2x8 grids both have 45 offsets."""
    theirs = tiny_relpos()
    assert theirs.patch_embed.grid_size == (3, 5)
    theirs.blocks[0].attn.rel_pos = timm.layers.RelPosBias((2, 8), num_heads=2)
    assert theirs.blocks[0].attn.rel_pos.relative_position_bias_table.shape == (45, 2)
    with pytest.raises(ValueError, match=r"blocks\.0.*expected one of a 3x5 grid, it is of 2x8"):
        vitrel.from_timm(theirs)


def test_a_table_of_other_heads_is_refused():
    theirs = Beit(**BODY, img_size=32, use_rel_pos_bias=True)
    table = torch.nn.Parameter(torch.zeros(7 * 7 + 3, 3))
    theirs.blocks[1].attn.relative_position_bias_table = table
    with pytest.raises(RuntimeError, match=r"blocks\.1\.attn\.position\.bias\.table.*\(3, 7, 7\)"):
        vitrel.from_timm(theirs)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: VisionTransformerSAM(**BODY, img_size=32, window_size=3, global_attn_indexes=(1,)),
            r"blocks\.0: attend in windows on a 4x4 grid.*expected window_size=0",
        ),
        (
            lambda: VisionTransformerSAM(**BODY, img_size=32, window_size=0, use_rope=True),
            "rope_global: .*use_rope=False",
        ),
        (
            lambda: VisionTransformerSAM(**BODY, img_size=32, window_size=0, head_hidden_size=8),
            "head: NormMlpClassifierHead .*expected a linear head",
        ),
        (lambda: tiny_relpos(embed_layer=timm.layers.PatchEmbedWithSize), "patch_embed: PatchEmbedWithSize cannot"),
    ],
)
def test_what_cannot_be_served_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        vitrel.from_timm(build())


@pytest.mark.parametrize("build", [lambda: torch.nn.Linear(1, 1), lambda: timm.create_model("test_vit")])
def test_other_classes_are_named(build):
    model = build()
    with pytest.raises(TypeError, match=f"cannot convert {type(model).__name__}, expected.*vit_relpos.*beit.*samvit"):
        vitrel.from_timm(model)


@pytest.mark.filterwarnings("ignore:a grid of:UserWarning")  # positions beyond the trained ones
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (VisionTransformerRelPos, {"rel_pos_type": "bias", "class_token": True, "global_pool": "token"}),
        (VisionTransformerRelPos, {"rel_pos_type": "mlp", "rel_pos_dim": 16, "block_fn": ResPostRelPosBlock}),
        (VisionTransformerRelPos, {"rel_pos_type": "bias", "shared_rel_pos": True, "qk_norm": True}),
        (Beit, {"use_rel_pos_bias": True, "init_values": 0.1, "global_pool": "avg"}),
        (VisionTransformerSAM, {"use_rel_pos": True, "window_size": 0, "neck_chans": None}),
    ],
    ids=["relpos", "res-post mlp", "shared", "beit", "samvit"],
)
def test_a_converted_model_is_saved_and_loaded(tmp_path, kind, arguments):
    """Also with another head and size than it had; nothing of the class it came from is asked for."""
    ours = vitrel.from_timm(draw(kind(**{**BODY, "img_size": (24, 40), **arguments}), torch.float32))
    for change in (lambda: None, lambda: ours.set_input_size((40, 24)), lambda: ours.reset_classifier(3)):
        change()
        timm.models.save_for_hf(ours, tmp_path, safe_serialization=True)
        again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        x = image(ours, ours.patch_embed.img_size)
        assert torch.equal(again(x), ours(x))


@pytest.mark.parametrize(
    ("kind", "arguments", "argument"),
    [
        (VisionTransformerSAM, {"use_rel_pos": True, "window_size": 0, "neck_chans": 6}, "neck"),
        (VisionTransformerRelPos, {"rel_pos_type": "bias", "act_layer": torch.nn.SiLU}, "act_layer"),
    ],
)
def test_what_no_argument_describes_is_not_saved(tmp_path, kind, arguments, argument):
    ours = vitrel.from_timm(kind(**{**BODY, "img_size": (24, 40), **arguments}))
    with pytest.raises(ValueError, match=f"Model argument '{argument}' is not serializable"):
        timm.models.save_for_hf(ours, tmp_path, safe_serialization=True)
