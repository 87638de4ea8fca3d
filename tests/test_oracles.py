"""Scores of the original implementations, from files made by their own code (float64, tolerance 1e-11).

The files lie beside the repository and are no part of it; the tests skip where they are missing. What timm implements
is computed live instead.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.layers import RelPosBias

from vitrel import RelativeAttention2d

ORACLES = Path(__file__).parents[2] / "shared" / "oracles"


def oracle(name):
    path = ORACLES / name
    if not path.is_file():
        pytest.skip(f"{name} is not at {ORACLES}: oracle files are not part of the repository")
    data = np.load(path)
    meta = json.loads(str(data["meta"]))
    return meta, {k: torch.from_numpy(data[k]) for k in data.files if k != "meta"}


def attention_of(meta, data, grid_size, rel_pos):
    attn = RelativeAttention2d(
        data["x"].shape[-1], meta["H"], attn_head_dim=meta["d"], grid_size=grid_size, rel_pos=rel_pos
    ).double()
    with torch.no_grad():
        for parameter in attn.position.parameters():
            parameter.zero_()
    return attn


def line(length, upright):
    return (length, 1) if upright else (1, length)


def assert_scores(scores, data, atol=1e-11):
    seen = ~data["blocked"].expand(scores.shape[-2:]) if data["blocked"].ndim == 2 else ~data["blocked"][:, None]
    seen = seen.expand(scores.shape)
    assert seen.any()
    torch.testing.assert_close(scores[seen], data["scores"][seen], rtol=0, atol=atol)


@pytest.mark.parametrize("upright", [False, True])
def test_transformer_xl_oracle_with_learned_entries(upright):
    """Any R fits a learned table: R of distance Δ, made by the original from its sinusoid."""
    meta, data = oracle("transformer_xl__partial_nomem.npz")
    length, heads, width = meta["Lq"], meta["H"], meta["d"]
    attn = attention_of(meta, data, line(length, upright), "txl")
    table = attn.position.query.table_h if upright else attn.position.query.table_w
    r = (data["r"] @ data["r_weight"].T).flip(0).reshape(length, heads, width)  # row = distance
    with torch.no_grad():
        attn.qkv.weight.copy_(data["qkv_weight"])
        table[:, length - 1 :] = r.transpose(0, 1)
        attn.position.u.copy_(data["r_w_bias"])
        attn.position.v.copy_(data["r_r_bias"])
    assert_scores(attn.scores(data["x"]), data)
    causal = attn.norm(attn_context(attn, data["x"], is_causal=True))
    torch.testing.assert_close(causal, data["context"], rtol=0, atol=1e-11)


def attn_context(attn, x, **mask):
    """Heads joined before the output projection."""
    projection, attn.proj = attn.proj, torch.nn.Identity()
    try:
        return attn(x, **mask)
    finally:
        attn.proj = projection


@pytest.mark.parametrize("upright", [False, True])
def test_transformer_xl_oracle_with_its_sinusoid(upright):
    """The original makes its frequencies in float32, so that the agreement is 1e-6 and not 1e-11."""
    meta, data = oracle("transformer_xl__partial_nomem.npz")
    attn = attention_of(meta, data, line(meta["Lq"], upright), {"preset": "txl", "source": "sinusoid"})
    projection = attn.position.query.proj_h if upright else attn.position.query.proj_w
    with torch.no_grad():
        attn.qkv.weight.copy_(data["qkv_weight"])
        projection.copy_(data["r_weight"])
        attn.position.u.copy_(data["r_w_bias"])
        attn.position.v.copy_(data["r_r_bias"])
    assert_scores(attn.scores(data["x"]), data, atol=2e-6)


@pytest.mark.parametrize("upright", [False, True])
def test_transformer_xl_oracle_with_learned_embeddings(upright):
    meta, data = oracle("transformer_xl__learned_nomem.npz")
    length = meta["Lq"]
    attn = attention_of(meta, data, line(length, upright), "txl_learned")
    query, bias = attn.position.query, attn.position.bias
    vectors, scalars = (query.table_h, bias.table_h) if upright else (query.table_w, bias.table_w)
    with torch.no_grad():
        attn.qkv.weight.copy_(data["qkv_weight"])
        vectors[:, length - 1 :] = data["r_emb"].flip(0)[:length].transpose(0, 1)
        # The original scales the sum, its scalar term included; ours is not scaled.
        scalars[:, length - 1 :] = data["r_bias"].flip(0)[:length].T * meta["d"] ** -0.5
        attn.position.u.copy_(data["r_w_bias"])
    assert_scores(attn.scores(data["x"]), data)


@pytest.mark.parametrize("upright", [False, True])
def test_xlnet_oracle_in_both_directions(upright):
    meta, data = oracle("xlnet__bidirectional.npz")
    length, heads, width = meta["Lq"], meta["H"], meta["d"]
    attn = attention_of(meta, data, line(length, upright), "txl")
    table = attn.position.query.table_h if upright else attn.position.query.table_w
    r = torch.einsum("ld,dhe->hle", data["r"], data["r_proj"])
    with torch.no_grad():
        joined = [data[n].reshape(-1, heads * width).T for n in ("q", "k", "v")]
        attn.qkv.weight.copy_(torch.cat(joined))
        for delta in range(-(length - 1), length):  # the row of distance Δ is Lk - Δ
            table[:, delta + length - 1] = r[:, length - delta]
        attn.position.u.copy_(data["r_w_bias"])
        attn.position.v.copy_(data["r_r_bias"])
    assert_scores(attn.scores(data["x"]), data)


@pytest.mark.parametrize("grid_size", [(3, 5), (5, 3), (1, 7), (4, 4)], ids=str)
def test_joint_bias_equals_timm_rel_pos_bias(grid_size):
    theirs = RelPosBias(grid_size, num_heads=3)
    torch.nn.init.normal_(theirs.relative_position_bias_table)
    ours = RelativeAttention2d(12, 3, grid_size=grid_size, rel_pos={"preset": "bias", "table": "joint"})
    rows, cols = (2 * n - 1 for n in grid_size)
    with torch.no_grad():
        ours.position.bias.table.copy_(theirs.relative_position_bias_table.T.reshape(3, rows, cols))
    term = ours.terms(torch.randn(1, grid_size[0] * grid_size[1], 12))["bias"]
    assert torch.equal(term, theirs.get_bias())
