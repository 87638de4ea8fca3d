"""relativize and plain: timm's models keep their function, their weights and their methods."""

import copy
import pickle
import warnings

import pytest
import timm
import torch
from timm.models import Eva, VisionTransformer
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from timm.optim import create_optimizer_v2
from timm.optim._param_groups import param_groups_layer_decay

import vitrel
from vitrel.attention import RelativeAttention2d
from vitrel.relpos import PRESETS

NAMES = {
    "vit_tiny_patch16_224": (48, 80),
    "deit_tiny_distilled_patch16_224": (48, 80),
    "deit3_small_patch16_224": (48, 80),
    "vit_small_patch14_reg4_dinov2": (42, 70),
    "vit_base_patch16_clip_224": (48, 80),
    "vit_so150m_patch16_reg4_gap_256": (48, 80),
    "eva02_tiny_patch14_224": (42, 70),
    "vit_small_patch16_rope_224": (48, 80),
    "vit_small_patch16_rope_mixed_224": (48, 80),
    "vit_small_patch16_dinov3": (48, 80),
    "naflexvit_base_patch16_gap": (48, 80),
}
SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
BODIES = {
    "vit": (VisionTransformer, {}),
    "average": (VisionTransformer, {"global_pool": "avg", "class_token": False}),
    "registers": (VisionTransformer, {"reg_tokens": 4, "no_embed_class": True}),
    "everything": (
        VisionTransformer,
        {"init_values": 0.5, "qk_norm": True, "scale_attn_norm": True, "pre_norm": True, "qkv_bias": False},
    ),
    "res-post": (VisionTransformer, {"block_fn": ResPostBlock, "init_values": 0.5}),
    "parallel": (VisionTransformer, {"block_fn": ParallelThingsBlock, "fix_init": False}),
    "map pooling": (VisionTransformer, {"global_pool": "map", "class_token": False}),
    "distilled": (timm.models.deit.VisionTransformerDistilled, {}),
    "eva": (Eva, {"use_rot_pos_emb": True, "swiglu_mlp": True, "dynamic_img_size": False}),
    "eva, separate": (Eva, {"qkv_fused": False, "scale_attn_inner": True, "use_rot_pos_emb": True, "init_values": 0.5}),
    "eva, post-norm": (Eva, {"use_post_norm": True}),
    "rope": (Eva, {"attn_type": "rope", "use_rot_pos_emb": True, "use_abs_pos_emb": False, "qk_norm": True}),
    "rope, mixed": (Eva, {"attn_type": "rope", "use_rot_pos_emb": True, "rope_type": "mixed"}),
    "rope, grouped": (
        Eva,
        {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 1, "use_rot_pos_emb": True, "rope_type": "dinov3"}
        | {"rope_rotate_half": True, "num_reg_tokens": 2},
    ),
    "naflex": (NaFlexVit, {"reg_tokens": 2, "global_pool": "avg", "init_values": 0.5, "pos_embed_grid_size": (6, 6)}),
    "naflex, rope": (NaFlexVit, {"rope_type": "axial", "class_token": True, "global_pool": "token"}),
    "naflex, rope mixed": (NaFlexVit, {"rope_type": "mixed", "pos_embed": "factorized", "global_pool": "avg"}),
}
GRIDS = [body for body, (kind, _) in BODIES.items() if kind is not NaFlexVit]
NAFLEX = [body for body in BODIES if body not in GRIDS]


