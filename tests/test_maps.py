import pytest
import timm
import torch

import vitrel
from vitrel.grid import Grid
from vitrel.kernel import add_kernel


def micro(rel_pos, **kwargs):
    return timm.create_model("vitrel_micro_patch4_32", rel_pos=rel_pos, **{"img_size": (24, 40), **kwargs})


def test_one_map_per_block_of_the_grids_offsets():
    maps = vitrel.bias_maps(micro("bias"))
    assert list(maps) == [f"blocks.{i}" for i in range(6)]
    assert {tuple(m.shape) for m in maps.values()} == {(4, 11, 19)}


def test_a_key_one_to_the_right_shows_right_of_the_centre_and_one_below_shows_below():
    model = micro({"preset": "bias", "table": "joint"})
    with torch.no_grad():  # offset is query minus key: a key to the right has Δw = -1, one below has Δh = -1
        model.blocks[2].attn.position.bias.table[1, 5 + 0, 9 - 1] = 3.0
        model.blocks[2].attn.position.bias.table[2, 5 - 1, 9 + 0] = 4.0
    maps = vitrel.bias_maps(model)["blocks.2"]
    assert maps.nonzero().tolist() == [[1, 5, 10], [2, 6, 9]]
    assert (maps[1, 5, 10], maps[2, 6, 9]) == (3.0, 4.0)


@pytest.mark.parametrize("prefix", [{}, {"class_token": True, "reg_tokens": 4}], ids=["0", "5"])
@pytest.mark.parametrize("table", ["separable", "joint"])
@pytest.mark.parametrize("preset", ["bias", "txl", "txl_learned", "txl+bias"])
def test_maps_are_the_scores_without_content(preset, table, prefix):
    """With q and k at zero, the score of query (y, x) and key (y + dy, x + dx) is map[dy, dx]."""
    model = micro({"preset": preset, "table": table, "max_distance": (3, 12)}, **prefix)
    for name in sorted(model.position_parameters()):
        torch.nn.init.normal_(model.get_parameter(name))
    attn = model.blocks[0].attn
    attn.qkv.weight.data.zero_()
    attn.qkv.bias.data.zero_()
    n = attn.num_prefix_tokens
    scores = attn.scores(torch.zeros(1, n + 60, 128))[0, :, n:, n:].reshape(4, 6, 10, 6, 10)
    maps = vitrel.bias_maps(model)["blocks.0"]
    for y, x in [(0, 0), (2, 7), (5, 9)]:
        torch.testing.assert_close(maps[:, 5 - y : 11 - y, 9 - x : 19 - x], scores[:, y, x])


def test_no_map_without_an_input_free_term():
    assert vitrel.bias_maps(micro("none")) == {}
    assert vitrel.bias_maps(micro("query+u")) == {}


def test_maps_follow_an_edit():
    model = micro("bias")
    assert not vitrel.bias_maps(model)["blocks.0"].any()
    torch.nn.init.ones_(model.blocks[0].attn.position.bias.table_h)
    assert vitrel.bias_maps(model)["blocks.0"].eq(1).all()


SMALL = {"embed_dim": 24, "num_heads": 3, "depth": 1, "img_size": (12, 20), "num_classes": 3}


