"""What timm promises of its vision transformers, held for every variant and every preset on a grid that is not square.

timm's wheel ships no tests. What ``tests/test_models.py`` of its repository asserts is written anew here, and its
functions were run as they stand (repository at 1.0.29.dev0, timm 1.0.31) on ``vitrel_micro_patch4_32``,
``vitrel_tiny_patch16_224`` and ``vitrel_relativized`` (a plain ViT-Ti made relative).

Passed as they stand: ``test_model_forward`` (with gradient checkpointing), ``test_model_backward``,
``test_model_default_cfgs_non_std``, ``test_model_forward_features``, ``test_model_forward_intermediates``,
``test_model_forward_intermediates_features``, ``test_model_forward_fx``, ``test_model_backward_fx``.

Left out: ``test_model_default_cfgs`` (for models with maps as output; timm runs its own ViTs through the one above),
``test_model_inference``, ``test_model_load_pretrained`` and ``test_model_features_pretrained`` (they download weights;
loading is tested from files here), ``test_model_forward_torchscript`` and ``test_model_forward_fx_torchscript``
(TorchScript is deprecated in torch 2.14; ``torch.export`` and ONNX take its place), those of NaFlexVit and Gemma.

Called from the installed timm: ``FeatureGetterNet``, ``FeatureGraphNet`` and ``create_feature_extractor``,
``group_parameters`` and ``group_modules``, ``param_groups_weight_decay`` and ``param_groups_layer_decay``,
``create_optimizer_v2``, ``ModelEmaV3``, ``AttentionExtract``, ``freeze`` and ``unfreeze``, ``ActivationStatsHook``,
``save_for_hf``, ``load_checkpoint``, ``onnx_export`` with its checker. ``checkpoint_seq`` is within the models.
"""

import copy
import functools
import pickle
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from timm.models import (
    Eva,
    create_feature_extractor,
    get_graph_node_names,
    group_modules,
    group_parameters,
)
from timm.models._features import FeatureGetterNet
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.utils import AttentionExtract, ModelEmaV3, freeze, unfreeze
from timm.utils.model import ActivationStatsHook
from torch import nn

import vitrel
from vitrel.relpos import PRESETS

VARIANTS = {  # name to image size: six by ten patches, or three by five
    "vitrel_micro_patch4_32": (24, 40),
    "vitrel_tiny_patch4_32": (24, 40),
    "vitrel_tiny_patch16_224": (48, 80),
    "vitrel_small_patch16_224": (48, 80),
    "vitrel_base_patch16_224": (48, 80),
}
PREFIXES = {0: {}, 1: {"class_token": True}, 5: {"class_token": True, "reg_tokens": 4}}
SCHEMES = {  # beside the presets: rel_pos and number of prefix tokens
    "all": ("txl+key+value+bias", 5),
    "rope+bias": ("rope+bias", 1),
    "shared": ({"preset": "txl", "share_layers": True, "share_heads": True}, 0),
    "sinusoid": ({"preset": "txl", "source": "sinusoid"}, 1),
}


class Case(NamedTuple):
    """``create(**arguments)`` builds a model of two blocks and ten classes.

    Attributes:
        size: (rows, columns) of its images in pixels.
        patch: Side of a patch in pixels.
        prefix: Number of prefix tokens.
    """

    create: Callable[..., nn.Module]
    size: tuple[int, int]
    patch: int
    prefix: int = 0

    def build(self, **arguments: Any) -> nn.Module:
        """The model with random position parameters, in eval mode; one seed for all."""
        torch.manual_seed(0)
        model = self.create(**arguments)
        with torch.no_grad():
            for name in sorted(getattr(model, "position_parameters", set)()):
                nn.init.normal_(model.get_parameter(name), std=0.3)
        return model.eval()

    def images(self, batch: int = 2, channels: int = 3) -> torch.Tensor:
        return torch.randn(batch, channels, *self.size, generator=torch.Generator().manual_seed(1))

    @property
    def grid(self) -> tuple[int, int]:
        return self.size[0] // self.patch, self.size[1] // self.patch