def randomize(model, names=None, std=0.2):
    """Random numbers in the parameters, all of them or those named, so that nothing hides behind a zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in sorted(names or dict(model.named_parameters())):
            parameter = model.get_parameter(name)
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(noise * std + (1 if "norm" in name and name.endswith("weight") else 0))
    return model


def make(body, dtype=torch.float64, **kwargs):
    kind, args = BODIES[body]
    size = {} if kind is NaFlexVit else {"img_size": (24, 40)}
    return randomize(kind(**{**SMALL, **size, **args, **kwargs})).to(dtype).eval()


def relative(body, rel_pos="txl+bias", dtype=torch.float64, **kwargs):
    """A small relativized model with random tables."""
    names = ("keep_absolute", "blocks", "grid_size", "backend", "resize", "share_layers")
    own = {k: v for k, v in kwargs.items() if k not in names}
    model = vitrel.relativize(make(body, dtype, **own), rel_pos, **{k: v for k, v in kwargs.items() if k in names})
    return randomize(model, model.position_parameters(), std=1.0)


def image(size=(24, 40), batch=2, dtype=torch.float64):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)


def padded(pictures, patch=8, length=None):
    """A batch for NaFlexVit from pictures (1, 3, H, W) of any size; what pads it is rubbish."""
    parts = []
    for picture in pictures:
        _, _, height, width = picture.shape
        h, w = height // patch, width // patch
        patches = picture.reshape(3, h, patch, w, patch).permute(1, 3, 2, 4, 0).reshape(h * w, -1)
        parts.append((patches, torch.cartesian_prod(torch.arange(h), torch.arange(w))))
    length = length or max(len(patches) for patches, _ in parts)
    batch = {
        "patches": torch.full((len(parts), length, 3 * patch * patch), 9.0, dtype=pictures[0].dtype),
        "patch_coord": torch.zeros(len(parts), length, 2, dtype=torch.long),
        "patch_valid": torch.zeros(len(parts), length, dtype=torch.bool),
    }
    for i, (patches, coords) in enumerate(parts):
        batch["patches"][i, : len(patches)] = patches
        batch["patch_coord"][i, : len(patches)] = coords
        batch["patch_valid"][i, : len(patches)] = True
    return batch


PICTURES = [(24, 40), (40, 24), (32, 32), (8, 56)]


def spread(a, b):
    """Largest difference, as a share of the largest value of b."""
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_timm_models_with_zero_tables_keep_their_logits(name, dtype, atol):
    size = {} if name.startswith("naflex") else {"img_size": NAMES[name]}
    model = randomize(timm.create_model(name, depth=2, num_classes=7, **size), std=0.1).to(dtype).eval()
    x, parameters = image(NAMES[name], dtype=dtype), dict(model.named_parameters())
    expected, kind = model(x), type(model)
    assert vitrel.relativize(model, "txl", init="zeros") is model
    assert isinstance(model, kind)
    assert spread(model(x), expected) <= atol
    now = dict(model.named_parameters())
    assert all(now[name] is parameter for name, parameter in parameters.items())
    assert now.keys() - parameters.keys() == model.position_parameters() != set()
    randomize(model, model.position_parameters(), std=1.0)
    assert spread(model(x), expected) > 1e-3
    assert vitrel.plain(model) is model
    assert type(model) is kind
    assert torch.equal(model(x), expected)
    assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(p)) for n, p in parameters.items()]


@pytest.mark.parametrize("body", BODIES)
@torch.no_grad()
def test_bodies_with_zero_tables_keep_their_logits(body):
    model, inputs = make(body), [image()]
    if body in NAFLEX:
        inputs.append(padded([image(size, batch=1) for size in PICTURES]))
    expected = [model(x) for x in inputs]
    vitrel.relativize(model, "txl+bias+key+value", init="zeros", prefix="learned")
    assert all(spread(model(x), y) <= 1e-12 for x, y in zip(inputs, expected, strict=True))
    randomize(model, model.position_parameters(), std=1.0)
    assert all(spread(model(x), y) > 1e-4 for x, y in zip(inputs, expected, strict=True))
    vitrel.plain(model)
    assert all(torch.equal(model(x), y) for x, y in zip(inputs, expected, strict=True))


@pytest.mark.parametrize(
    "preset", [*(p for p in PRESETS if p not in ("cpb", "deberta", "rope", "rope_mixed")), "bias+kernel"]
)
@pytest.mark.parametrize("body", ["registers", "rope", "naflex"])
@torch.no_grad()
def test_every_preset_starts_from_the_models_function(body, preset):
    model, x = make(body), image()
    expected = model(x)
    assert spread(vitrel.relativize(model, preset, init="zeros")(x), expected) <= 1e-12


@pytest.mark.parametrize("rel_pos", ["txl+bias", {"preset": "irpe_qkv"}, "shaw", "cpb", "bias+kernel"], ids=str)
@pytest.mark.parametrize("body", NAFLEX)
@torch.no_grad()
def test_a_padded_batch_of_mixed_grids_gives_what_each_picture_gives(body, rel_pos):
    model = relative(body, rel_pos, grid_size=(4, 5))
    pictures = [image(size, batch=1) for size in PICTURES]
    expected = torch.cat([model(picture) for picture in pictures])
    assert expected.std(0).min() > 1e-3
    atol = 1e-6 if model.rope is not None else 1e-12  # timm makes some angles in float32
    torch.testing.assert_close(model(padded(pictures, length=20)), expected, rtol=0, atol=atol)
    model.use_key_only_attn_mask = True
    torch.testing.assert_close(model(padded(pictures)), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("backend", ["folded", "reference"])
@torch.no_grad()
def test_backends_agree_on_padded_batches(backend):
    batch = padded([image(size, batch=1) for size in PICTURES])
    for x in (batch, image()):
        expected = relative("naflex", "txl+bias+value+kernel", grid_size=(4, 5))(x)
        got = relative("naflex", "txl+bias+value+kernel", grid_size=(4, 5), backend=backend)(x)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_patches_in_any_order_have_their_coordinates():
    model = relative("naflex", keep_absolute=False, grid_size=(4, 5))
    batch = padded([image(size, batch=1) for size in PICTURES])
    expected, order = (
        model(batch),
        torch.randperm(batch["patches"].shape[1], generator=torch.Generator().manual_seed(0)),
    )
    torch.testing.assert_close(model({name: part[:, order] for name, part in batch.items()}), expected)
    moved = {**batch, "patch_coord": batch["patch_coord"] + 3}
    torch.testing.assert_close(model(moved), expected)  # only offsets count
    moved["patch_coord"] = batch["patch_coord"].flip(-1)
    assert spread(model(moved), expected) > 1e-3


@pytest.mark.parametrize("form", ["image", "batch"])
def test_patches_that_are_left_keep_their_coordinates_in_naflex(form):
    model = relative("naflex", keep_absolute=False, grid_size=(4, 5), patch_drop_rate=0.4)
    x = image((24, 40)) if form == "image" else padded([image(size, batch=1) for size in PICTURES])
    batch = padded([*image((24, 40)).split(1)]) if form == "image" else x
    seen = []
    model.patch_drop.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    torch.manual_seed(0)
    got = model.train()(x)
    kept = {
        k: v.gather(1, seen[0].reshape(*seen[0].shape, *[1] * (v.ndim - 2)).expand(-1, -1, *v.shape[2:]))
        for k, v in batch.items()
    }
    torch.testing.assert_close(got, model.eval()(kept))


@pytest.mark.parametrize("form", [lambda x: x, lambda x: padded([x])], ids=["image", "batch"])
def test_two_batches_before_one_backward_pass_with_checkpointing(form):
    """A block that runs again in the backward pass has the coordinates of its own batch, not of the last one."""
    model = relative("naflex", grid_size=(4, 5)).train()
    batches = [form(image(size, batch=1)) for size in ((24, 40), (40, 24))]
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        sum(model(batch).square().sum() for batch in batches).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


@pytest.mark.parametrize("body", BODIES)
def test_gradient_checkpointing_gives_the_same_gradients(body):
    model = relative(body).train()
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(image()).square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert model.position_parameters() <= grads[0].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)
    assert all(grads[0][name].any() for name in model.position_parameters() if name.startswith("blocks.1."))


@pytest.mark.parametrize("rule", ["clamp", "interpolate"])
@pytest.mark.parametrize("body", GRIDS)
@torch.no_grad()
def test_another_size_is_reached_three_ways(body, rule):
    """set_input_size, dynamic_img_size, and weights loaded into a model of that size; a fixed one names both sizes."""
    model, x = relative(body, resize=rule), image((40, 24))
    moved, built = copy.deepcopy(model), relative(body, resize=rule, img_size=(40, 24))
    dynamic = relative(body, resize=rule, dynamic_img_size=True)
    moved.set_input_size((40, 24))
    absolute = {n: v for n, v in moved.state_dict().items() if "pos_embed" in n}  # timm's own to resize
    built.load_state_dict({**model.state_dict(), **absolute})
    dynamic.load_state_dict(model.state_dict())
    assert {attn.grid_size for attn in moved.relative_attentions()} == {(5, 3)}
    atol = 1e-6 if getattr(model, "rope", None) is not None else 1e-12  # timm makes some angles in float32
    torch.testing.assert_close(dynamic(image()), model(image()), rtol=0, atol=atol)
    with warnings.catch_warnings():
        if rule == "clamp":
            warnings.filterwarnings("ignore", "a grid of 5x3 patches reads relative positions beyond the trained ones")
        expected = moved(x)
        torch.testing.assert_close(built(x), expected, rtol=0, atol=atol)
        torch.testing.assert_close(dynamic(x), expected, rtol=0, atol=atol)
    with pytest.raises(AssertionError, match=r"Input height \(40\) doesn't match model \(24\)"):
        model(x)


@pytest.mark.parametrize("body", ["distilled", "rope"])
def test_reading_beyond_the_trained_grid_is_said_once(body):
    model = relative(body, dynamic_img_size=True, resize="clamp")
    with pytest.warns(UserWarning, match="a grid of 5x3 patches reads relative positions beyond the trained ones"):
        model(image((40, 24)))
    model(image((40, 24)))  # a second warning would be an error here
    assert {c.share for c in vitrel.coverage(model, (5, 3)).values()} == {1 - 2 * 3 / 25}  # rows 3 and 4 apart of 5 x 5


@pytest.mark.parametrize("body", BODIES)
@torch.no_grad()
def test_features_and_classifier(body):
    model, x = relative(body), image()
    final, steps = model.forward_intermediates(x, indices=[0, 2])
    assert [tuple(s.shape) for s in steps] == [(2, 32, 3, 5)] * 2
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(model.forward_head(final), model(x))
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    model.prune_intermediate_layers([1])
    assert model.forward_intermediates(x, indices=[1], intermediates_only=True)[0].shape == (2, 32, 3, 5)


@pytest.mark.parametrize("body", BODIES)
def test_position_parameters_do_not_decay_and_belong_to_their_block(body):
    model = relative(body, dtype=torch.float32)
    names = model.position_parameters()
    assert names == vitrel.position_parameters(model) == {n for n, _ in model.named_parameters() if ".position." in n}
    assert names <= model.no_weight_decay()
    for compiled in (False, True):
        if compiled:
            model.compile()
        optimizer = create_optimizer_v2(model, "adamw", lr=0.1, weight_decay=0.05)
        decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        assert len(decay) == len(list(model.parameters()))
        assert {decay[id(model.get_parameter(name))] for name in names} == {0.0}
        assert 0.05 in decay.values()
    groups = param_groups_layer_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    undecayed = {id(p) for group in groups for p in group["params"] if not group["weight_decay"]}
    assert {id(model.get_parameter(name)) for name in names} <= undecayed
    for name in names:
        mlp = next(n for n, _ in model.named_parameters() if n.startswith(name.split(".attn")[0] + ".") and "fc" in n)
        assert scale[id(model.get_parameter(name))] == scale[id(model.get_parameter(mlp))]


@pytest.mark.parametrize("body", BODIES)
@torch.no_grad()
def test_save_copy_and_pickle(body):
    model, x = relative(body), image()
    twin = vitrel.relativize(make(body), "txl+bias")
    twin.load_state_dict(model.state_dict())
    for other in (twin, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(other(x), model(x))
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    assert [k for k in model.state_dict() if any(w in k for w in ("index", "coord", "mask", "places"))] == []
    assert torch.equal(vitrel.plain(copy.deepcopy(model))(x), make(body)(x))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_weights_of_another_size_load_below_wrappers(depth):
    small = relative("registers", "beit", resize="clamp", keep_absolute=False, img_size=64)
    large = relative("registers", "beit", resize="clamp", keep_absolute=False, img_size=(64, 96))
    wrapped = [small, large]
    for _ in range(depth):
        wrapped = [torch.nn.ModuleDict({"model": m}) for m in wrapped]
    wrapped[1].load_state_dict(wrapped[0].state_dict())
    ours, theirs = (m.blocks[1].attn.position for m in (large, small))
    assert ours.bias.table.shape == (2, 15, 23)
    assert torch.equal(ours.bias.table[:, :, 4:-4], theirs.bias.table)
    assert torch.equal(ours.prefix, theirs.prefix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("body", ["vit", "eva, separate", "rope, grouped"])
@torch.no_grad()
def test_low_precision_changes_size(body, dtype):
    model = relative(body, resize="interpolate", dtype=torch.float32)
    low = copy.deepcopy(model).to(dtype)
    for one in (model, low):
        one.set_input_size((40, 24))
    x = image((40, 24), dtype=torch.float32)
    assert torch.nn.functional.cosine_similarity(low(x.to(dtype)).float(), model(x)).min() > 0.99
    assert {p.dtype for p in low.parameters()} == {dtype}


@pytest.mark.parametrize("body", ["vit", "eva", "rope", "naflex"])
def test_autocast_and_every_gradient(body):
    model = relative(body, "txl+bias+value", dtype=torch.float32).train()
    with torch.autocast("cpu", torch.bfloat16):
        got = model(image(dtype=torch.float32))
    got.float().square().sum().backward()
    assert all(model.get_parameter(n).grad.isfinite().all() for n in model.position_parameters())
    assert torch.nn.functional.cosine_similarity(got.float(), model(image(dtype=torch.float32))).min() > 0.99


def test_timms_keywords_before_relativize():
    """What create_model was given holds afterwards; an unknown keyword is named."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, in_chans=1, drop_path_rate=0.1, img_size=(32, 48))
    vitrel.relativize(model, "bias", blocks=[-1, 0])
    assert model(torch.randn(2, 1, 32, 48)).shape == (2, 7)
    assert model.blocks[11].drop_path1.drop_prob == pytest.approx(0.1)
    with pytest.raises(
        TypeError, match=r"^relativize: unknown keyword 'keep_absolut'; did you mean 'keep_absolute'\?$"
    ):
        vitrel.relativize(make("vit"), "bias", keep_absolut=False)
    with pytest.raises(TypeError, match=r"^relativize: unknown keyword 'xyz', expected a field of RelPos: terms, "):
        vitrel.relativize(make("vit"), "bias", xyz=None)


