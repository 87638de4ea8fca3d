"""The models: zero tables change nothing, parameters are named, wrong arguments are refused by name."""

import copy
import pickle

import pytest
import timm
import torch

import vitrel
from vitrel.vit import RelativeVisionTransformer

SCHEMES = ["bias", "txl", "txl_learned", "txl+bias", {"preset": "bias", "table": "joint"}]
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
@pytest.mark.parametrize("rel_pos", SCHEMES, ids=str)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_zero_tables_leave_the_logits_of_none(rel_pos, prefix, dtype, atol):
    plain = micro("none", img_size=(24, 40), **prefix).to(dtype)
    spec = {**vitrel.RelPos.of(rel_pos).as_dict(), "init": "zeros"}
    relative = micro(spec, img_size=(24, 40), **prefix).to(dtype)
    loaded = relative.load_state_dict(plain.state_dict(), strict=False)
    assert set(loaded.missing_keys) == relative.position_parameters()
    assert not loaded.unexpected_keys
    x = torch.randn(2, 3, 24, 40, dtype=dtype)
    torch.testing.assert_close(relative(x), plain(x), rtol=0, atol=atol)
    assert (fill(relative)(x) - plain(x)).abs().max() > 1e-3


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


@pytest.mark.parametrize("rel_pos", ["none", *SCHEMES], ids=str)
def test_position_parameters_are_named_and_do_not_decay(rel_pos):
    model = micro(rel_pos)
    names = {name for name, _ in model.named_parameters()}
    assert model.position_parameters() == {name for name in names if ".position." in name}
    assert model.position_parameters() <= model.no_weight_decay()
    assert bool(model.position_parameters()) == (rel_pos != "none")


@pytest.mark.parametrize("rel_pos", SCHEMES, ids=str)
@pytest.mark.parametrize("prefix", PREFIXES, ids=["0", "1", "5"])
def test_every_parameter_reaches_the_loss_within_two_steps(rel_pos, prefix):
    model = micro(rel_pos, **prefix).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


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
    swapped["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].mT
    turned.load_state_dict(swapped)
    x = torch.randn(2, 3, 24, 40)
    torch.testing.assert_close(turned(x.mT), model(x), rtol=1e-4, atol=1e-5)


def test_set_input_size_clamps_offsets_beyond_the_tables():
    model = fill(micro("txl+bias"))
    small = model(torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    model.set_input_size((48, 40))
    assert model(torch.randn(1, 3, 48, 40)).shape == (1, 10)
    assert model.blocks[0].attn.position.bias.table_h.shape == (4, 15)
    model.set_input_size((32, 32))
    again = model(torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(small, again)


def test_state_holds_nothing_derived():
    assert [k for k in micro("txl+bias").state_dict() if any(w in k for w in ("index", "coord", "mask"))] == []


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


@pytest.mark.parametrize("option", [{"patch_drop_rate": 0.5}, {"dynamic_img_size": True}])
def test_options_without_a_full_grid_are_refused(option):
    with pytest.raises(ValueError, match=f"^{next(iter(option))}: relative attention needs the full patch grid"):
        micro(**option)


def test_an_unknown_keyword_is_named():
    with pytest.raises(TypeError, match="'drop_paht_rate'"):
        micro(drop_paht_rate=0.1)


def test_heads_must_divide_the_width():
    with pytest.raises(AssertionError, match="dim should be divisible by num_heads"):
        RelativeVisionTransformer(img_size=32, patch_size=8, embed_dim=10, num_heads=3, depth=1)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rel_pos", ["none", *SCHEMES], ids=str)
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