def by_offset(summand, h=3, w=5):
    """Every summand (B, H, h * w, h * w) of an offset together, in the order of a map."""
    found = {}
    for i in range(h * w):
        for j in range(h * w):
            found.setdefault((j // w - i // w, j % w - i % w), []).append(summand[:, :, i, j])
    return {place: torch.stack(values, -1).double().movedim(1, 0).flatten(1) for place, values in found.items()}


@pytest.mark.parametrize("scheme", ["txl", "shaw", "deberta", "irpe_qk", "sam", "rope", "rope_mixed", "rope+bias"])
def test_expected_maps_are_means_and_spreads_over_queries_and_pictures(scheme):
    torch.manual_seed(0)
    net = micro(scheme, **SMALL, class_token=True)
    for name in sorted(net.position_parameters()):
        torch.nn.init.normal_(net.get_parameter(name))
    caught = []
    net.blocks[0].attn.register_forward_pre_hook(lambda m, args: caught.append(args[0]))
    maps = vitrel.term_maps(net, torch.randn(2, 3, 12, 20))["blocks.0"]
    terms = {n: t[:, :, 1:, 1:] for n, t in net.blocks[0].attn.terms(caught[0]).items()}
    for name in [n for n in terms if n.startswith("rotary")]:
        terms["rotary"] = terms["content"] + terms.pop(name)
    seen = [n for n in ("query", "key", "rotary") if n in terms]
    assert [n for n in maps if n not in ("free", "value")] == seen
    for name in seen:
        for (dy, dx), values in by_offset(terms[name]).items():
            got = maps[name].values[:, 2 + dy, 4 + dx], maps[name].spread[:, 2 + dy, 4 + dx]
            torch.testing.assert_close(got[0].double(), values.mean(1), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(got[1].double(), values.std(1, correction=0), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("pairs", [1 << 17, 100], ids=["all queries", "some queries"])
@pytest.mark.parametrize("grid", [(4, 4), (4, 8)])
def test_a_planted_vector_shows_at_its_place_in_every_map_of_it(grid, pairs, monkeypatch):
    """All queries and keys are ones, so that a summand is the sum of the table's vector."""
    monkeypatch.setattr("vitrel.probe.PAIRS", pairs)
    h, w = grid
    net = micro("irpe_qkv", **{**SMALL, "img_size": (4 * h, 4 * w)}, qkv_bias=True)
    attn = net.blocks[0].attn
    with torch.no_grad():
        attn.qkv.weight.zero_()
        attn.qkv.bias.fill_(1.0)
        for number, name in enumerate(("query", "key", "value")):
            table = getattr(attn.position, name).table.zero_()
            k = table.shape[1] // 2
            table[0, k, k - 1] = 2.0 + number  # one to the right
            table[1, k - 1, k] = 2.0 + number  # one below
    maps = vitrel.term_maps(net, torch.randn(1, 3, 4 * h, 4 * w))["blocks.0"]
    for number, name in enumerate(("query", "key", "value")):
        values = maps[name].values
        assert not values.isnan().any()
        bright = values.abs() > 1e-4
        assert bright.nonzero().tolist() == [[0, h - 1, w], [1, h, w - 1]]
        # iRPE scales scores by 1/sqrt(8); the norm of eight equal numbers is sqrt(8) times one
        expected = (2.0 + number) * 8**0.5
        assert values[bright].tolist() == [pytest.approx(expected, rel=1e-4)] * 2
    assert maps["query"].spread.abs().max() < 1e-3


def test_a_kernel_is_shown_as_it_acts():
    """One value at a time: what a patch gives to each query is the map at its place, and 0 beyond the table."""
    net = micro({"preset": "kernel", "max_distance": (1, 2)}, **SMALL, qkv_bias=True)
    attn = net.blocks[0].attn
    torch.nn.init.normal_(attn.position.kernel.table)
    shown = vitrel.term_maps(net)["blocks.0"]["kernel"]
    assert (shown.signed, shown.values.shape) == (True, (3, 5, 9))
    assert not shown.values[:, [0, 4]].any()
    assert not shown.values[:, :, [0, 1, 7, 8]].any()
    grid, place = Grid(3, 5), 1 * 5 + 3
    v = torch.zeros(1, 3, 15, 8)
    v[:, :, place] = 1
    out = add_kernel(torch.zeros_like(v), v, attn.position_terms(), grid, grid)[0, :, :, 0].unflatten(1, (3, 5))
    for y in range(3):
        for x in range(5):
            assert torch.equal(out[:, y, x], shown.values[:, 2 + 1 - y, 4 + 3 - x])


def test_without_pictures_tables_of_vectors_show_their_norms():
    maps = vitrel.term_maps(micro("shaw+bias"))["blocks.0"]
    assert {name: (one.signed, one.spread) for name, one in maps.items()} == {
        "free": (True, None),
        "query": (False, None),
        "value": (False, None),
    }
    assert list(vitrel.term_maps(micro("rope+kernel"))["blocks.0"]) == ["kernel"]
    assert vitrel.term_maps(micro("rope")) == {}
    assert vitrel.term_maps(micro("none"), torch.randn(1, 3, 24, 40)) == {}