@pytest.mark.parametrize("rel_pos", ["txl", {"preset": "txl"}, vitrel.RelPos.preset("txl"), None], ids=str)
def test_rel_pos_is_given_as_everywhere(rel_pos):
    model = vitrel.relativize(make("vit"), rel_pos, scale="content", init="zeros")
    spec = model.blocks[0].attn.rel_pos
    assert (spec.scale, spec.init) == ("content", "zeros")
    assert spec.terms == (("query", "u", "v") if rel_pos else ())


@torch.no_grad()
def test_blocks_are_chosen():
    model, x = make("vit"), image()
    vitrel.relativize(model, "bias", blocks=[-1, 0])
    assert [isinstance(block.attn, RelativeAttention2d) for block in model.blocks] == [True, False, True]
    assert [report.block for report in vitrel.explain(model)] == ["blocks.0", "blocks.2"]
    randomize(model, {n for n in model.position_parameters() if n.startswith("blocks.2")})
    steps = model.forward_intermediates(x, intermediates_only=True)
    for step, plain, same in zip(
        steps, make("vit").forward_intermediates(x, intermediates_only=True), (1, 1, 0), strict=True
    ):
        assert torch.allclose(step, plain) == bool(same)


def test_layers_share_one_position():
    model = relative("parallel", share_layers=True, blocks=[1, 2])
    assert {name.split(".position.")[0] for name in model.position_parameters()} == {"blocks.1.attns.0.attn"}
    attentions = model.relative_attentions()
    assert len(attentions) == 4
    assert all(attn.position_terms is attentions[0].position for attn in attentions)
    twins = copy.deepcopy(model).relative_attentions()
    assert all(attn.position_terms is twins[0].position is not attentions[0].position for attn in twins)


