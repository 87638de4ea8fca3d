"""The models: zero tables change nothing, parameters are named, wrong arguments are refused by name."""

import copy
import pickle
import warnings

import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import vitrel
from vitrel.relpos import PRESETS
from vitrel.resize import RESIZE
from vitrel.vit import RelativeVisionTransformer

SCHEMES = [
    *(name for name in PRESETS if name not in ("none", "rope", "rope_mixed", "cpb")),
    "bias+kernel",
    "txl+bias",
    "rope+bias",
    "txl+value",
    {"preset": "txl", "share_layers": True},
    {"preset": "irpe_qkv", "table": "separable"},
]
OTHERS = ["rope", "rope_mixed", "cpb", {"preset": "txl", "source": "sinusoid"}]  # not the plain model at zero
PREFIXES = [{}, {"class_token": True}, {"class_token": True, "reg_tokens": 4}]


def micro(rel_pos="bias", **kwargs):
    torch.manual_seed(0)
    return timm.create_model("vitrel_micro_patch4_32", **{"num_classes": 10, "rel_pos": rel_pos, **kwargs}).eval()


def fill(model, std=0.5):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in sorted(model.position_parameters()):
            parameter = model.get_parameter(name)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


@pytest.mark.parametrize("prefix", PREFIXES, ids=["0", "1", "5"])
@pytest.mark.parametrize("rel_pos", [s for s in SCHEMES if "rope" not in str(s)], ids=str)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_zero_tables_leave_the_logits_of_none(rel_pos, prefix, dtype, atol):
    spec = {**vitrel.RelPos.of(rel_pos).as_dict(), "init": "zeros"}
    if spec["scale"] == "deberta":
        spec["scale"] = "sum"  # DeBERTa's scale shrinks the content term too
    plain = micro("none", img_size=(24, 40), **prefix).to(dtype)
    relative = micro(spec, img_size=(24, 40), **prefix).to(dtype)
    loaded = relative.load_state_dict(plain.state_dict(), strict=False)
    assert set(loaded.missing_keys) == relative.position_parameters()
    assert not loaded.unexpected_keys
    x = torch.randn(2, 3, 24, 40, dtype=dtype)
    torch.testing.assert_close(relative(x), plain(x), rtol=0, atol=atol)
    assert (fill(relative, std=2.0)(x) - plain(x)).abs().max() > 1e-3


def test_one_seed_gives_one_body_whatever_the_scheme():
    plain, relative = micro("none").state_dict(), micro("txl").state_dict()
    assert all(torch.equal(relative[name], value) for name, value in plain.items())


