"""Scalar tables and the resizing of tables; see test_oracles."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import assert_attention, bias_of, close, flat_state, oracle, place, split, thirds

from vitrel import RelPos
from vitrel.computed import MlpTable
from vitrel.grid import AxisDistance, Grid
from vitrel.originals import flat_table, levit_table, sam_axis, tf_table
from vitrel.position import PositionTerms
from vitrel.resize import resize_table


@pytest.mark.parametrize("name", ["scalar__timm_relposbias", "scalar__timm_relposbias_cls"])
def test_flat_table(name):
    meta, data = oracle(name)
    grid = Grid(*meta["grid"])
    scheme, state = flat_state(data["table"], meta["grid"])
    position = place(scheme, meta["H"], 4, meta["grid"], state)
    assert torch.equal(bias_of(position, meta["prefix"] + grid.patches, meta["H"], 4, grid), data["bias"])


def test_tf_table():
    meta, data = oracle("scalar__timm_relposbias_tf")
    grid = Grid(*meta["grid"])
    position = place("swin", meta["H"], 4, meta["grid"], {"bias.table": tf_table(data["table"])})
    assert torch.equal(bias_of(position, grid.patches, meta["H"], 4, grid), data["bias"])


def test_levit():
    meta, data = oracle("scalar__levit")
    grid = Grid(*meta["grid"])
    state = {"bias.table": levit_table(data["table"], meta["grid"])}
    position = place("levit", meta["H"], 4, meta["grid"], state)
    assert torch.equal(bias_of(position, grid.patches, meta["H"], 4, grid), data["bias"])


@pytest.mark.parametrize("name", ["scalar__beit_attention", "scalar__swin_attention"])
def test_beit_and_swin_attention(name):
    meta, data = oracle(name)
    scheme, state = flat_state(data["table"], meta["grid"])
    position = place(scheme, meta["H"], meta["d"], meta["grid"], state)
    q, k, v = split(data["x"], *thirds(data), heads=meta["H"])
    grid = Grid(*meta["grid"])
    context = assert_attention(q, k, v, position, grid, grid, data)
    close(F.linear(context, data["proj_weight"], data["proj_bias"]), data["out"], atol=1e-11)


@pytest.mark.parametrize("name", ["scalar__swinv2_cpb", "scalar__swinv2_cpb_pretrained"])
def test_swin_v2(name):
    """Coordinates are made in float32 there: 5e-6. Cosine attention is content of normalised queries and keys."""
    meta, data = oracle(name)
    heads, width, grid = meta["H"], meta["d"], Grid(*meta["grid"])
    axes = RelPos.preset("cpb").axes(tuple(meta["grid"]))
    norm_size = tuple(meta["pretrained"]) if meta["pretrained"][0] else None
    source = MlpTable(heads, axes, norm_size=norm_size).double()
    names = {"mlp.fc1.weight": "fc1_weight", "mlp.fc1.bias": "fc1_bias", "mlp.fc2.weight": "fc2_weight"}
    source.load_state_dict({n: data[f"cpb_{theirs}"] for n, theirs in names.items()})
    terms = PositionTerms(RelPos.preset("cpb"), heads * width, heads, width, tuple(meta["grid"])).double()
    terms.bias = source
    q, k, v = split(data["x"], *thirds(data), heads=heads)
    q = F.normalize(q, dim=-1) * data["logit_scale"].clamp(max=np.log(100)).exp() * width**0.5
    with torch.no_grad():
        position = terms()
        close(bias_of(position, grid.patches, heads, width, grid), data["bias"], atol=5e-6)
        assert_attention(q, F.normalize(k, dim=-1), v, position, grid, grid, data, atol=5e-6)


@pytest.mark.parametrize("name", ["scalar__timm_relposmlp_cr", "scalar__timm_relposmlp_swin"])
def test_mlp_table(name):
    """Coordinates are made in float32 there: 5e-6."""
    meta, data = oracle(name)
    grid = Grid(*meta["grid"])
    state = {f"bias.mlp.{n.removeprefix('mlp_').replace('_', '.')}": t for n, t in data.items() if n.startswith("mlp_")}
    rel_pos = {"preset": "cpb", "mlp_coords": meta["mode"], "mlp_hidden": meta["hidden"]}
    position = place(rel_pos, meta["H"], 4, tuple(meta["grid"]), state)
    close(bias_of(position, meta["prefix"] + grid.patches, meta["H"], 4, grid), data["bias"], atol=5e-6)


def clamp_axes(h, w):
    return AxisDistance("clamp", h - 1), AxisDistance("clamp", w - 1)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_linear_stretch_of_sam(i):
    meta, data = oracle("resize__linear_1d")
    table, *coords = sam_axis(data[f"table_{i}"], meta["sets"][i][1])
    close(table[0], data[f"resized_{i}"], atol=1e-11)
    assert all(torch.equal(c, torch.arange(meta["sets"][i][1])) for c in coords)


@pytest.mark.parametrize("name", ["resize__timm_geometric_7_11", "resize__timm_geometric_7_11_cls"])
def test_geometric_resize(name):
    """float32 and a bisection to 1e-6 there: 1e-4."""
    meta, data = oracle(name)
    table, prefix = flat_table(data["table"], meta["src"])
    src, dst = clamp_axes(*meta["src"]), clamp_axes(*meta["dst"])
    for stored, old, new, size in (("resized", src, dst, meta["dst"]), ("back", dst, src, meta["src"])):
        table = resize_table(table, old, new, "geometric")
        expected, expected_prefix = flat_table(data[stored], size)
        close(table, expected.to(table), atol=1e-4)
        assert (prefix is None) == (expected_prefix is None) == (meta["extra"] == 0)
        if prefix is not None:
            assert torch.equal(prefix, expected_prefix)


@pytest.mark.parametrize("name", ["resize__timm_bicubic_11_7", "resize__timm_bicubic_7_11"])
def test_bicubic_resize_keeps_the_layout(name):
    """Bicubic resizing by pixel centres moves the centre and is no rule of this project; torch's fits its tables."""
    meta, data = oracle(name)
    table, _ = flat_table(data["table"], (meta["src"],) * 2)
    for kind, antialias, atol in (("simple", False, 1e-11), ("levit_antialias", True, 5e-6)):
        size = (2 * meta["dst"] - 1,) * 2
        expected, _ = flat_table(data[kind], (meta["dst"],) * 2)
        resized = F.interpolate(table[None], size=size, mode="bicubic", antialias=antialias)[0]
        close(resized, expected.to(table), atol=atol)