def variant(name: str, rel_pos: Any, prefix: int, **body: Any) -> Case:
    given = {"img_size": VARIANTS[name], "depth": 2, "num_classes": 10, "rel_pos": rel_pos, **PREFIXES[prefix], **body}
    patch = 4 if "patch4" in name else 16
    return Case(lambda **arguments: timm.create_model(name, **{**given, **arguments}), VARIANTS[name], patch, prefix)


def relativized(name: str, rel_pos: Any, prefix: int, patch: int, keep_absolute: bool = True, **body: Any) -> Case:
    size = (3 * patch, 5 * patch)
    given = {"img_size": size, "depth": 2, "num_classes": 10, **body}

    def build(features_only: bool = False, **arguments: Any) -> nn.Module:
        if features_only:  # by name: a model inside a wrapper cannot be made relative any more
            asked = {"base": name, "rel_pos": rel_pos, "keep_absolute": keep_absolute}
            return timm.create_model("vitrel_relativized", features_only=True, **asked, **given, **arguments)
        return vitrel.relativize(
            timm.create_model(name, **{**given, **arguments}), rel_pos, keep_absolute=keep_absolute
        )

    return Case(build, size, patch, prefix)


MICRO = "vitrel_micro_patch4_32"
TOKENS = {"cls_token", "reg_token"}
NARROW = {"embed_dim": 48, "num_heads": 2}
RELATIVIZED = {
    "relativized-vit-1": relativized("vit_tiny_patch16_224", "txl+bias", 1, 16, **NARROW),
    "relativized-vit-5": relativized("vit_tiny_patch16_224", "shaw", 5, 16, False, reg_tokens=4, **NARROW),
    "relativized-eva-1": relativized("eva02_tiny_patch14_224", "deberta", 1, 14, **NARROW),
    "relativized-rope-1": relativized("vit_small_patch16_rope_224", "bias+value", 1, 16, **NARROW),
}
CASES = {
    **RELATIVIZED,
    **{f"{preset}-{n}": variant(MICRO, preset, n, **NARROW) for preset in [*PRESETS, "bias+kernel"] for n in PREFIXES},
    **{f"{name}-{n}": variant(MICRO, scheme, n, **NARROW) for name, (scheme, n) in SCHEMES.items()},
    **{f"{name.removeprefix('vitrel_')}-5": variant(name, "txl+bias", 5, mlp_ratio=1) for name in VARIANTS},
}
FEW = ["bias-0", "beit-5", "cpb-1", "all-5", "rope+bias-1", "shared-0", "base_patch16_224-5"]


@functools.cache
def _built(name):
    return CASES[name].build()


@pytest.fixture(params=CASES)
def name(request):
    return request.param


@pytest.fixture
def case(name):
    return CASES[name]


@pytest.fixture
def built(name):
    """The case's model, one for all tests: not to be changed."""
    return _built(name)


@pytest.fixture
def model(built):
    """A copy to change."""
    return copy.deepcopy(built)


few = pytest.mark.parametrize("name", FEW)


def close(got, expected, atol=1e-5):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_timm_lists_the_variants():
    assert {*VARIANTS, "vitrel_relativized"} == set(timm.list_models("vitrel*"))
    shipped = ["vitrel_micro_patch4_32", "vitrel_micro_patch4_32.cifar100"]
    assert timm.list_models("vitrel*", pretrained=True) == shipped
    assert "zoo" in timm.list_modules()


def test_attributes_and_the_names_of_the_configuration(case, built):
    assert built.num_classes == 10
    assert built.num_features == built.head_hidden_size == built.embed_dim == built.head.in_features
    assert built.num_prefix_tokens == case.prefix
    assert built.grad_checkpointing is False
    assert [info["module"] for info in built.feature_info] == ["blocks.0", "blocks.1"]
    assert {info["num_chs"] for info in built.feature_info} == {built.embed_dim}
    assert {info["reduction"] for info in built.feature_info} == {case.patch}
    cfg = built.default_cfg
    assert cfg is built.pretrained_cfg
    assert {f"{cfg['classifier']}.weight", f"{cfg['first_conv']}.weight"} <= set(built.state_dict())
    assert built.get_classifier() is built.head


