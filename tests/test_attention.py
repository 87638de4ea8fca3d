"""RelativeAttention2d against a double loop over tokens, and its backends against each other."""

import math

import pytest
import timm.layers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Attention

from vitrel import RelativeAttention2d, explain
from vitrel.attend import reference
from vitrel.backends import BACKENDS, Case, unsuited
from vitrel.grid import Grid, Points
from vitrel.relpos import PRESETS, RelPos

dense = BACKENDS["dense"]
DIM, HEADS = 16, 2
GRIDS = [(3, 5), (5, 3), (1, 7)]
ALL_TERMS = "bias+query+key+u+v+value+kernel"
SCHEMES = {
    "none": "none",
    "bias": "bias",
    "txl": "txl",
    "all": ALL_TERMS,
    "all, prefix scalars": {"preset": ALL_TERMS, "prefix": "learned"},
    "rope_mixed+txl": "rope_mixed+txl",
    "rope+u": "rope+u",
    "sam, one table for all heads": {"preset": "sam", "share_heads": True},
    "deberta, logarithmic": {"preset": "deberta", "distance": "deberta_log", "buckets": 2, "max_distance": 4},
    "kernel": "kernel",
    "levit": {"preset": "bias", "directed": False},
    "scale of the write-up": {"preset": "txl", "scale": "seed"},
}


def as_mapping(spec):
    return {"preset": spec} if isinstance(spec, str) else spec


def can(backend, spec):
    return backend == "unfused" or unsuited(backend, Case(RelPos.of(spec), tokens=1)) is None


def make(grid_size, rel_pos, prefix=0, **kwargs):
    torch.manual_seed(0)
    attn = RelativeAttention2d(
        DIM, HEADS, grid_size=grid_size, rel_pos=rel_pos, num_prefix_tokens=prefix, qkv_bias=True, **kwargs
    ).double()
    for parameter in attn.position_terms.parameters():  # asymmetric, and large enough to matter
        torch.nn.init.normal_(parameter)
    return attn


def tokens(grid_size, prefix=0, batch=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        batch, prefix + grid_size[0] * grid_size[1], DIM, dtype=torch.float64, generator=generator, requires_grad=True
    )


def entry(tables, head, dh, dw):
    """One look-up, written out for clamped distances."""
    if len(tables) == 1:
        kh, kw = tables[0].shape[1] // 2, tables[0].shape[2] // 2
        return tables[0][head, min(max(dh, -kh), kh) + kh, min(max(dw, -kw), kw) + kw]
    kh, kw = tables[0].shape[1] // 2, tables[1].shape[1] // 2
    return tables[0][head, min(max(dh, -kh), kh) + kh] + tables[1][head, min(max(dw, -kw), kw) + kw]


def kernel_entry(table, head, dh, dw):
    """One weight of a kernel: joint whatever the other tables are, and 0 beyond."""
    kh, kw = table.shape[1] // 2, table.shape[2] // 2
    return table[head, dh + kh, dw + kw] if abs(dh) <= kh and abs(dw) <= kw else 0


def turned(x, frequencies, head, y, x_coord):
    """Feature pairs (2m, 2m+1) as complex numbers, turned by the angle of (y, x)."""
    angle = y * frequencies[0][head] + x_coord * frequencies[1][head]
    return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)) * torch.exp(1j * angle.double())).flatten()