def test_no_absolute_embedding_and_no_class_token_unless_asked_for():
    model = micro()
    assert model.pos_embed is None
    assert model.cls_token is None
    assert model.global_pool == "avg"
    asked = micro(pos_embed="learn", class_token=True, global_pool="token")
    assert asked.pos_embed.shape == (1, 65, 128)
    assert asked(torch.randn(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize("rel_pos", ["none", *SCHEMES, *OTHERS], ids=str)
def test_position_parameters_are_named_and_do_not_decay(rel_pos):
    model = micro(rel_pos)
    names = {name for name, _ in model.named_parameters()}
    assert model.position_parameters() == {name for name in names if ".position." in name}
    assert model.position_parameters() <= model.no_weight_decay()
    assert bool(model.position_parameters()) == (rel_pos not in ("none", "rope"))


@pytest.mark.parametrize("rel_pos", [*SCHEMES, *OTHERS], ids=str)
@pytest.mark.parametrize("prefix", [PREFIXES[0], PREFIXES[2]], ids=["0", "5"])
def test_every_parameter_reaches_the_loss_within_two_steps(rel_pos, prefix):
    model = micro(rel_pos, **prefix).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # three scalars for prefix tokens that are not there
    assert without == ([] if prefix else [n for n in without if n.endswith("position.prefix")])


def test_entries_beyond_the_grid_get_no_gradient():
    model = micro({"preset": "bias", "max_distance": 9}, img_size=(16, 32)).train()
    model(torch.randn(2, 3, 16, 32)).sum().backward()
    grad = model.blocks[0].attn.position.bias.table_h.grad[0]
    assert grad.ne(0).tolist() == [6 <= i <= 12 for i in range(19)]


def test_transposing_picture_and_tables_transposes_features():
    model = fill(micro("txl+bias", img_size=(24, 40)))
    turned = micro("txl+bias", img_size=(40, 24))
    state = model.state_dict()
    swapped = {
        k.replace("table_h", "x").replace("table_w", "table_h").replace("x", "table_w"): v for k, v in state.items()
    }
    swapped.update((k, v.flip(0)) for k, v in state.items() if k.endswith("trained"))
    swapped["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].mT
    turned.load_state_dict(swapped)
    x = torch.randn(2, 3, 24, 40)
    torch.testing.assert_close(turned(x.mT), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RESIZE)
@pytest.mark.parametrize("rel_pos", ["txl+bias+value", "beit", "cpb", "rope", "irpe_qkv", "t5"])
@pytest.mark.parametrize("size", [(16, 32), (32, 16), (48, 32), (48, 40)], ids=str)
def test_three_ways_to_another_size_agree(rel_pos, rule, size):
    """At run time, by set_input_size, and by loading into a model built at that size."""
    spec = {**vitrel.RelPos.of(rel_pos).as_dict(), "resize": rule}
    model = fill(micro(spec, dynamic_img_size=True, class_token=True))
    built = micro(spec, img_size=size, class_token=True)
    built.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, *size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        here, there = model(x), built(x)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-5)
    moved = copy.deepcopy(model)
    moved.set_input_size(size)
    torch.testing.assert_close(moved(x), there, rtol=0, atol=1e-5)
    shapes = {k: v.shape for k, v in built.state_dict().items()}
    assert {k: v.shape for k, v in moved.state_dict().items()} == shapes


def test_tables_grow_with_the_grid_and_the_centre_stays():
    model = fill(micro("swin"))
    for size, rows in (((48, 48), (23, 23)), ((32, 48), (15, 23)), ((32, 32), (15, 15))):
        larger = micro({"preset": "swin", "resize": "interpolate"}, img_size=size)
        larger.load_state_dict(model.state_dict())
        table = larger.blocks[3].attn.position.bias.table
        assert table.shape == (4, *rows)
        assert torch.equal(table[:, rows[0] // 2, rows[1] // 2], model.blocks[3].attn.position.bias.table[:, 7, 7])
        if size == (32, 32):
            assert torch.equal(table, model.blocks[3].attn.position.bias.table)


@pytest.mark.parametrize("depth", [1, 2])
def test_loading_another_size_below_wrappers(depth):
    small, large = fill(micro("beit", class_token=True)), micro("beit", class_token=True, img_size=48)
    wrapped = [small, large]
    for _ in range(depth):
        wrapped = [torch.nn.ModuleDict({"model": m}) for m in wrapped]
    wrapped[1].load_state_dict(wrapped[0].state_dict())
    assert torch.equal(large.blocks[0].attn.position.prefix, small.blocks[0].attn.position.prefix)
    assert large.blocks[0].attn.position.bias.table.shape == (4, 23, 23)


def test_a_fixed_size_is_refused_by_both_sizes():
    with pytest.raises(AssertionError, match=r"Input height \(48\) doesn't match model \(32\)"):
        micro("txl")(torch.randn(1, 3, 48, 32))


def test_a_table_of_other_heads_is_refused_by_name_and_shape():
    state = micro("swin").state_dict()
    state["blocks.0.attn.position.bias.table"] = torch.zeros(8, 15, 15)
    with pytest.raises(
        RuntimeError, match=r"blocks.0.attn.position.bias.table: the stored table has shape \(8, 15, 15\)"
    ):
        micro("swin").load_state_dict(state)


def test_a_shared_table_is_held_and_saved_once():
    model = fill(micro({"preset": "txl", "share_layers": True}))
    assert sum(".position." in name for name in model.state_dict()) == 5
    twin = copy.deepcopy(model)
    assert all(b.attn.position_terms is twin.blocks[0].attn.position for b in twin.blocks)
    maps = vitrel.bias_maps(twin)
    assert len(maps) == 6
    assert torch.equal(maps["blocks.0"], maps["blocks.5"])
    twin.set_input_size((48, 32))
    assert twin.blocks[4].attn.position_terms.axes[0].size == 11


def test_reading_beyond_the_trained_grid_is_said_once():
    model = fill(micro({"preset": "bias", "resize": "clamp"}, dynamic_img_size=True))
    assert {c.share for c in vitrel.coverage(model).values()} == {1.0}
    model(torch.randn(1, 3, 24, 32))
    with pytest.warns(UserWarning, match="a grid of 12x8 patches reads relative positions beyond the trained ones"):
        model(torch.randn(1, 3, 48, 32))
    model(torch.randn(1, 3, 48, 32))  # a second warning would be an error here
    assert vitrel.coverage(model)["blocks.0"].grid == (8, 8)  # its own
    cover = vitrel.coverage(model, (12, 8))["blocks.0"]
    assert cover.grid == (12, 8)
    assert cover.inside.tolist() == [[abs(dy) <= 7] * 15 for dy in range(-11, 12)]
    assert cover.share == pytest.approx(sum(12 - abs(d) for d in range(-7, 8)) / 144)


@pytest.mark.parametrize("preset", ["swin", "bias", "txl"])
@pytest.mark.parametrize(("rule", "share"), [("clamp", 0.861), ("interpolate", 1.0)])
def test_coverage_of_a_resized_checkpoint_stays_until_a_training_pass_at_the_new_size(preset, rule, share):
    spec = {"preset": preset, "resize": rule}
    large = micro(spec, img_size=(48, 32), dynamic_img_size=True)
    large.load_state_dict(micro(preset).state_dict())
    again = micro(spec, img_size=(48, 32))
    again.load_state_dict(large.state_dict())
    for model in (large, again, copy.deepcopy(large), large.train()):
        assert vitrel.coverage(model)["blocks.0"].share == pytest.approx(share, abs=1e-3)
    with torch.no_grad():
        large(torch.randn(1, 3, 48, 32))
    large(torch.randn(1, 3, 32, 32))
    large.set_input_size((48, 32))
    assert vitrel.coverage(large)["blocks.0"].share == pytest.approx(share, abs=1e-3)
    large(torch.randn(1, 3, 48, 32))
    assert vitrel.coverage(large)["blocks.0"].share == 1.0
    assert {tuple(v.tolist()) for k, v in large.state_dict().items() if k.endswith("trained")} == {(11, 7)}


def test_a_chosen_max_distance_covers_every_size():
    model = micro({"preset": "bias", "max_distance": 3}, dynamic_img_size=True)
    model(torch.randn(1, 3, 64, 64))
    assert vitrel.coverage(model)["blocks.0"].share == 1.0


def test_state_holds_nothing_derived():
    assert [
        k for k in fill(micro("irpe_qkv+rotary+u")).state_dict() if any(w in k for w in ("index", "coord", "mask"))
    ] == []


def test_copy_and_pickle():
    model, x = fill(micro("txl")), torch.randn(1, 3, 32, 32)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))


def test_mask_and_intermediates_pass_through():
    model, x = fill(micro("txl", class_token=True)), torch.randn(2, 3, 32, 32)
    seen = torch.rand(2, 1, 65, 65) < 0.7
    assert not torch.equal(model(x, attn_mask=seen), model(x))
    final, steps = model.forward_intermediates(x, indices=[0, 5])
    assert [tuple(s.shape) for s in steps] == [(2, 128, 8, 8)] * 2
    torch.testing.assert_close(model.forward_head(final), model(x))


@pytest.mark.parametrize("option", [{"patch_drop_rate": 0.5}])
def test_options_without_a_full_grid_are_refused(option):
    with pytest.raises(ValueError, match=f"^{next(iter(option))}: relative attention needs every patch of the grid"):
        micro(**option)


def test_an_unknown_keyword_is_named():
    with pytest.raises(TypeError, match="'drop_paht_rate'"):
        micro(drop_paht_rate=0.1)


def test_heads_must_divide_the_width():
    with pytest.raises(AssertionError, match="dim should be divisible by num_heads"):
        RelativeVisionTransformer(img_size=32, patch_size=8, embed_dim=10, num_heads=3, depth=1)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rel_pos", ["none", "txl+bias", "rope+bias", "irpe_qkv"])
def test_bfloat16_stays_near_float32(rel_pos, autocast):
    model, x = micro(rel_pos).train(), torch.randn(4, 3, 32, 32)
    if rel_pos != "none":
        fill(model)
    expected = model(x)
    low = copy.deepcopy(model) if autocast else copy.deepcopy(model).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = low(x if autocast else x.bfloat16())
    assert torch.nn.functional.cosine_similarity(got.float().flatten(), expected.flatten(), dim=0) > 0.999
    got.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in low.parameters())


@pytest.mark.parametrize("rel_pos", ["bias", "txl", "irpe_qkv"])
def test_tables_alone_may_be_trained(rel_pos):
    """With everything else frozen the gradient is the same on the fused and the written-out path."""
    grads = []
    for fused in (True, False):
        model = fill(micro(rel_pos)).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in model.position_parameters())
        for attn in model.relative_attentions():
            attn.fused_attn = fused
        torch.manual_seed(1)
        torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == model.position_parameters()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=0, atol=1e-4)
        assert grad.any()