def test_forward_is_the_head_of_the_features(case, built):
    x, (h, w) = case.images(), case.grid
    logits, features = built(x), built.forward_features(x)
    assert logits.shape == (2, 10)
    assert features.shape == (2, case.prefix + h * w, built.num_features)
    assert torch.equal(built.forward_head(features), logits)
    hidden = built.forward_head(features, pre_logits=True)
    assert hidden.shape == (2, built.head_hidden_size)
    assert torch.equal(built.head(hidden), logits)
    close(built(x[:1]), logits[:1])  # an image's logits do not hang on its batch


def test_every_parameter_gets_a_finite_gradient_and_checkpointing_does_not_change_it(case, model):
    twin, x = copy.deepcopy(model), case.images()
    twin.set_grad_checkpointing()
    assert twin.grad_checkpointing
    for each in (model, twin):
        each.train()
        nn.functional.cross_entropy(each(x), torch.tensor([3, 7])).backward()
    for (name, one), two in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert one.grad is not None, name
        assert one.grad.isfinite().all(), name
        assert torch.equal(one.grad, two.grad), name
    twin.set_grad_checkpointing(False)
    assert not twin.grad_checkpointing


def test_classifier_reset(case, model):
    x, (h, w) = case.images(), case.grid
    hidden = model.forward_head(model.forward_features(x), pre_logits=True)
    features = model.forward_features(x)
    model.reset_classifier(7)
    assert (model.num_classes, model(x).shape) == (7, (2, 7))
    model.reset_classifier(0)
    assert model.num_classes == 0
    assert torch.equal(model(x), hidden)
    model.reset_classifier(0, "")
    unpooled = model(x)
    assert unpooled.shape == (2, case.prefix + h * w, model.num_features)
    assert torch.equal(unpooled, model.fc_norm(features))
    without = case.build(num_classes=0, global_pool="")
    assert without(x).shape == unpooled.shape
    assert case.build(num_classes=0)(x).shape == (2, model.num_features)


def test_intermediates(case, model):
    x, (h, w) = case.images(), case.grid
    features = model.forward_features(x)
    final, maps = model.forward_intermediates(x)
    assert torch.equal(final, features)
    assert [m.shape for m in maps] == [(2, model.embed_dim, h, w)] * 2
    tokens = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)
    for each, flat in zip(maps, tokens, strict=True):
        assert torch.equal(each.flatten(2).mT, flat)
    (normed,) = model.forward_intermediates(x, indices=1, norm=True, output_fmt="NLC", intermediates_only=True)
    assert torch.equal(normed, features[:, case.prefix :])
    (first,) = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True)
    assert torch.equal(first, maps[0])
    pairs = model.forward_intermediates(x, return_prefix_tokens=True, intermediates_only=True)
    if case.prefix:
        assert [(m.shape, p.shape[1]) for m, p in pairs] == [(maps[0].shape, case.prefix)] * 2
    if not isinstance(model, Eva):  # which has no such form
        named = model.forward_intermediates(x, output_dict=True)
        assert torch.equal(named["image_features"], features)
        assert torch.equal(named["image_intermediates"][1], maps[1])
    model.set_grad_checkpointing()
    close(model.forward_intermediates(x)[0], features)
    if not isinstance(model, Eva):
        (last,) = model.get_intermediate_layers(x, n=1, reshape=True)
        close(last, maps[1])


def test_features_only(case, built):
    x = case.images()
    maps = built.forward_intermediates(x, intermediates_only=True)
    getter = FeatureGetterNet(copy.deepcopy(built), out_indices=(0, 1))
    assert getter.feature_info.channels() == [built.embed_dim] * 2
    for got, expected in zip(getter(x), maps, strict=True):
        assert torch.equal(got, expected)
    features = case.build(features_only=True, out_indices=(0, 1))
    shapes = [(2, channels, *case.grid) for channels in features.feature_info.channels()]
    assert [m.shape for m in features(x)] == shapes
    assert features.feature_info.reduction() == [case.patch] * 2


