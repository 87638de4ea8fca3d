"""Memory across strips: the same as one masked pass where it can be, else as a literal loop."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2

import vitrel
from vitrel.attend import reference
from vitrel.grid import Grid
from vitrel.relpos import PRESETS
from vitrel.strips import StripReader

PATCH, COLS = 2, 3
RELATIVE = [*(name for name in PRESETS if name != "none"), "bias+kernel"]


def model(rows=7, depth=1, prefix=0, rel_pos="txl", **kwargs):
    """A small float64 model for a grid of rows x 3 patches, every position parameter random."""
    torch.manual_seed(0)
    net = timm.create_model(
        "vitrel_micro_patch4_32",
        img_size=(rows * PATCH, COLS * PATCH),
        patch_size=PATCH,
        embed_dim=16,
        depth=depth,
        num_heads=2,
        num_classes=5,
        rel_pos=rel_pos,
        class_token=prefix > 0,
        reg_tokens=max(prefix - 1, 0),
        **kwargs,
    ).double()
    names = vitrel.position_parameters(net)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name in names or name.endswith(("cls_token", "reg_token")):
                parameter.normal_()
    return net.eval()


def image(rows=7, batch=2, seed=1):
    return torch.randn(
        batch, 3, rows * PATCH, COLS * PATCH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def sees_above(rows, strip, prefix):
    """The mask "own strip and all above" over (prefix | patches); prefix tokens see everything and are seen by all."""
    end = (torch.arange(rows) // strip + 1) * strip
    patches = torch.arange(rows)[None] < end[:, None]
    patches = patches.repeat_interleave(COLS, 0).repeat_interleave(COLS, 1)
    return F.pad(patches, (prefix, 0, prefix, 0), value=True)


def gradients(net, out):
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad((out * weights).sum(), list(net.parameters()), allow_unused=True)
    return {name: g for (name, _), g in zip(net.named_parameters(), found, strict=True) if g is not None}


def same_gradients(new, expected):
    assert new.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(new[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("rel_pos", RELATIVE)
def test_one_layer_is_full_attention_to_the_own_strip_and_all_above(rel_pos, prefix):
    net, x = model(rel_pos=rel_pos, prefix=prefix), image()
    full = net.forward_features(x, attn_mask=sees_above(7, 2, prefix))
    reader = StripReader(net, 2, detach=False, pool="avg")
    tokens = reader.forward_features(x)
    torch.testing.assert_close(tokens, full[:, prefix:], rtol=0, atol=1e-12)
    torch.testing.assert_close(reader(x), net.forward_head(full), rtol=0, atol=1e-12)
    same_gradients(gradients(net, tokens), gradients(net, full[:, prefix:]))


@pytest.mark.parametrize("backend", ["reference", "dense", "written", "folded", "blocked"])
@pytest.mark.parametrize("rel_pos", ["bias", "txl", "shaw", "deberta", "rope+bias+value"])
def test_every_backend_sees_the_rows_above(rel_pos, backend):
    spec = vitrel.RelPos.preset(rel_pos, prefix="learned")
    net, x = model(rel_pos=spec, prefix=2, backend=backend), image()
    full = net.forward_features(x, attn_mask=sees_above(7, 3, 2))
    tokens = StripReader(net, 3, detach=False).forward_features(x)
    torch.testing.assert_close(tokens, full[:, 2:], rtol=0, atol=1e-12)
    same_gradients(gradients(net, tokens), gradients(net, full[:, 2:]))


COMPUTED = [
    {"preset": "txl", "source": "sinusoid"},
    {"preset": "cpb"},
    {"preset": "cpb", "mlp_coords": "cr"},
]


@pytest.mark.parametrize("rule", ["interpolate", "geometric", "clamp", "crop"])
@pytest.mark.parametrize("rel_pos", COMPUTED, ids=str)
def test_computed_tables_have_the_offsets_of_rows_above_and_are_not_stretched_to_them(rel_pos, rule):
    """As full attention to the own strip and all above on the large grid, whose entries are those of the offsets."""
    net, large = model(3, 1, 1, {**rel_pos, "resize": rule}), model(3, 1, 1, {**rel_pos, "resize": "clamp"})
    x = image()
    assert not large.load_state_dict(net.state_dict()).missing_keys
    large.set_input_size((7 * PATCH, COLS * PATCH))
    full = large.forward_features(x, attn_mask=sees_above(7, 2, 1))
    reader = StripReader(net, 2, detach=False)
    torch.testing.assert_close(reader.forward_features(x), full[:, 1:], rtol=0, atol=1e-12)
    with torch.inference_mode():  # tables are kept between calls
        for _ in range(2):
            torch.testing.assert_close(reader.forward_features(x), full[:, 1:], rtol=0, atol=1e-12)


def literal(net, x, strip_rows, memory_rows, carry=False):
    """Patches of all strips after the last norm, layer by layer: keys are memory and strip, memory has no gradient."""
    prefix = net.num_prefix_tokens
    memory = [x.new_empty(len(x), 0, net.embed_dim) for _ in net.blocks]
    out, before = [], None
    for strip in x.split(strip_rows * PATCH, -2):
        patches = net.patch_embed.proj(strip).flatten(2).mT
        tokens = [t.expand(len(x), -1, -1) for t in (net.cls_token, net.reg_token) if t is not None]
        if carry and before is not None:
            tokens = [before]
        h = torch.cat([*tokens, patches], 1)
        for n, block in enumerate(net.blocks):
            attn, given = block.attn, block.norm1(h)
            keys = torch.cat([given[:, :prefix], memory[n], given[:, prefix:]], 1)
            heads = lambda t, part, attn=attn: (  # noqa: E731
                F.linear(t, attn.qkv.weight.chunk(3)[part], attn.qkv.bias.chunk(3)[part])
                .unflatten(-1, (attn.num_heads, -1))
                .transpose(1, 2)
            )
            above, rows = memory[n].shape[1] // COLS, patches.shape[1] // COLS
            mixed = reference(
                heads(given, 0), heads(keys, 1), heads(keys, 2), attn.position(),
                Grid(rows, COLS, top=above), Grid(above + rows, COLS),
            )  # fmt: skip
            h = h + attn.proj(mixed.transpose(1, 2).flatten(2))
            h = h + block.mlp(block.norm2(h))
            kept = torch.cat([memory[n], given[:, prefix:]], 1).detach()
            memory[n] = kept[:, max(0, kept.shape[1] - memory_rows * COLS) :]
        before = h[:, :prefix].detach()
        out.append(net.norm(h)[:, prefix:])
    return torch.cat(out, 1)


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("memory_rows", [1, 3, 9])
@pytest.mark.parametrize("rel_pos", ["txl", "deberta", "shaw", "rope"])
def test_several_layers_are_a_literal_loop(rel_pos, memory_rows, carry):
    net, x = model(depth=3, prefix=2, rel_pos=rel_pos), image()
    expected = literal(net, x, 2, memory_rows, carry)
    reader = StripReader(net, 2, memory_rows, prefix="carry" if carry else "renew")
    tokens = reader.forward_features(x)
    torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-12)
    same_gradients(gradients(net, tokens), gradients(net, expected))


def test_no_memory_is_bit_identical_to_strips_on_their_own():
    net, x = model(rows=2, depth=3, prefix=1), image(rows=8)
    tokens = StripReader(net, 2, 0).forward_features(x)
    alone = torch.cat([net.forward_features(strip)[:, 1:] for strip in x.split(2 * PATCH, -2)], 1)
    assert torch.equal(tokens, alone)


def test_what_lies_below_changes_nothing():
    net, x = model(depth=3, prefix=1), image()
    reader = StripReader(net, 2)
    tokens = reader.forward_features(x)
    x[:, :, 4 * PATCH] += 1  # the first row of the third strip
    changed = reader.forward_features(x)
    assert torch.equal(changed[:, : 4 * COLS], tokens[:, : 4 * COLS])
    assert not torch.allclose(changed[:, 4 * COLS :], tokens[:, 4 * COLS :])


def test_memory_reaches_the_strip_from_its_true_offset():
    """A table that holds one large value at "key three rows above" makes a patch copy what lies there."""
    net = model(rows=6, rel_pos="bias")
    attn = net.blocks[0].attn
    with torch.no_grad():
        attn.qkv.weight[: 2 * 16].zero_()
        attn.position.bias.table_h.zero_()[:, attn.position.axes[0].index(torch.tensor(3))] = 60
        attn.position.bias.table_w.zero_()[:, attn.position.axes[1].index(torch.tensor(0))] = 60
    seen = []
    attn.norm.register_forward_hook(lambda _, args, out: seen.append(out))
    given = []
    attn.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    StripReader(net, 2, 4).forward_features(image(rows=6))
    value = lambda x: F.linear(x, attn.qkv.weight[32:], attn.qkv.bias[32:])  # noqa: E731
    rows = value(torch.cat(given, 1)).unflatten(1, (6, COLS))
    copied = torch.cat(seen, 1).unflatten(1, (6, COLS))
    torch.testing.assert_close(copied[:, 3:], rows[:, :3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", ["avg", "last", "token"])
@pytest.mark.parametrize("prefix", ["renew", "carry"])
@pytest.mark.parametrize("as_list", [True, False])
def test_images_of_different_heights_are_read_as_each_alone(pool, prefix, as_list):
    net = model(depth=2, prefix=1)
    reader = StripReader(net, 2, 3, pool=pool, prefix=prefix)
    images = [image(rows, batch=1, seed=rows)[0] for rows in (3, 7, 1, 4)]
    alone = torch.cat([reader(one[None]) for one in images])
    padded = torch.stack([F.pad(one, (0, 0, 0, 7 * PATCH - one.shape[1]), value=9.0) for one in images])
    together = reader(images) if as_list else reader(padded, heights=[one.shape[1] for one in images])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", ["avg", "last", "token"])
def test_a_stream_gives_what_the_whole_image_gives_and_goes_on_from_a_saved_state(pool, tmp_path):
    net, x = model(depth=2, prefix=1), image()
    reader = StripReader(net, 2, 3, pool=pool, prefix="carry")
    strips = x.split(2 * PATCH, -2)
    for strip in strips[:2]:
        reader.step(strip)
    torch.save(reader.state(), tmp_path / "state.pt")
    assert reader.state()["rows"] == 3
    assert reader.state()["hidden"][0].shape == (2, 3 * COLS, 16)
    other = StripReader(copy.deepcopy(net), 2, 3, pool=pool, prefix="carry")
    other.restore(torch.load(tmp_path / "state.pt"))
    for strip in strips[2:]:
        last = other.step(strip)
    assert torch.equal(last, reader(x))
    reader.reset()
    assert reader.state() == {}
    first = reader.step(strips[0])
    assert torch.equal(first, reader(strips[0]))


def test_a_relativized_timm_model_reads_strips_and_stays_as_it_was():
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=2, num_classes=5, reg_tokens=2).eval()
    vitrel.relativize(net, "txl", keep_absolute=False)
    x = torch.randn(1, 3, 160, 48)
    before = net(x[:, :, :48])
    reader = StripReader(net, 2, 1)
    assert reader(x).shape == (1, 5)
    assert torch.equal(net(x[:, :, :48]), before)
    torch.testing.assert_close(StripReader(net, 3)(x[:, :, :48]), before, rtol=0, atol=1e-5)
    assert all(block.attn.memory is None for block in net.blocks)


def test_a_table_for_another_grid_is_read_as_it_is():
    """Strips are no other resolution: a rule that stretches tables to a larger grid is for images, not for strips."""
    stretched = model(rel_pos=vitrel.RelPos.preset("bias", resize="interpolate"), rows=2)
    kept = model(rel_pos="bias", rows=2)
    kept.load_state_dict(stretched.state_dict())
    x = image(rows=8)
    with pytest.warns(UserWarning, match="last entry is repeated"):
        assert torch.equal(StripReader(stretched, 2)(x), StripReader(kept, 2)(x))


def test_training_notes_the_offsets_that_strips_reach():
    net = model(rows=7, rel_pos="bias")
    table = net.blocks[0].attn.position.bias
    table._set_trained((0, 0))
    StripReader(net.train(), 2, 1)(image())
    assert table.trained_reach() == [2, 2]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: StripReader(timm.create_model("vit_tiny_patch16_224"), 2), TypeError, "no relative position"),
        (lambda: StripReader(torch.nn.Linear(1, 1), 2), TypeError, "cannot read strips with Linear"),
        (
            lambda: StripReader(vitrel.relativize(timm.create_model("vit_tiny_patch16_224"), "txl"), 2),
            ValueError,
            "absolute position embedding",
        ),
        (
            lambda: StripReader(vitrel.relativize(timm.create_model("eva02_tiny_patch14_224"), "bias"), 2),
            TypeError,
            "cannot read strips with RelativizedEva",
        ),
        (
            lambda: StripReader(
                vitrel.relativize(timm.create_model("vit_tiny_patch16_224"), "bias", blocks=[0], keep_absolute=False),
                2,
            ),
            ValueError,
            r"blocks\.1: Attention cannot see",
        ),
        (lambda: StripReader(model(), 0), ValueError, "strip_rows: expected"),
        (lambda: StripReader(model(), 2, -1), ValueError, "memory_rows: expected"),
        (lambda: StripReader(model(), 2, pool="max"), ValueError, "pool: 'max' cannot go on"),
        (lambda: StripReader(model(), 2, pool="token"), ValueError, "needs a class token"),
        (lambda: StripReader(model(), 2, prefix="keep"), ValueError, "prefix: expected one of"),
        (lambda: StripReader(StripReader(model(), 2), 2), TypeError, "a StripReader already"),
        (lambda: StripReader(model(), 2).step(image(rows=3)), ValueError, "expected at most strip_rows=2"),
        (lambda: StripReader(model(), 2)(image()[:, :, :5]), ValueError, "no multiple of the patch"),
        (lambda: StripReader(model(), 2)(image()[0]), ValueError, r"of shape \(B, C, h, w\), got \(3, 14, 6\)"),
        (lambda: StripReader(model(), 2)(image(), heights=[3]), ValueError, "heights: expected 2 numbers"),
        (lambda: StripReader(model(), 2)(image(), heights=[4, 99]), ValueError, "from 1 to 14 that are multiples of 2"),
        (lambda: StripReader(model(), 2)(image(), heights=[4, 3]), ValueError, r"got \[4, 3\]"),
        (lambda: StripReader(model(), 2)(image(), heights=4), ValueError, "heights: expected 2 numbers"),
        (lambda: StripReader(model(), 2)([]), ValueError, "a sequence of"),
        (lambda: StripReader(model(), 2)([image()[0], image()[0, ..., :2]]), ValueError, "of one width"),
        (lambda: StripReader(model(), 2).step([image()[0]]), ValueError, "expected a tensor of shape .* got list"),
        (lambda: StripReader(model(), True), ValueError, "strip_rows: expected"),
        (lambda: StripReader(torch.compile(model()), 2), TypeError, "compiled by torch.compile"),
        (
            lambda: StripReader(model(prefix=2, pool_include_prefix=True), 2),
            ValueError,
            "pool_include_prefix",
        ),
        (
            lambda: StripReader(
                vitrel.relativize(
                    timm.create_model(
                        "vit_small_r26_s32_224", img_size=64, depth=1, embed_dim=32, num_heads=2, pos_embed="none"
                    ),
                    "txl",
                ),
                2,
            ),
            TypeError,
            "HybridEmbed looks beyond a patch",
        ),
        (lambda: StripReader(model(), 2).restore({"rows": 1}), ValueError, "state: expected the entries"),
    ],
)
def test_refusals_name_what_and_how_to_mend(make, error, match):
    with pytest.raises(error, match=match) as raised:
        make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("pool", ["avg", "last", "token"])
def test_each_step_of_a_stream_may_have_a_backward_pass(pool):
    net = model(depth=2, prefix=1).train()
    reader = StripReader(net, 2, 2, pool=pool, prefix="carry")
    for strip in image().split(2 * PATCH, -2):
        reader.step(strip).sum().backward()
    assert not any(t.requires_grad for t in [*reader.state()["hidden"], *list(reader.state().values())[3:6]])
    copy.deepcopy(reader)


def test_the_first_step_of_a_stream_has_the_gradients_of_its_strip():
    net = model(depth=2).train()
    strip = image(rows=2)
    stepped = gradients(net, StripReader(net, 2).step(strip))
    same_gradients(stepped, gradients(net, StripReader(net, 2)(strip)))


def test_padding_may_hold_anything():
    net, x = model(depth=2, prefix=1), image(rows=6)
    reader = StripReader(net, 2, 3)
    expected = reader(x, heights=[4 * PATCH, 6 * PATCH])
    x[0, :, 4 * PATCH :] = float("nan")
    assert torch.equal(reader(x, heights=[4 * PATCH, 6 * PATCH]), expected)


def test_the_average_is_summed_in_float32():
    net = model(rel_pos="bias").half()
    x = image(rows=250, batch=1).half()
    reader = StripReader(net, 1, 0)
    with torch.no_grad():
        patches = reader.forward_features(x)
        expected = net.head(net.fc_norm(patches.float().mean(1).half()))
        torch.testing.assert_close(reader(x), expected, rtol=0, atol=0)
    assert reader(x).dtype == torch.float16


def test_what_is_kept_is_no_more_than_the_memory():
    reader = StripReader(model(depth=2), 3, 1)
    reader(image())
    reader.step(image(rows=3))
    for hidden in reader.state()["hidden"]:
        assert hidden.untyped_storage().nbytes() == hidden.nbytes == 2 * COLS * 16 * 8


@pytest.mark.filterwarnings("ignore:a strip sees:UserWarning")
def test_a_long_stream_keeps_no_tables_of_its_past(monkeypatch):
    monkeypatch.setattr("vitrel.position.KEPT_BYTES", 20_000)
    net = model(rel_pos="swin")
    reader = StripReader(net, 1)
    with torch.no_grad():
        for _ in range(60):
            reader.step(image(rows=1, batch=1))
        kept = net.blocks[0].attn.position._kept[2].kept
        biases = [t for t in kept.values() if isinstance(t, torch.Tensor)]
    assert 0 < sum(t.nbytes for t in biases) <= 20_000


def test_a_stream_goes_on_after_a_change_of_type():
    reader = StripReader(model(depth=2, prefix=1), 2, 2, prefix="carry")
    strips = image().split(2 * PATCH, -2)
    reader.step(strips[0])
    reader.float()
    later = reader.step(strips[1].float())
    torch.testing.assert_close(later.double(), StripReader(model(depth=2, prefix=1), 2, 2, prefix="carry")(
        image()[:, :, : 4 * PATCH]), rtol=0, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize(
    ("made", "match"),
    [
        ({"memory_rows": 1}, "2 rows kept, expected at most memory_rows=1"),
        ({"pool": "last"}, "pooling 'avg', expected 'last'"),
        ({"of": {"prefix": 3}}, "1 prefix tokens, expected 3"),
        ({"of": {"depth": 3}}, "memory of 2 layers, expected 3"),
    ],
    ids=str,
)
def test_the_state_of_another_reader_is_refused(made, match):
    made = dict(made)
    first = StripReader(model(depth=2, prefix=1), 2, 2, pool="avg")
    first.step(image(rows=2))
    net = model(**{"depth": 2, "prefix": 1, **made.pop("of", {})})
    with pytest.raises(ValueError, match=match):
        StripReader(net, 2, **{"memory_rows": 2, "pool": "avg", **made}).restore(first.state())


def test_an_image_that_has_ended_does_not_begin_again():
    reader = StripReader(model(), 2)
    with pytest.raises(ValueError, match="from 1 to 4"):
        reader.step(image(rows=2), heights=[0, 4])
    reader.step(image(rows=2), heights=[2, 4])
    for heights in ([4, 4], None):
        with pytest.raises(ValueError, match="image 0 had ended"):
            reader.step(image(rows=2), heights=heights)
    reader.step(image(rows=2), heights=[0, 4])


def test_a_part_in_evaluation_stays_so():
    net = model(depth=2).train()
    net.blocks[0].eval()
    reader = StripReader(net, 2)
    assert reader.training
    assert not net.blocks[0].training


def test_a_stream_refuses_another_batch_and_width():
    reader = StripReader(model(), 2)
    reader.step(image(rows=2))
    with pytest.raises(ValueError, match="a batch of 3, expected 2"):
        reader.step(image(rows=2, batch=3))
    with pytest.raises(ValueError, match="another width"):
        reader.step(image(rows=2)[..., : 2 * PATCH])


def test_checkpointing_is_refused_in_training_alone():
    net = model()
    net.set_grad_checkpointing()
    StripReader(net, 2)(image())
    with pytest.raises(ValueError, match="grad_checkpointing"):
        StripReader(net.train(), 2)(image())


def test_names_without_decay_are_those_of_the_model_inside():
    reader = StripReader(model(prefix=2), 2)
    names = {name for name, _ in reader.named_parameters()}
    timm_names = {"model.pos_embed", "model.dist_token"}
    assert vitrel.position_parameters(reader) < reader.no_weight_decay() <= names | timm_names


def test_a_learning_rate_that_decays_with_depth_is_that_of_the_model_inside():
    net = model(rel_pos="txl", depth=3)
    own = create_optimizer_v2(net, "adamw", lr=1.0, layer_decay=0.5)
    read = create_optimizer_v2(StripReader(net, 2), "adamw", lr=1.0, layer_decay=0.5)

    def scales(optimizer):
        return {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}

    assert scales(read) == scales(own)
    assert len(set(scales(own).values())) > 3