@pytest.mark.parametrize("body", BODIES)
@torch.no_grad()
def test_the_absolute_embedding_is_dropped(body):
    model, zeroed = relative(body, keep_absolute=False), make(body)
    for name, parameter in zeroed.named_parameters():
        if "pos_embed" in name:
            parameter.zero_()
    assert not any("pos_embed" in name for name in model.state_dict())
    state = {n: v for n, v in model.state_dict().items() if ".position." not in n}
    zeroed.load_state_dict(state, strict=False)
    vitrel.relativize(zeroed, "txl+bias").load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(image()), zeroed(image()))
    if body in GRIDS:
        model.set_input_size((24, 32))
        assert model(image((24, 32))).shape == (2, 5)


@pytest.mark.parametrize("body", BODIES)
def test_maps_explain_and_coverage(body):
    model = relative(body, grid_size=(3, 5)) if body in NAFLEX else relative(body)
    maps, report = vitrel.bias_maps(model), vitrel.explain(model)
    blocks = [f"blocks.{i}.attns.{j}" for i in range(3) for j in range(2)] if body == "parallel" else None
    assert (
        list(maps)
        == list(vitrel.coverage(model))
        == [r.block for r in report]
        == (blocks or ["blocks.0", "blocks.1", "blocks.2"])
    )
    attn = model.relative_attentions()[0]
    position, s = attn.position_terms(), attn.head_dim**-0.5
    h, w = 2 - 1, 4 + 2  # the key one row below and two columns left of the query
    query, bias = (position.tables[t][0][:, h] + position.tables[t][1][:, w] for t in ("query", "bias"))
    expected = bias + s * (position.vectors["v"] * query).sum(-1)
    first = next(iter(maps.values()))
    assert first.shape == (2, 5, 9)
    torch.testing.assert_close(first[:, 2 + 1, 4 - 2], expected.float())
    assert {(r.grid, r.terms) for r in report} == {("3x5", "bias+query+u+v")}
    assert all(r.extra_bytes > 0 and r.backend in ("written", "dense") for r in report)
    assert all(("rotary" in r.why) == (model.rope is not None) for r in report if hasattr(model, "rope"))
    assert {c.share for c in vitrel.coverage(model).values()} == {1.0}