def test_pruning(case, model):
    x = case.images()
    first = model.forward_intermediates(x, indices=[0], intermediates_only=True)[0]
    assert model.prune_intermediate_layers([0], prune_norm=True) == [0]
    assert len(model.blocks) == 1
    assert model.num_classes == 0
    assert torch.equal(model.forward_intermediates(x, intermediates_only=True)[0], first)
    assert torch.equal(model(x)[:, case.prefix :], first.flatten(2).mT)


def test_a_traced_graph_computes_the_same(case, built):
    x = case.images()
    graph = create_feature_extractor(built, {"blocks.0": "first", "head": "logits"})
    out = graph(x)
    assert torch.equal(out["logits"], built(x))
    first = built.forward_intermediates(x, indices=[0], output_fmt="NLC", intermediates_only=True)[0]
    assert torch.equal(out["first"][:, case.prefix :], first)


@few
def test_a_traced_graph_trains_and_gives_features(case, model):
    x = case.images()
    nodes = get_graph_node_names(model)
    assert all({"blocks.0.attn", "blocks.1.attn"} <= set(names) for names in nodes)
    graph = create_feature_extractor(model, ["head"]).train()
    graph(x)["head"].sum().backward()
    missing = [name for name, parameter in graph.named_parameters() if parameter.grad is None]
    assert missing == []
    built = case.build(features_only=True, feature_cls="fx", out_indices=(0, 1))
    assert [tuple(f.shape[::2]) for f in built(x)] == [(2, model.embed_dim)] * 2


def test_every_parameter_is_in_one_group(built):
    names = [name for name, _ in built.named_parameters()]
    for coarse in (False, True):
        groups = group_parameters(built, built.group_matcher(coarse=coarse))
        assert sorted(name for group in groups.values() for name in group) == sorted(names)
    assert built.position_parameters() <= built.no_weight_decay() <= {*names, "pos_embed", "dist_token", *TOKENS}
    layer = group_parameters(built, built.group_matcher(), reverse=True)
    assert {n: i for n, i in layer.items() if n.startswith("blocks.")} == {
        n: int(n.split(".")[1]) + 1 for n in names if n.startswith("blocks.")
    }
    assert all(layer[n] == 0 for n in names if n.startswith(("patch_embed", "cls_token", "reg_token")))
    assert layer["head.weight"] == max(layer.values()) == 3
    modules = group_modules(built, built.group_matcher(), reverse=True)
    assert set(modules.values()) == set(layer.values())


@few
@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_decay_spares_what_the_model_names(model, layer_decay):
    spared, names = model.no_weight_decay(), {id(p): name for name, p in model.named_parameters()}
    if layer_decay is None:
        groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=spared)
    else:
        groups = param_groups_layer_decay(model, 0.05, no_weight_decay_list=spared, layer_decay=layer_decay)
        layer = group_parameters(model, model.group_matcher(), reverse=True)
        for group in groups:
            assert {layer_decay ** (3 - layer[names[id(p)]]) for p in group["params"]} == {group["lr_scale"]}
    optimizer = create_optimizer_v2(model, "adamw", weight_decay=0.05, layer_decay=layer_decay)
    for made in (groups, optimizer.param_groups):
        assert sorted(names[id(p)] for group in made for p in group["params"]) == sorted(names.values())
        decayed = {names[id(p)] for group in made if group["weight_decay"] for p in group["params"]}
        assert decayed == {n for n, p in model.named_parameters() if p.ndim > 1 and n not in spared}


@pytest.mark.filterwarnings("ignore:a grid of:UserWarning")  # positions beyond the trained ones
def test_set_input_size(case, model):
    """A new image size, a new patch size; what is saved afterwards gives the same model back."""
    h, w = case.size
    model.set_input_size(img_size=(w, h))
    assert model.patch_embed.grid_size == case.grid[::-1]
    assert model(case.images().mT).shape == (2, 10)
    model.set_input_size(img_size=(h, w))
    close(model(case.images()), _built_logits(case, model))
    model.set_input_size(img_size=(2 * h, 2 * w), patch_size=(2 * case.patch, 2 * case.patch))
    assert model.patch_embed.grid_size == case.grid
    assert model(torch.randn(1, 3, 2 * h, 2 * w)).shape == (1, 10)