@pytest.mark.parametrize("rel_pos", [*PRESETS, "txl+value", "bias+kernel"])
def test_no_graph_break(rel_pos):
    torch.compiler.reset()
    report = torch._dynamo.explain(micro(rel_pos, class_token=True, depth=1))(torch.randn(2, 3, 32, 32))
    assert report.graph_break_count == 0


@pytest.mark.slow
@pytest.mark.parametrize("rel_pos", ["bias+kernel", "txl+rope"])
def test_compiling_for_many_sizes_stays_bounded(rel_pos):
    torch.compiler.reset()
    counter = CompileCounter()
    # without dynamic_img_pad timm's patch embedding asserts on each size and so compiles anew for each
    model = fill(micro(rel_pos, dynamic_img_size=True, dynamic_img_pad=True, depth=1))
    compiled = torch.compile(model, backend=counter)
    for size in ((32, 32), (40, 32), (32, 48), (48, 48), (56, 40), (64, 64)):
        x = torch.randn(2, 3, *size)
        got = compiled(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torch.testing.assert_close(got, model(x), rtol=0, atol=1e-5)
    for batch in (1, 3, 5):
        compiled(torch.randn(batch, 3, 64, 64))
    assert counter.frame_count <= 5


def test_the_same_size_keeps_the_parameters_that_an_optimizer_holds():
    for rel_pos, size in ((p, s) for p in ("txl+bias", "swin", "t5", {"preset": "bias", "max_distance": 3})
                          for s in ((32, 32), (48, 32))):  # fmt: skip
        model = micro(rel_pos)
        before = dict(model.named_parameters())
        model.set_input_size(size)
        shapes = {n: p.shape for n, p in before.items()}
        for name, parameter in model.named_parameters():
            assert (parameter is before[name]) == (parameter.shape == shapes[name]), name


@pytest.mark.parametrize("rel_pos", ["bias", "t5", "irpe_qk", "levit"])
def test_averages_and_distributed_checkpoints_of_an_enlarged_model(rel_pos):
    model = micro(rel_pos)
    model.set_input_size((48, 32))
    averages = [ModelEmaV3(model, decay=0.5), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))]
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.train()(torch.randn(2, 3, 48, 32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    averages[0].update(model, step=10)
    averages[1].update_parameters(model)  # the first one copies
    averages[1].update_parameters(model)
    assert vitrel.coverage(model)["blocks.0"].share == 1.0
    assert [vitrel.coverage(average.module)["blocks.0"].share for average in averages] == [1.0, 1.0]
    for name, parameter in averages[0].module.named_parameters():
        torch.testing.assert_close(parameter, expected[name] + 0.5)
    state = get_model_state_dict(model)
    assert list(state) == list(model.state_dict())
    twin = micro(rel_pos)
    twin.set_input_size((48, 32))
    set_model_state_dict(twin, state)
    assert all(torch.equal(v, twin.state_dict()[k]) for k, v in state.items())


def test_replicas_of_data_parallel_compute_the_same():
    model = fill(micro({"terms": ["query", "key", "value", "u", "v", "bias"], "prefix": "learned"}, class_token=True))
    x = torch.randn(2, 3, 32, 32)
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():  # as torch.nn.parallel.replicate does
        replica._modules = {name: replicas.get(child) for name, child in module._modules.items()}
        replica._parameters = {}
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter * 1)
    assert torch.equal(replicas[model](x), model(x))
    with torch.no_grad():
        assert torch.equal(replicas[model](x), model(x))


@pytest.mark.parametrize("second", [(16, 32), (32, 32)], ids=str)
def test_checkpointing_refuses_grids_that_change_before_the_backward_pass(second):
    model = fill(micro("swin", dynamic_img_size=True, img_size=(32, 16))).train()
    first, second = torch.randn(2, 3, 32, 16), torch.randn(2, 3, *second)
    losses = [model(first).sum() + model(first.flip(0)).sum(), model(second).sum()]
    expected = torch.autograd.grad(sum(losses), list(model.parameters()))
    model.set_grad_checkpointing()
    for images in ([first, first.flip(0)], [second]):  # a backward pass for each grid
        sum(model(image).sum() for image in images).backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-4)
    loss = model(first).sum() + model(second).sum()
    with pytest.raises(ValueError, match=r"dynamic_img_size: batches of .* patches came before one backward pass"):
        loss.backward()
    model(first).sum().backward()