def test_the_grid_of_a_naflex_model():
    assert relative("naflex").blocks[0].attn.grid_size == (6, 6)
    assert relative("naflex", grid_size=(4, 9)).blocks[0].attn.grid_size == (4, 9)
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1)
    assert vitrel.relativize(model, "bias").blocks[0].attn.grid_size == (24, 24)  # 384 px


class Described(VisionTransformer):
    """A user's own model."""

    def forward(self, x, attn_mask=None, is_causal=False):
        return {"logits": super().forward(x, attn_mask, is_causal)}


def test_a_users_subclass_keeps_its_methods():
    model = vitrel.relativize(Described(img_size=(24, 40), **SMALL), "bias")
    assert isinstance(model, Described)
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is type(model)
    x = image(dtype=torch.float32)
    torch.testing.assert_close(twin.eval()(x)["logits"], model.eval()(x)["logits"])
    assert type(vitrel.plain(model)) is Described


def test_hooks_and_frozen_weights_stay():
    model, calls = make("vit"), []
    model.requires_grad_(False).train()
    model.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    vitrel.relativize(model, "bias")
    model(image())
    assert calls == [1]
    assert model.blocks[0].attn.training
    assert {n for n, p in model.named_parameters() if p.requires_grad} == model.position_parameters()


@pytest.mark.parametrize("scheme", ["txl", "deberta", "irpe_qkv"])
@pytest.mark.parametrize("body", ["average", "eva", "rope, grouped", "naflex"])
def test_position_learns_from_zeros(body, scheme):
    """No position parameter stays without a gradient: those that multiply a table of zeros get theirs a step later."""
    model = vitrel.relativize(make(body, torch.float32), scheme, init="zeros").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(image(dtype=torch.float32)), torch.arange(2)).backward()
        optimizer.step()
    assert [name for name in model.position_parameters() if not model.get_parameter(name).grad.any()] == []