def _built_logits(case, model):
    """Of a model built at the case's size with the weights of ``model``."""
    fresh = case.build()
    fresh.load_state_dict(model.state_dict())
    return fresh(case.images())


@pytest.mark.filterwarnings("ignore:a grid of:UserWarning")
def test_dynamic_image_size(case, built):
    (h, w), dynamic = case.size, case.build(dynamic_img_size=True)
    dynamic.load_state_dict(built.state_dict())
    close(dynamic(case.images()), built(case.images()))
    for size in ((h + case.patch, w), (h, w - case.patch)):
        x = torch.randn(2, 3, *size)
        _, (last,) = dynamic.forward_intermediates(x, indices=1)
        assert last.shape[2:] == (size[0] // case.patch, size[1] // case.patch)
        assert dynamic(x).shape == (2, 10)
    with pytest.raises(AssertionError, match=rf"Input height \({h + case.patch}\) doesn't match model \({h}\)"):
        built(torch.randn(1, 3, h + case.patch, w))


@few
@pytest.mark.filterwarnings("ignore:a grid of:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sizes_change_in_low_precision(case, dtype):
    """Tables and an absolute embedding, which are resized in float32, are what the float32 model rounds to."""
    wide, (h, w) = case.build(pos_embed="learn"), case.size
    narrow = copy.deepcopy(wide).to(dtype)
    loaded = case.build(pos_embed="learn", img_size=(w, h)).to(dtype)
    for each in (wide, narrow):
        each.set_input_size((w, h))
    for name in wide.state_dict():
        got, expected = narrow.state_dict()[name], wide.state_dict()[name]
        assert got.dtype == (dtype if expected.is_floating_point() else expected.dtype)
        got, expected = got.float(), expected.float()
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2, msg=name)
    loaded.load_state_dict(narrow.state_dict())
    assert narrow(case.images().mT.to(dtype)).isfinite().all()
    assert torch.equal(loaded(case.images().mT.to(dtype)), narrow(case.images().mT.to(dtype)))


@few
def test_a_graph_of_changing_sizes_is_refused(case):
    with pytest.raises(ValueError, match=r"dynamic_img_size: torch\.fx would fix the grid of one image"):
        create_feature_extractor(case.build(dynamic_img_size=True), ["blocks.0"])


@pytest.mark.parametrize("name", [name for name in FEW if CASES[name].prefix])
def test_pooling(case):
    x = case.images()
    logits = {pool: case.build(global_pool=pool)(x) for pool in ("avg", "token", "max", "avgmax", "map", "prr")}
    assert {tuple(y.shape) for y in logits.values()} == {(2, 10)}
    assert len({tuple(y.flatten().tolist()) for y in logits.values()}) == 6
    assert case.build(global_pool="")(x).ndim == 3
    with pytest.raises(AssertionError, match="Token pooling needs the class token"):
        case.build(global_pool="token", class_token=False)


@few
def test_stochastic_depth_and_dropout(case):
    model, x = case.build(drop_path_rate=0.9, drop_rate=0.1), case.images()
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]  # an Identity has none
    assert rates == pytest.approx([0.0, 0.9])
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@few
@pytest.mark.parametrize("channels", [1, 4])
def test_other_channels(case, channels):
    model = case.build(in_chans=channels)
    assert model(case.images(channels=channels)).shape == (2, 10)
    assert model.patch_embed.proj.weight.shape[1] == channels


def test_building_without_memory(case, built):
    empty = case.create(device="meta")
    assert all(p.is_meta for p in empty.parameters())
    assert {k: v.shape for k, v in empty.state_dict().items()} == {k: v.shape for k, v in built.state_dict().items()}
    filled = empty.to_empty(device="cpu").eval()
    for parameter in filled.parameters():
        parameter.data.fill_(torch.nan)
    for name, buffer in filled.named_buffers():
        if ".position." in name:
            buffer.fill_(-1)
    filled.init_weights()
    assert filled(case.images()).isfinite().all()
    for name, buffer in filled.named_buffers():
        assert ".position." not in name or torch.equal(buffer, built.get_buffer(name)), name
    for (name, got), expected in zip(filled.named_parameters(), built.parameters(), strict=True):
        assert got.isfinite().all(), name
        if got.numel() > 500 and name not in built.position_parameters():  # those have been drawn anew
            assert got.std().item() == pytest.approx(expected.std().item(), rel=0.25), name
    assert filled.state_dict().keys() == built.state_dict().keys()
    filled.load_state_dict(built.state_dict())
    assert torch.equal(filled(case.images()), built(case.images()))