def test_maps_of_pictures_of_another_grid_are_of_one_grid():
    spec = {**vitrel.RelPos.of("txl+bias").as_dict(), "resize": "clamp"}
    model = fill(micro(spec, dynamic_img_size=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        maps = vitrel.term_maps(model, torch.randn(2, 3, 16, 48))["blocks.0"]
    assert {tuple(one.values.shape[1:]) for one in maps.values()} == {(7, 23)}
    own = vitrel.bias_maps(model)["blocks.0"]
    assert own.shape[1:] == (15, 15)
    assert torch.equal(own[:, 4:11, 7], maps["free"].values[:, :, 11])
    assert vitrel.explain(model)[0].grid == "8x8"


def test_a_size_that_is_padded_to_whole_patches():
    model = fill(micro("txl", img_size=(18, 30), dynamic_img_pad=True))
    assert model(torch.randn(1, 3, 18, 30)).shape == (1, 10)
    model.set_input_size((10, 22))
    assert model(torch.randn(1, 3, 10, 22)).shape == (1, 10)
    assert model.blocks[0].attn.grid_size == (3, 6)


def test_explain_says_that_a_call_would_raise():
    model = micro("bias", backend="blocked", attn_drop_rate=0.1).train()
    assert vitrel.explain(model)[0].why == (
        "asked for, but has no attention dropout; set attn_drop to 0: a call raises"
    )