@pytest.mark.parametrize("body", ["vit", "rope", "naflex"])
def test_no_graph_break(body):
    torch.compiler.reset()
    model = relative(body, dtype=torch.float32, depth=1)
    assert torch._dynamo.explain(model)(image(dtype=torch.float32)).graph_break_count == 0


def unserved(name, **kwargs):
    return lambda: timm.create_model(name, **kwargs)


REFUSED = {
    "swin": (
        unserved("swin_tiny_patch4_window7_224"),
        r"cannot serve SwinTransformer, whose WindowAttention is not attention over one grid of all patches; expected",
    ),
    "convnext": (unserved("convnext_atto"), r"cannot serve ConvNeXt, which has no attention between patches; expected"),
    "vit_relpos": (
        unserved("vit_relpos_small_patch16_224", depth=1),
        r"cannot serve VisionTransformerRelPos, which has relative position of its own \(vitrel.from_timm ",
    ),
    "features": (
        unserved("vit_tiny_patch16_224", depth=4, features_only=True),
        r"cannot serve FeatureGetterNet, which wraps a model: relativize that one, and wrap it afterwards; expected",
    ),
    "a name": (
        lambda: "vit_tiny_patch16_224",
        r"cannot serve str, which is no model; expected a timm VisionTransformer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_of_other_families_are_refused_by_name(name):
    build, message = REFUSED[name]
    with pytest.raises(TypeError, match=f"^relativize: {message}[^\n]*$"):
        vitrel.relativize(build(), "bias")


def small(**kwargs):
    return VisionTransformer(img_size=24, fix_init=False, **{**SMALL, **kwargs})


WRONG = {
    "fused block": (
        lambda: small(block_fn=ParallelScalingBlock),
        {},
        r"blocks.0: ParallelScalingBlock makes queries, keys, values and the input of its MLP by one projection",
    ),
    "difference": (
        lambda: small(attn_layer="diff"),
        {},
        r"blocks.0.attn: DiffAttention subtracts one softmax from another, where relative position has no agreed place",
    ),
    "patch drop": (lambda: small(patch_drop_rate=0.5), {}, r"patch_drop: relative attention needs every patch of the"),
    "eva patch drop": (lambda: make("eva", patch_drop_rate=0.5), {}, r"patch_drop: relative attention needs every pa"),
    "range": (small, {"blocks": [3]}, r"blocks: expected at least one index from 0 to 2, got \[3\]"),
    "none": (small, {"blocks": []}, r"blocks: expected at least one index from 0 to 2, got \[\]"),
    "grid": (small, {"grid_size": (3, 5)}, r"grid_size: that of VisionTransformer follows from its image and patch"),
    "naflex grid": (
        lambda: make("naflex"),
        {"grid_size": 3},
        r"grid_size: expected \(h, w\) in patches, each at least",
    ),
    "backend": (small, {"backend": "dens"}, r"backend: 'dens' is unknown, expected one of .*did you mean 'dense'\?"),
    "rope backend": (lambda: make("rope"), {"backend": "dens"}, r"backend: 'dens' cannot take in a rotary embedding"),
    "scheme": (small, {"rel_pos": "tlx"}, r"rel_pos: preset 'tlx' is unknown, expected one of .*did you mean 'txl'\?"),
    "odd heads": (
        lambda: small(embed_dim=12),
        {"rel_pos": "rope"},
        r"rotary: the width of a head must be a multiple of 4, got 6",
    ),
    "rotary twice": (
        lambda: make("rope"),
        {"rel_pos": "rope+bias"},
        r"rel_pos: Eva turns queries and keys by a rotary embedding of its own, and a rotary term would turn",
    ),
    "again": (
        lambda: relative("vit"),
        {},
        r"relativize: RelativizedVisionTransformer has relative position already; call vitrel.plain\(model\) first",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_refusal_changes_nothing(name):
    build, call, message = WRONG[name]
    model = build()
    kind, modules, parameters = type(model), list(model.modules()), list(model.named_parameters())
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        vitrel.relativize(model, **{"rel_pos": "bias", "keep_absolute": False, **call})
    assert type(model) is kind
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(p)) for n, p in parameters]


@pytest.mark.parametrize("blocks", [1, "01", [0.0], [True]])
def test_blocks_are_indices(blocks):
    with pytest.raises(TypeError, match=r"^blocks: expected indices such as \[0, 1\] or range\(6\), got "):
        vitrel.relativize(make("vit"), "bias", blocks=blocks)


def test_models_built_relative_are_told_from_those_made_so():
    built = timm.create_model("vitrel_micro_patch4_32", depth=1)
    with pytest.raises(
        ValueError, match=r"^relativize: RelativeVisionTransformer has .* already; build it with another"
    ):
        vitrel.relativize(built, "txl")
    for model, mend in ((built, "build it with rel_pos='none'"), (small(), "it has nothing to undo")):
        name = type(model).__name__
        with pytest.raises(TypeError, match=f"^plain: {name} was not made by vitrel.relativize; {mend}$"):
            vitrel.plain(model)


@pytest.mark.parametrize("body", ["registers", "eva", "eva, separate", "rope, grouped", "naflex"])
@torch.no_grad()
def test_a_model_without_memory_is_filled_later(body):
    """Built and relativized on the meta device, as big models are."""
    with torch.device("meta"):
        model = vitrel.relativize(make(body), "txl+bias", init="zeros")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu").init_weights()
    assert not any(model.get_parameter(name).any() for name in model.position_parameters())
    expected = relative(body)
    model.load_state_dict(expected.state_dict())
    torch.testing.assert_close(model(image()), expected(image()), rtol=0, atol=1e-6)  # angles made in float32 or 64


@torch.no_grad()
def test_there_and_back_and_there():
    model, x = make("registers"), image()
    first = vitrel.relativize(model, "txl", init="zeros")(x)
    again = vitrel.relativize(vitrel.plain(model), "bias")
    assert {name.split(".position.")[1] for name in again.position_parameters()} == {"bias.table_h", "bias.table_w"}
    torch.testing.assert_close(again(x), first)