def test_deepcopy_and_pickle(case, built):
    x = case.images()
    for twin in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert torch.equal(twin(x), built(x))
        assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in built.parameters()}


@few
def test_moving_average(case, model):
    ema, x = ModelEmaV3(model, decay=0.5), case.images()
    before = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    ema.update(model)
    for one, two in zip(ema.module.parameters(), model.parameters(), strict=True):
        close(one, two - 0.5)
    ema.set(model)
    assert torch.equal(ema.module(x), model(x))
    assert not torch.equal(model(x), before)


@few
def test_saved_and_loaded_by_path(case, model, tmp_path):
    x = case.images()
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.pth")
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    for file in ("model.pth", "model.safetensors"):
        again = case.create(checkpoint_path=str(tmp_path / file)).eval()
        assert torch.equal(again(x), model(x))


@few
@pytest.mark.filterwarnings("ignore:a grid of:UserWarning")
def test_saved_for_the_hub_after_changes(case, model, tmp_path):
    """What was reset, resized or pooled anew is what comes back."""
    h, w = case.size
    model.set_input_size((w, h))
    model.reset_classifier(3, "max")
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(case.images().mT), model(case.images().mT))
    assert again.patch_embed.grid_size == model.patch_embed.grid_size
    wider = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=5, in_chans=1).eval()
    assert wider(case.images(channels=1).mT).shape == (2, 5)
    assert torch.equal(wider.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)
    features = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, features_only=True, out_indices=[1])
    (last,) = features.eval()(case.images().mT)
    assert torch.equal(last, model.forward_intermediates(case.images().mT, indices=1, intermediates_only=True)[0])


@few
def test_data_configuration(case, model):
    side = int(model.default_cfg["input_size"][1])
    assert timm.data.resolve_model_data_config(model)["input_size"] == (3, side, side)  # timm's: what it is made for
    known = timm.data.resolve_input_data_config(model)
    assert known["input_size"] == (3, *case.size)
    for training in (False, True):
        transform = timm.data.create_transform(**known, is_training=training)
        assert transform(Image.new("RGB", (97, 61))).shape == (3, *case.size)
    other = timm.data.resolve_model_data_config(model, {"mean": (0.1, 0.2, 0.3)})
    assert other["mean"] == (0.1, 0.2, 0.3)


@few
def test_tools_of_timm(case, model):
    x = case.images()
    freeze(model, [name for name, _ in model.named_children()])
    own = [name for name, _ in model.named_parameters(recurse=False)]  # tokens, which timm leaves alone
    assert [n for n, p in model.named_parameters() if p.requires_grad] == own
    unfreeze(model, ["head"])
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [*own, "head.weight", "head.bias"]
    hook = ActivationStatsHook(model, ["blocks.*.attn"], [lambda module, inputs, output: output.mean().item()])
    model(x)
    assert len(hook.stats["<lambda>"]) == 2
    for block in model.blocks:
        block.attn.fused_attn = False  # a fused kernel does not show its weights, ours no more than timm's
    tokens = model.forward_features(x).shape[1]
    weights = AttentionExtract(model, method="hook")(x)
    assert list(weights) == ["blocks.0.attn.attn_drop", "blocks.1.attn.attn_drop"]
    for each in weights.values():
        assert each.shape == (2, model.blocks[0].attn.num_heads, tokens, tokens)
        close(each.sum(-1), torch.ones(each.shape[:3]))


