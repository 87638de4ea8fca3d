"""Transformer-XL, XLNet, DeBERTa and T5: a sequence is a grid of one row or of one column; see test_oracles."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracles import (
    LINES,
    able,
    assert_attention,
    close,
    filled,
    joined,
    line,
    on_line,
    oracle,
    place,
    reach,
    split,
    thirds,
)

from vitrel import RelativeAttention2d
from vitrel.attend import reference_terms
from vitrel.grid import AxisDistance
from vitrel.originals import deberta_table, t5_table, txl_learned_tables, txl_table, xlnet_table


@LINES
@pytest.mark.parametrize(
    "name",
    ["transformer_xl__partial_nomem", "transformer_xl__partial_mem", "transformer_xl__partial_prenorm_clamp"],
)
def test_transformer_xl(name, upright):
    meta, data = oracle(name)
    heads, memory, length = meta["H"], meta["M"], meta["M"] + meta["Lq"]
    x = torch.cat([data["mems"], data["x"]], 1)
    if meta["pre_lnorm"]:
        x = F.layer_norm(x, x.shape[-1:], data["ln_weight"], data["ln_bias"], meta["ln_eps"])
    q, k, v = split(x, *thirds(data, bias=False), heads=heads)
    r = data["r"] if meta["clamp_len"] < 0 else data["r"][-1 - meta["clamp_len"] :]
    rel_pos = {"preset": "txl", "max_distance": reach(upright, len(r) - 1)}
    state = on_line(upright, "query", txl_table(r, data["r_weight"], heads))
    position = place(rel_pos, heads, meta["d"], (1, 1), {**state, "u": data["r_w_bias"], "v": data["r_r_bias"]})
    q_grid, k_grid = line(meta["Lq"], upright, first=memory), line(length, upright)
    context = assert_attention(q[:, :, memory:], k, v, position, q_grid, k_grid, data)
    out = data["x"] + context @ data["o_weight"].T
    if not meta["pre_lnorm"]:
        out = F.layer_norm(out, out.shape[-1:], data["ln_weight"], data["ln_bias"], meta["ln_eps"])
    close(out, data["out"], atol=1e-11)


@LINES
def test_transformer_xl_makes_its_own_sinusoid(upright):
    """The original makes its frequencies in float32, so that the agreement is 2e-6 and not 1e-11."""
    meta, data = oracle("transformer_xl__partial_nomem")
    length = meta["Lq"]
    grid_size = (length, 1) if upright else (1, length)
    attn = RelativeAttention2d(
        meta["D"],
        meta["H"],
        attn_head_dim=meta["d"],
        grid_size=grid_size,
        rel_pos={"preset": "txl", "source": "sinusoid"},
    ).double()
    proj = {f"query.proj_{'h' if upright else 'w'}": data["r_weight"]}
    filled(attn.position, {**proj, "u": data["r_w_bias"], "v": data["r_r_bias"]})
    attn.qkv.weight = torch.nn.Parameter(data["qkv_weight"])
    seen = ~data["blocked"].expand(data["scores"].shape)
    close(attn.scores(data["x"])[seen], data["scores"][seen], atol=2e-6)


@LINES
@pytest.mark.parametrize("name", ["transformer_xl__learned_nomem", "transformer_xl__learned_mem"])
def test_transformer_xl_with_learned_embeddings(name, upright):
    meta, data = oracle(name)
    heads, memory, length = meta["H"], meta["M"], meta["M"] + meta["Lq"]
    q, k, v = split(torch.cat([data["mems"], data["x"]], 1), *thirds(data, bias=False), heads=heads)
    vectors, scalars = txl_learned_tables(data["r_emb"], data["r_bias"])
    rel_pos = {"preset": "txl_learned", "max_distance": reach(upright, meta["K"] - 1)}
    state = {**on_line(upright, "query", vectors), **on_line(upright, "bias", scalars), "u": data["r_w_bias"]}
    position = place(rel_pos, heads, meta["d"], (1, 1), state)
    q_grid, k_grid = line(meta["Lq"], upright, first=memory), line(length, upright)
    assert_attention(q[:, :, memory:], k, v, position, q_grid, k_grid, data)


@LINES
@pytest.mark.parametrize("backend", ["dense", "folded", "blocked"])
@pytest.mark.parametrize("name", ["transformer_xl__stack_sinusoid", "transformer_xl__stack_learned"])
def test_transformer_xl_layers_and_segments(name, backend, upright):
    meta, data = oracle(name)
    state = {k.removeprefix("sd/"): t for k, t in data.items() if k.startswith("sd/")}
    heads, layers, width = meta["H"], meta["layers"], meta["d"]
    embedding = state["word_emb.emb_layers.0.weight"]
    mems = [embedding.new_zeros(meta["B"], 0, meta["D"])] * (layers + 1)
    for segment in range(meta["segs"]):
        hidden = embedding[data["ids"][segment]] * meta["emb_scale"]
        new_mems = []
        for i in range(layers + 1):
            x, memory = torch.cat([mems[i], hidden], 1), mems[i].shape[1]
            new_mems.append(x[:, -meta["mem_len"] :])
            if i == layers:
                break
            part = {k.removeprefix(f"layers.{i}."): t for k, t in state.items()}
            q, k, v = split(x, *[(w,) for w in part["dec_attn.qkv_net.weight"].chunk(3)], heads=heads)
            if meta["attn_type"]:
                vectors, scalars = txl_learned_tables(state["r_emb"][i], state["r_bias"][i])
                tables = {**on_line(upright, "query", vectors), **on_line(upright, "bias", scalars)}
                tables["u"] = state["r_w_bias"][i]
            else:
                angle = torch.arange(x.shape[1] - 1, -1, -1.0).double()[:, None] * state["pos_emb.inv_freq"]
                r = torch.cat([angle.sin(), angle.cos()], -1)
                tables = on_line(upright, "query", txl_table(r, part["dec_attn.r_net.weight"], heads))
                tables |= {"u": state["r_w_bias"], "v": state["r_r_bias"]}
            size = next(iter(tables.values())).shape[1] // 2
            preset = "txl_learned" if meta["attn_type"] else "txl"
            rel_pos = {"preset": preset, "max_distance": reach(upright, size)}
            position = place(rel_pos, heads, width, (1, 1), tables)
            causal = torch.ones(hidden.shape[1], x.shape[1], dtype=torch.bool).tril(memory)
            grids = line(hidden.shape[1], upright, first=memory), line(x.shape[1], upright)
            form = able(position, *grids)[backend]
            context = joined(form(q[:, :, memory:], k, v, position, *grids, causal, 0.0))
            norm = partial(F.layer_norm, normalized_shape=[meta["D"]], eps=meta["ln_eps"])
            weights = [part[f"dec_attn.layer_norm.{n}"] for n in ("weight", "bias")]
            hidden = norm(hidden + context @ part["dec_attn.o_net.weight"].T, weight=weights[0], bias=weights[1])
            first, last = ([part[f"pos_ff.CoreNet.{n}.{p}"] for p in ("weight", "bias")] for n in (0, 3))
            weights = [part[f"pos_ff.layer_norm.{n}"] for n in ("weight", "bias")]
            forward = F.linear(F.linear(hidden, *first).relu(), *last)
            hidden = norm(hidden + forward, weight=weights[0], bias=weights[1])
        mems = new_mems
        close(hidden, data[f"out_{segment}"], atol=1e-11)
        close(torch.stack(mems), data[f"mems_{segment}"], atol=1e-11)


@LINES
@pytest.mark.parametrize("name", ["xlnet__bidirectional", "xlnet__bidirectional_mem"])
def test_xlnet(name, upright):
    meta, data = oracle(name)
    heads, memory, length = meta["H"], meta["M"], meta["M"] + meta["Lq"]
    x = torch.cat([data["mems"], data["x"]], 1)
    q, k, v = split(x, *[(data[n].flatten(1).T,) for n in "qkv"], heads=heads)
    rel_pos = {"preset": "txl", "max_distance": reach(upright, length)}
    state = on_line(upright, "query", xlnet_table(data["r"], data["r_proj"], length))
    state |= {"u": data["r_w_bias"], "v": data["r_r_bias"]}
    position = place(rel_pos, heads, meta["d"], (1, 1), state)
    q_grid, k_grid = line(meta["Lq"], upright, first=memory), line(length, upright)
    assert_attention(q[:, :, memory:], k, v, position, q_grid, k_grid, data)


@LINES
@pytest.mark.parametrize(
    "name",
    [
        "deberta_v2__c2p_only",
        "deberta_v2__c2p_p2c",
        "deberta_v2__c2p_p2c_buckets",
        "deberta_v2__share_att_key",
    ],
)
def test_deberta(name, upright):
    """The original computes its scale in float32: 1e-6 where that is not exact."""
    meta, data = oracle(name)
    heads, span = meta["H"], meta["span"]
    projections = [(data[f"{n}_proj_weight"], data[f"{n}_proj_bias"]) for n in ("query", "key", "value")]
    q, k, v = split(data["x"], *projections, heads=heads)
    stem = "" if meta["share_att_key"] else "pos_"
    state = {}
    for kind, term, source in (("c2p", "query", "key"), ("p2c", "key", "query")):
        if kind in meta["types"]:
            weights = [data[f"{stem}{source}_proj_{n}"] for n in ("weight", "bias")]
            state |= on_line(upright, term, deberta_table(data["rel_embeddings"], *weights, heads))
    if meta["buckets"] > 0:
        distance = {
            "distance": "deberta_log",
            "buckets": span,
            "exact": meta["buckets"] // 2,
            "max_distance": meta["max_relative_positions"],
        }
        size = span
        axis = AxisDistance("deberta_log", size, meta["buckets"] // 2, span, meta["max_relative_positions"])
        i = torch.arange(meta["L"])
        assert torch.equal(axis.index(i[:, None] - i) - size, data["rel_pos"].clamp(-size, size))
    else:
        distance = {"max_distance": reach(upright, span)}
    terms = [term for kind, term in (("c2p", "query"), ("p2c", "key")) if kind in meta["types"]]
    rel_pos = {"terms": terms, "scale": "deberta", **distance}
    position = place(rel_pos, heads, meta["d"], (1, 1), state)
    grid = line(meta["L"], upright)
    assert_attention(q, k, v, position, grid, grid, data, atol=1e-11 if meta["scale_is_exact"] else 1e-6)


@LINES
def test_t5(upright):
    meta, data = oracle("scalar__t5_bias")
    heads, q_length, k_length = meta["H"], meta["Lq"], meta["Lk"]
    state = on_line(upright, "bias", t5_table(data["embedding"]) * meta["scale"])
    position = place("t5", heads, 4, (1, 1), state)
    q, k = torch.zeros(1, heads, q_length, 4).double(), torch.zeros(1, heads, k_length, 4).double()
    grids = line(q_length, upright, first=k_length - q_length), line(k_length, upright)
    assert torch.equal(reference_terms(q, k, position, *grids)["bias"][0], data["bias"])


def test_t5_buckets():
    meta, data = oracle("buckets__t5")
    ((count, largest),) = meta["sets"]
    delta, half = -data["offset_k_minus_q"], count // 2
    signed = AxisDistance("t5_log", half - 1, half // 2, half - 1, largest).index(delta) - (half - 1)
    assert torch.equal(torch.where(signed < 0, half - signed, signed), data["bidirectional_0"])
    causal = AxisDistance("t5_log", count - 1, half, count - 1, largest).index(delta) - (count - 1)
    assert torch.equal(causal.clamp(min=0), data["causal_0"])


def test_irpe_buckets():
    meta, data = oracle("buckets__irpe_piecewise")
    alpha, beta, gamma, _ = meta["sets"][0]
    axis = AxisDistance("piecewise", int(beta), alpha, beta, gamma)
    assert torch.equal(axis.index(data["offset_0"]) - axis.size, data["index_0"])
    assert torch.equal(axis.index(data["offset_float"]) - axis.size, data["index_float"])


@pytest.mark.parametrize("i", [0, 1])
def test_deberta_buckets(i):
    meta, data = oracle("buckets__deberta_log")
    buckets, largest, _ = meta["sets"][i]
    axis = AxisDistance("deberta_log", 10 * largest, buckets // 2, buckets, largest)
    assert torch.equal(axis.index(data[f"offset_{i}"]) - axis.size, data[f"bucket_{i}"])