@torch.no_grad()
def loop(attn, x):
    """Scores and heads' outputs by the formulas of the terms; position from ``divmod(t, columns)``."""
    batch, length, _ = x.shape
    d = DIM // HEADS
    qkv = (x @ attn.qkv.weight.T + attn.qkv.bias).reshape(batch, length, 3, HEADS, d)
    position, prefix, cols = attn.position_terms(), attn.num_prefix_tokens, attn.grid_size[1]
    on, s = attn.rel_pos.terms, 1 / math.sqrt(d)
    looked_up = [t for t in ("bias", "query", "key", "value") if t in on]
    scores = torch.zeros(batch, HEADS, length, length, dtype=x.dtype)
    out = torch.zeros(batch, HEADS, length, d, dtype=x.dtype)
    for b in range(batch):
        for head in range(HEADS):
            for i in range(length):
                values = []
                direct = torch.zeros(d, dtype=x.dtype)
                for j in range(length):
                    q, k, value = qkv[b, i, 0, head], qkv[b, j, 1, head], qkv[b, j, 2, head]
                    score = s * position.vectors["u"][head] @ k if "u" in on else 0
                    if i >= prefix and j >= prefix:
                        (yi, xi), (yj, xj) = divmod(i - prefix, cols), divmod(j - prefix, cols)
                        read = {t: entry(position.tables[t], head, yi - yj, xi - xj) for t in looked_up}
                        score += read.get("bias", 0)
                        score += s * (q @ read["query"]) if "query" in on else 0
                        score += s * (position.vectors["v"][head] @ read["query"]) if "v" in on else 0
                        score += s * (k @ read["key"]) if "key" in on else 0
                        if "kernel" in on:
                            direct += s * kernel_entry(position.tables["kernel"][0], head, yi - yj, xi - xj) * value
                        value = value + read.get("value", 0)
                    elif position.prefix is not None:
                        score += position.prefix[head, 2 if i < prefix and j < prefix else 0 if i < prefix else 1]
                    if position.frequencies is not None:
                        q = q if i < prefix else turned(q, position.frequencies, head, *divmod(i - prefix, cols))
                        k = k if j < prefix else turned(k, position.frequencies, head, *divmod(j - prefix, cols))
                    scores[b, head, i, j] = s * q @ k + score
                    values.append(value)
                out[b, head, i] = scores[b, head, i].softmax(-1) @ torch.stack(values) + direct
    return scores, out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("max_distance", [None, 2, (0, 1)], ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
@pytest.mark.parametrize("table", ["separable", "joint"])
@pytest.mark.parametrize("preset", ["bias", "txl", ALL_TERMS, "rope_mixed+txl", "rope+bias"])
def test_scores_and_output_equal_the_double_loop(preset, table, grid_size, prefix, max_distance):
    scalars = "learned" if prefix == 5 else "none"
    spec = {"preset": preset, "table": table, "max_distance": max_distance, "prefix": scalars}
    attn = make(grid_size, spec, prefix, backend="reference")
    attn.proj = torch.nn.Identity()
    x = tokens(grid_size, prefix, batch=1)
    scores, out = loop(attn, x)
    torch.testing.assert_close(attn.scores(x), scores, rtol=0, atol=1e-12)
    torch.testing.assert_close(attn(x), out, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", [None, "boolean", "additive", "padding", "causal"])
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
@pytest.mark.parametrize("table", ["separable", "joint"])
@pytest.mark.parametrize("rel_pos", SCHEMES)
def test_every_backend_equals_the_reference_in_output_and_gradients(rel_pos, table, grid_size, prefix, mask):
    x = tokens(grid_size, prefix)
    length = x.shape[1]
    generator = torch.Generator().manual_seed(2)
    masks = {
        "boolean": torch.rand(2, HEADS, length, length, generator=generator) < 0.6,
        "additive": torch.randn(1, 1, length, length, generator=generator, dtype=torch.float64),
        "padding": torch.arange(length)[None, None, None] < torch.tensor([length, length - 2])[:, None, None, None],
    }
    arguments = {"is_causal": True} if mask == "causal" else {"attn_mask": masks.get(mask)}
    results = {}
    for backend in [*BACKENDS, "unfused"]:
        spec = {"max_distance": 3, **as_mapping(SCHEMES[rel_pos]), "table": table}
        if not can(backend, spec):
            continue
        attn = make(grid_size, spec, prefix)
        if backend == "unfused":
            attn.fused_attn = False
        else:
            attn.backend = backend
        out = attn(x, **arguments)
        leaves = [x, *attn.parameters()]
        grads = torch.autograd.grad((out * torch.arange(out.numel()).reshape(out.shape).cos()).sum(), leaves)
        results[backend] = [out, *grads]
    for backend, result in results.items():
        for got, expected in zip(result, results["reference"], strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-11, msg=lambda m, b=backend: f"{b}: {m}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rel_pos", ["none", "rope", "bias+kernel", "shaw"])
def test_a_mask_of_keys_alone_may_have_one_dimension(rel_pos, backend):
    attn, x = make((3, 5), rel_pos, 1), tokens((3, 5), 1)
    if not can(backend, rel_pos):
        pytest.skip(f"{backend} is for separable tables")
    attn.backend = backend
    mask = torch.arange(16) % 3 > 0
    assert torch.equal(attn(x, mask), attn(x, mask[None, None, None]))


@pytest.mark.parametrize("rel_pos", SCHEMES)
def test_terms_sum_to_scores(rel_pos):
    attn, x = make((3, 5), SCHEMES[rel_pos], 1), tokens((3, 5), 1)
    terms = attn.terms(x)
    on = [t for t in attn.rel_pos.terms if t not in ("value", "kernel")]
    assert list(terms) == ["content", *on, *(["prefix"] if attn.rel_pos.prefix == "learned" else [])]
    torch.testing.assert_close(sum(terms.values()), attn.scores(x), rtol=0, atol=1e-12)


def test_terms_by_hand_on_a_small_grid():
    """bias on 1x2: the score of the left patch towards the right one reads offset -1."""
    attn = make((1, 2), "bias")
    with torch.no_grad():
        attn.position.bias.table_h.copy_(torch.tensor([[100.0], [200.0]]))
        attn.position.bias.table_w.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert attn.terms(tokens((1, 2)))["bias"][0].tolist() == [
        [[102.0, 101.0], [103.0, 102.0]],
        [[205.0, 204.0], [206.0, 205.0]],
    ]


@pytest.mark.parametrize("prefix", [1, 5])
def test_prefix_tokens_leave_the_patch_block_as_it_is(prefix):
    attn, x = make((3, 5), "txl+bias", prefix), tokens((3, 5), prefix)
    bare = make((3, 5), "txl+bias")
    torch.testing.assert_close(attn.scores(x)[:, :, prefix:, prefix:], bare.scores(x[:, prefix:]), rtol=0, atol=1e-12)
    terms = attn.terms(x)
    for name in ("bias", "query", "v"):
        assert not terms[name][:, :, :prefix].any()
        assert not terms[name][:, :, :, :prefix].any()


def test_zero_max_distance_cannot_tell_patches_apart():
    attn, x = make((3, 5), {"preset": "bias", "max_distance": 0}), tokens((3, 5))
    plain = make((3, 5), "none")
    torch.testing.assert_close(attn.scores(x).softmax(-1), plain.scores(x).softmax(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", [*BACKENDS, "unfused"])
@pytest.mark.parametrize("additive", [False, True])
def test_a_row_that_sees_nothing_gives_zero_and_finite_gradients(backend, additive):
    attn, x = make((2, 3), ALL_TERMS), tokens((2, 3))
    attn.fused_attn = backend != "unfused"
    attn.backend = backend if backend in BACKENDS else attn.backend
    attn.proj = torch.nn.Identity()
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    if additive:
        mask = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    out = attn(x, attn_mask=mask)
    assert not out[:, 2].any()
    assert out[:, 1].any()
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in attn.parameters() if p.grad is not None)


@pytest.mark.parametrize("backend", [*BACKENDS, "unfused"])
@pytest.mark.parametrize("hide", ["boolean", "lowest"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_hidden_key_stays_hidden(backend, hide, dtype):
    attn = make((2, 3), ALL_TERMS).to(dtype)
    attn.fused_attn = backend != "unfused"
    attn.backend = backend if backend in BACKENDS else attn.backend
    with torch.no_grad():
        for table in attn.position.bias.parameters():
            table.fill_(-20)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[:, 4] = False
    if hide == "lowest":
        mask = torch.zeros(6, 6, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    x = tokens((2, 3)).detach().to(dtype)
    changed = x.clone()
    changed[:, 4] = 7.0
    seen = [0, 1, 2, 3, 5]
    out, other = attn(x, attn_mask=mask), attn(changed, attn_mask=mask)
    assert out.isfinite().all()
    assert torch.equal(out[:, seen], other[:, seen])


def test_from_attention_keeps_the_layers():
    plain = Attention(
        DIM, HEADS, qkv_bias=True, qk_norm=True, scale_norm=True, gated=True, norm_layer=torch.nn.LayerNorm
    )
    relative = RelativeAttention2d.from_attention(plain, grid_size=(3, 5), rel_pos={"preset": "txl", "init": "zeros"})
    assert all(relative.get_parameter(name) is parameter for name, parameter in plain.named_parameters())
    x = torch.randn(2, 15, DIM)
    torch.testing.assert_close(relative(x), plain(x))


def test_dropout_on_attention_acts_in_training_only():
    attn = make((3, 5), "bias", attn_drop=0.5)
    x = tokens((3, 5))
    assert not torch.equal(attn(x), attn(x))
    attn.eval()
    assert torch.equal(attn(x), attn(x))


def test_hook_on_attention_weights_without_the_fused_kernel():
    timm.layers.set_fused_attn(False)
    try:
        attn = make((3, 5), "txl").eval()
    finally:
        timm.layers.set_fused_attn(True)
    seen = []
    attn.attn_drop.register_forward_hook(lambda module, args, out: seen.append(out))
    x = tokens((3, 5))
    attn(x)
    torch.testing.assert_close(seen[0], attn.scores(x).softmax(-1))


def test_wrong_number_of_tokens_is_named():
    with pytest.raises(ValueError, match=r"x has 14 tokens, expected 1 prefix tokens and 3x5 patches \(16\)"):
        make((3, 5), "bias", 1)(tokens((2, 7)))


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"backend: 'denes' is unknown.*did you mean 'dense'"):
        RelativeAttention2d(DIM, HEADS, grid_size=(3, 5), backend="denes")


def test_explain_names_backend_and_bytes():
    model = torch.nn.ModuleDict({"attn": make((3, 5), "bias", 1)})
    report = explain(model)
    assert [(r.backend, r.terms, r.grid) for r in report] == [("written", "bias", "3x5")]
    report = explain(model.eval())
    assert [r.backend for r in report] == ["dense"]
    assert report[0].extra_bytes == HEADS * 8 * 16 * 16
    assert "one additive bias; 16 tokens, fewer than 1156" in str(report)
    assert explain(torch.nn.Linear(1, 1)) == []


SIDES = st.integers(1, 5)
ANY = settings(max_examples=25, deadline=None, derandomize=True)


def qkv(generator, batch, length):
    return torch.randn(3, batch, HEADS, length, DIM // HEADS, generator=generator, dtype=torch.float64)


@ANY
@given(rows=SIDES, cols=SIDES, down=st.integers(-9, 9), right=st.integers(-9, 9), scheme=st.sampled_from(list(SCHEMES)))
def test_shifting_query_and_key_together_changes_nothing(rows, cols, down, right, scheme):
    position = make((rows, cols), SCHEMES[scheme]).position_terms()
    q, k, v = qkv(torch.Generator().manual_seed(5), 2, rows * cols)
    here, there = Grid(rows, cols), Grid(rows, cols, down, right)
    for attend in (dense, reference):
        torch.testing.assert_close(
            attend(q, k, v, position, there, there), attend(q, k, v, position, here, here), rtol=0, atol=1e-11
        )


@ANY
@given(
    q_rows=SIDES, q_cols=SIDES, k_rows=SIDES, k_cols=SIDES, top=st.integers(-4, 4), left=st.integers(-4, 4),
    prefixes=st.tuples(st.integers(0, 2), st.integers(0, 2)), scheme=st.sampled_from(list(SCHEMES)),
)  # fmt: skip
def test_query_grid_other_than_key_grid(q_rows, q_cols, k_rows, k_cols, top, left, prefixes, scheme):
    """As in memory and cross-attention; Points that hold the same places as a Grid give the same."""
    position = make((4, 4), SCHEMES[scheme]).position_terms()
    q_grid, k_grid = Grid(q_rows, q_cols), Grid(k_rows, k_cols, top, left)
    generator = torch.Generator().manual_seed(6)
    q = qkv(generator, 2, prefixes[0] + q_grid.patches)[0]
    _, k, v = qkv(generator, 2, prefixes[1] + k_grid.patches)
    expected = reference(q, k, v, position, q_grid, k_grid)
    q_points, k_points = (Points(g.coords().expand(2, -1, -1)) for g in (q_grid, k_grid))
    for got in (
        dense(q, k, v, position, q_grid, k_grid),
        dense(q, k, v, position, q_points, k_points),
        dense(q, k, v, position, q_points, k_grid),
        reference(q, k, v, position, q_points, k_points),
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_padded_batch_of_mixed_grids_equals_each_picture_alone(scheme):
    grids = [Grid(3, 4), Grid(2, 5), Grid(4, 1)]
    position = make((4, 5), SCHEMES[scheme], 1).position_terms()
    length = max(g.patches for g in grids)
    q, k, v = qkv(torch.Generator().manual_seed(7), 3, 1 + length)
    coords = torch.full((3, length, 2), 99)
    seen = torch.zeros(3, 1, 1, 1 + length, dtype=torch.bool)
    for sample, grid in enumerate(grids):
        coords[sample, : grid.patches] = grid.coords()
        seen[sample, ..., : 1 + grid.patches] = True
    out = dense(q, k, v, position, Points(coords), Points(coords), seen)
    for sample, grid in enumerate(grids):
        n = 1 + grid.patches
        alone = [x[sample : sample + 1, :, :n] for x in (q, k, v)]
        expected = reference(*alone, position, grid, grid)
        torch.testing.assert_close(out[sample : sample + 1, :, :n], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_permuting_heads_permutes_their_scores(scheme):
    spec = {**as_mapping(SCHEMES[scheme]), "share_heads": False}
    attn, x = make((3, 5), spec, 1), tokens((3, 5), 1)
    before = attn.scores(x)
    with torch.no_grad():
        for parameter in attn.position_terms.parameters():
            parameter.copy_(parameter.flip(0))
        for layer in (attn.qkv.weight, attn.qkv.bias):
            layer.copy_(layer.unflatten(0, (3, HEADS, -1)).flip(1).flatten(0, 2))
    torch.testing.assert_close(attn.scores(x), before.flip(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("table", ["separable", "joint"])
def test_an_entry_beyond_the_clamp_shares_its_neighbours_value(table):
    spec = {"preset": ALL_TERMS, "table": table}
    short = make((3, 5), {**spec, "max_distance": (1, 2)})
    long = make((3, 5), spec)
    with torch.no_grad():
        for name, parameter in short.position.named_parameters():
            target = long.position.get_parameter(name)
            dims = {"table_h": [1], "table_w": [2], "table": [1, 2]}.get(name.split(".")[-1], [])
            for dim, k in enumerate(dims, start=1):
                grown = {1: 2, 2: 4}[k]
                offset = torch.arange(-grown, grown + 1)
                parameter = parameter.index_select(dim, offset.clamp(-k, k) + k)
                if name.startswith("kernel"):  # it ends there
                    parameter = parameter.index_fill(dim, (offset.abs() > k).nonzero().flatten(), 0)
            target.copy_(parameter)
        long.qkv.load_state_dict(short.qkv.state_dict())
        long.proj.load_state_dict(short.proj.state_dict())
    x = tokens((3, 5))
    torch.testing.assert_close(long(x), short(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("table", ["separable", "joint"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_entry_that_no_pair_reads_gets_exactly_no_gradient(backend, table):
    spec = {"preset": ALL_TERMS, "table": table, "max_distance": (3, 4)}
    if not can(backend, spec):
        pytest.skip(f"{backend} is for separable tables")
    attn = make((2, 3), spec, backend=backend)
    attn(tokens((2, 3))).square().sum().backward()
    for name in ("bias", "query", "key", "value", "kernel"):
        for parameter_name, parameter in attn.position.get_submodule(name).named_parameters():
            if parameter_name == "table":
                read = parameter.grad.reshape(*parameter.shape[:3], -1).abs().sum(-1)
                expected = torch.zeros(7, 9, dtype=torch.bool)
                expected[2:5, 2:7] = True
                assert torch.equal(read.ne(0).all(0), expected)
            else:
                read = parameter.grad.reshape(*parameter.shape[:2], -1).abs().sum(-1)
                low, high = (2, 5) if parameter_name == "table_h" else (2, 7)
                expected = [low <= i < high for i in range(parameter.shape[1])]
                assert read.ne(0).all(0).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("preset", [*PRESETS, "shaw+kernel"])
def test_half_precision_is_finite_and_near_float32(preset, backend, autocast, dtype):
    if not can(backend, preset):
        pytest.skip(f"{backend} is for separable tables")
    if autocast and dtype == torch.float16 and not torch.amp.is_autocast_available("cpu"):
        pytest.skip("no autocast on this CPU")
    attn = make((3, 5), preset, 1, backend=backend).float()
    with torch.no_grad():
        for parameter in attn.position.parameters():
            parameter.mul_(0.3)
    x = tokens((3, 5), 1).detach().float()
    expected = attn(x)
    low = attn if autocast else attn.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = low(x if autocast else x.to(dtype))
        loss = (out.float() * torch.arange(out.numel()).reshape(out.shape).cos()).sum()
    loss.backward()
    assert out.isfinite().all()
    assert torch.nn.functional.cosine_similarity(out.float().flatten(), expected.flatten(), dim=0) > 0.999
    assert all(p.grad.isfinite().all() and p.grad.any() for p in attn.position.parameters())


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_and_causality_both_hide(additive):
    attn, x = make((3, 5), "txl"), tokens((3, 5))
    seen = torch.rand(15, 15, generator=torch.Generator().manual_seed(3)) < 0.6
    mask = torch.zeros(15, 15, dtype=torch.float64).masked_fill(~seen, -torch.inf) if additive else seen
    torch.testing.assert_close(attn(x, attn_mask=mask, is_causal=True), attn(x, attn_mask=seen.tril()))


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 15, dtype=torch.bool), torch.ones(15, 15, dtype=torch.int64)], ids=["B, L", "int"]
)
def test_a_mask_that_does_not_fit_is_named(mask):
    with pytest.raises(ValueError, match=r"attn_mask: expected a boolean or floating point mask that broadcasts to"):
        make((3, 5), "bias")(tokens((3, 5)), attn_mask=mask)


@pytest.mark.parametrize("grid_size", [3, (3,), (0, 3), (2, 2, 2)], ids=str)
def test_a_wrong_grid_is_named(grid_size):
    with pytest.raises(ValueError, match=r"grid_size: expected \(h, w\) in patches"):
        RelativeAttention2d(DIM, HEADS, grid_size=grid_size)