@pytest.mark.parametrize(
    ("name", "backend"), [pytest.param("all-5", "aot_eager", marks=pytest.mark.slow), ("rope+bias-1", "eager")]
)
def test_compile(case, model, backend):
    torch.compiler.reset()
    model.prune_intermediate_layers([0], prune_head=False)
    x, model = case.images(), model.train()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    got, expected = compiled(x), twin(x)
    close(got, expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    for (name, one), two in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, two[1].grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("name", ["bias-5"])
def test_compile_with_the_default_backend(case, model):
    torch.compiler.reset()
    model.prune_intermediate_layers([0], prune_head=False)
    close(torch.compile(model, fullgraph=True)(case.images()), model(case.images()))


@pytest.mark.parametrize(
    ("name", "strict"), [("all-5", True), ("all-5", False), ("rope+bias-1", False), ("cpb-0", True)]
)
def test_torch_export(case, model, strict):
    model.prune_intermediate_layers([0], prune_head=False)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(model, (case.images(),), dynamic_shapes=(batch,), strict=strict)
    x = case.images(batch=5)
    close(program.module()(x), model(x))


@pytest.mark.parametrize("name", ["rope+bias-1", "bias+kernel-1", "txl-1", "sinusoid-1"])
def test_an_exported_program_takes_other_sizes(name):
    case = CASES[name]
    model = case.build(dynamic_img_size=True, depth=1)
    rows, columns = (torch.export.Dim(name, min=4, max=12) for name in ("rows", "columns"))
    sizes = ({2: 4 * rows, 3: 4 * columns},)
    program = torch.export.export(model, (case.images(),), dynamic_shapes=sizes, strict=False)
    for size in ((20, 40), (24, 16)):
        x = torch.randn(2, 3, *size)
        close(program.module()(x), model(x))


@pytest.mark.parametrize("name", [pytest.param("all-5", marks=pytest.mark.slow), "cpb-0"])
def test_onnx(case, model, tmp_path):
    pytest.importorskip("onnxscript", reason="needs vitrel's extra 'export'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs vitrel's extra 'export'")
    from timm.utils.onnx import onnx_export

    path = str(tmp_path / "model.onnx")
    model.prune_intermediate_layers([0], prune_head=False)
    onnx_export(model, path, example_input=case.images(), use_dynamo=True, input_names=["images"])
    session = onnxruntime.InferenceSession(path)
    for batch in (1, 5):
        x = case.images(batch)
        (got,) = session.run(None, {"images": x.numpy()})
        close(torch.from_numpy(got), model(x), atol=1e-4)


@pytest.mark.parametrize("arguments", [{"drop_paht_rate": 0.1}, {"dynamic_size": True}], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_unknown_keyword_is_named(name, arguments):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(arguments))}'"):
        timm.create_model(name, depth=1, **arguments)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_wrapper_passes(name, tmp_path):
    """Loaders of other projects pass the whole list of timm's arguments."""
    given = {"num_classes": 7, "in_chans": 1, "drop_path_rate": 0.1, "drop_rate": 0.1, "img_size": VARIANTS[name],
             "depth": 1, "pretrained": False, "dynamic_img_size": True, "scriptable": None, "exportable": None,
             "cache_dir": None}  # fmt: skip
    model = timm.create_model(name, **given)
    torch.save(model.state_dict(), tmp_path / "model.pth")
    again = timm.create_model(name, **given, checkpoint_path=str(tmp_path / "model.pth")).eval()
    x = torch.randn(1, 1, *VARIANTS[name])
    assert torch.equal(again(x), model.eval()(x))
    features = timm.create_model(name, **{**given, "depth": 3}, features_only=True, out_indices=[-2, -1])
    assert [f.shape[0] for f in features.eval()(x)] == [1, 1]


@pytest.mark.parametrize("block_fn", ["ParallelScalingBlock", "ParallelThingsBlock"])
def test_blocks_without_an_attention_of_their_own_are_refused(block_fn):
    block = getattr(timm.models.vision_transformer, block_fn)
    with pytest.raises(ValueError, match=f"^block_fn: {block_fn} has no timm Attention named attn"):
        timm.create_model(MICRO, block_fn=block)
    with pytest.raises(ValueError, match=f"^block_fn: '{block_fn}' is unknown, expected one of Block, ResPostBlock"):
        timm.create_model(MICRO, block_fn=block_fn)
