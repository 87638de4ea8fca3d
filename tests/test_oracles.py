"""What the original implementations compute, from files made by their own code, and from timm as it is installed.

The files lie beside the repository (or where VITREL_ORACLES points) and are no part of it; their tests skip where they
are missing. Tolerances: float64 1e-11; 2e-5 for float32 arrays; others are named where they are used.

What a file holds beyond the reach of one attention layer is done around it, with the position always from the library:

==============================  =======================================================================================
transformer_xl, xlnet           in full, each on a 1xL and an Lx1 grid; the stacks' feed-forward parts in the test
deberta_v2, scalar, contextual  in full; Swin V2's cosine attention by normalised q and k
irpe, shaw_2d__schh             in full; the bucket of all pairs with the class token by placing that token out of
                                reach of the grid, since a content-dependent term is one between patches; euclidean
                                buckets as a joint table over (Δh, Δw)
shaw_2d__t2t, rope, buckets     in full
sam, mvit                       in full; pooling in the test. fp32_truncation only where the original's float32
                                coordinates do not fall below a whole number
resize__linear_1d               in full, by the importer of SAM's tables
resize__timm_geometric          in full
resize__timm_bicubic            in part: the layout; no rule of this project resizes bicubically
model vit_relpos, beit, samvit  in full, converted
model samvit_window, mvitv2     in part: timm's model with the position term of its attention replaced
model vit_plain                 in full, with tables of zeros
==============================  =======================================================================================
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracles import ORACLES, able, assert_attention, close, joined, oracle, place, sam_position, split, thirds

from vitrel import RelPos
from vitrel.attend import reference_scores, reference_terms
from vitrel.grid import AxisDistance, Grid, Points
from vitrel.originals import irpe_table
from vitrel.rotary import rotate

FAR = 1000  # coordinates that no patch of a small grid has


def test_every_file_has_its_test():
    if not ORACLES.is_dir():
        pytest.skip(f"{ORACLES} is missing: oracle files are not part of the repository")
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_oracles*.py"))
    missing = [path.stem for path in ORACLES.glob("*.npz") if f'"{path.stem}"' not in text]
    assert not missing


def out_of_reach(h, w):
    """Coordinates of queries and of keys, class token first: every pair with that token is (2*FAR or FAR) apart."""
    patches = Grid(h, w).coords()
    ends = (torch.full((1, 1, 2), sign * FAR) for sign in (1, -1))
    return [Points(torch.cat([end, patches], 1)) for end in ends]


def irpe_entries(meta, data, term, of):
    """The parameters of a term, and the entries of pairs with the class token."""
    if meta["method"] == "cross":
        sides = [irpe_table(data[f"table_{of}_{n}"], term, joint=False) for n in ("rows", "cols")]
        return {"table_h": sides[0][0], "table_w": sides[1][0]}, [side[1] for side in sides]
    table, prefix = irpe_table(data[f"table_{of}"], term)
    return {"table": table}, [prefix]


def spread(state, prefix, grid_size):
    """Piecewise entries as one per offset of the grid, and after the largest one that of the class token."""
    axes = [AxisDistance("piecewise", 3, 1.9, 3.8, 15.2).index(torch.arange(-n, n + 1)) for n in grid_size]
    spreads = {}
    for (name, table), entry in zip(state.items(), prefix, strict=True):
        if name == "table":
            table = table[:, axes[0]][:, :, axes[1]]
            table[:, -1, -1] = entry
        else:
            table = table[:, axes[name == "table_w"]]
            table[:, -1] = entry
        spreads[name] = table
    return spreads


IRPE_TERMS = {"k": "query", "q": "key", "v": "value"}


@pytest.mark.parametrize(
    "name",
    [
        "irpe__product_ctx_qkv",
        "irpe__product_ctx_k_shared",
        "irpe__product_ctx_qkv_cls",
        "irpe__cross_ctx_qkv_cls",
    ],
)
def test_irpe_contextual(name):
    meta, data = oracle(name)
    heads, width, prefix, grid_size = meta["H"], meta["d"], meta["prefix"], tuple(meta["grid"])
    q, k, v = split(data["x"], *thirds(data), heads=heads)
    common = {
        "terms": [IRPE_TERMS[letter] for letter in meta["rpe_on"]],
        "table": "separable" if meta["method"] == "cross" else "joint",
        "share_heads": meta["shared_head"],
    }
    entries = {t: irpe_entries(meta, data, t, o) for o, t in IRPE_TERMS.items() if o in meta["rpe_on"]}
    state = {f"{t}.{n}": table for t, (tables, _) in entries.items() for n, table in tables.items()}
    position = place({**RelPos.preset("irpe_k").as_dict(), **common}, heads, width, grid_size, state)
    grids = [Grid(*grid_size)] * 2
    terms = reference_terms(q, k, position, *grids)
    for letter in {"k", "q"} & set(meta["rpe_on"]):
        got, expected = terms[IRPE_TERMS[letter]], data[f"{letter}_term"]
        close(got[:, :, prefix:, prefix:], expected[:, :, prefix:, prefix:], atol=1e-11)
    if prefix:
        state = {f"{t}.{n}": table for t, parts in entries.items() for n, table in spread(*parts, grid_size).items()}
        position = place({**common, "max_distance": grid_size}, heads, width, grid_size, state)
        grids = out_of_reach(*grid_size)
    assert_attention(q, k, v, position, *grids, data)


@pytest.mark.parametrize("name", ["irpe__product_bias_qk_cls", "irpe__cross_bias_qk"])
def test_irpe_bias(name):
    """Two scalar tables, one read at -Δ, are one; what pairs with the class token share are prefix scalars."""
    meta, data = oracle(name)
    heads, prefix = meta["H"], meta["prefix"]
    q, k, v = split(data["x"], *thirds(data), heads=heads)
    (of_k, class_k), (of_q, class_q) = (irpe_entries(meta, data, t, o) for o, t in (("k", "query"), ("q", "key")))
    state = {f"bias.{n}": of_k[n] + of_q[n] for n in of_k}
    if prefix:
        state["prefix"] = (class_k[0] + class_q[0])[:, None].expand(-1, 3)
    rel_pos = {
        **RelPos.preset("irpe_k").as_dict(),
        "terms": ["bias"],
        "table": "separable" if meta["method"] == "cross" else "joint",
        "prefix": "learned" if prefix else "none",
    }
    grid = Grid(*meta["grid"])
    position = place(rel_pos, heads, meta["d"], meta["grid"], state)
    assert_attention(q, k, v, position, grid, grid, data)


@pytest.mark.parametrize("name", ["irpe__euclidean_bias_k_cls", "irpe__euclidean_ctx_qkv"])
def test_irpe_euclidean(name):
    """Any function of (Δh, Δw) is a joint table."""
    meta, data = oracle(name)
    heads, prefix, (h, w) = meta["H"], meta["prefix"], meta["grid"]
    q, k, v = split(data["x"], *thirds(data), heads=heads)
    coords = Grid(h, w).coords()[0]
    dh, dw = (coords[:, None] - coords).unbind(-1)
    buckets = torch.zeros(2 * h - 1, 2 * w - 1, dtype=torch.long)
    buckets[dh + h - 1, dw + w - 1] = data["bucket"][prefix:, prefix:]
    bias = meta["mode"] == "bias"
    state = {}
    for letter in meta["rpe_on"]:
        term, table = IRPE_TERMS[letter], data[f"table_{letter}"]
        table = table.mT if table.ndim == 3 and term != "value" else table
        state["bias.table" if bias else f"{term}.table"] = table[:, buckets.flip(0, 1) if term == "key" else buckets]
    terms = ["bias"] if bias else ["query", "key", "value"]
    rel_pos = {"terms": terms, "table": "joint", "prefix": "learned" if prefix else "none"}
    if prefix:
        state["prefix"] = data["table_k"][:, -1:].expand(-1, 3)
    position = place(rel_pos, heads, meta["d"], (h, w), state)
    grid = Grid(h, w)
    assert_attention(q, k, v, position, grid, grid, data)


@pytest.mark.parametrize("name", ["shaw_2d__schh_cls", "shaw_2d__schh_cls_nonsquare"])
def test_shaw_of_halves_with_a_class_token(name):
    """Columns fill the first half of d, rows the second; row 0 of each table is the class token's."""
    meta, data = oracle(name)
    heads, width, clamp, grid_size = meta["H"], meta["d"], meta["clamp"], tuple(meta["grid"])
    q, k, v = split(data["x"], *[(data[f"{n}_weight"], data[f"{n}_bias"]) for n in "qkv"], heads=heads)
    near, spreads = {}, {}
    for term, kind in (("query", "key"), ("value", "value")):
        for axis, letter, n, pad in (
            ("h", "y", grid_size[0], (width // 2, 0)),
            ("w", "x", grid_size[1], (0, width // 2)),
        ):
            table = F.pad(data[f"{kind}_table_{letter}"], pad)[None]
            near[f"{term}.table_{axis}"] = table[:, 1:].flip(1)
            rows = (-torch.arange(-n, n + 1)).clamp(-clamp, clamp) + clamp + 1
            rows[-1] = 0
            spreads[f"{term}.table_{axis}"] = table[:, rows]
    rel_pos = {"preset": "shaw", "share_heads": True}
    position = place({**rel_pos, "max_distance": clamp}, heads, width, grid_size, near)
    scores = reference_scores(q, k, position, Grid(*grid_size), Grid(*grid_size))
    close(scores[:, :, 1:, 1:], data["scores"][:, :, 1:, 1:], atol=1e-11)
    position = place({**rel_pos, "max_distance": grid_size}, heads, width, grid_size, spreads)
    assert_attention(q, k, v, position, *out_of_reach(*grid_size), data)


@pytest.mark.parametrize("name", ["shaw_2d__t2t_per_head", "shaw_2d__t2t_shared"])
def test_shaw_of_tensor2tensor(name):
    """Its scores are unscaled: the queries come in multiplied by sqrt(d). Rows of key minus query are flipped."""
    meta, data = oracle(name)
    heads, width, shared = meta["H"], meta["d"], meta["shared_heads"]
    tables = [data[n][None] if shared else data[n] for n in ("height_table", "width_table")]
    state = {f"query.table_{axis}": table.flip(1) for axis, table in zip("hw", tables, strict=True)}
    position = place({"terms": ["query"], "share_heads": shared}, heads, width, meta["grid"], state)
    q, k, v = (data[n].flatten(2, 3) for n in "qkv")
    grid = Grid(*meta["grid"])
    for backend in able(position, grid).values():
        out = backend(q * width**0.5, k, v, position, grid, grid, None, 0.0)
        close(out, data["out"].flatten(2, 3), atol=1e-11)


@pytest.mark.parametrize("name", ["rope__naver_axial", "rope__naver_mixed"])
def test_rope(name):
    meta, data = oracle(name)
    heads, width, grid = meta["H"], meta["d"], Grid(*meta["grid"])
    mixed = meta["mode"] == "mixed"
    state = {f"rotary_mixed.freqs_{axis}": data["freqs"][i] for i, axis in enumerate("wh")} if mixed else {}
    preset = {"preset": "rope_mixed" if mixed else "rope", "theta": meta["theta"]}
    position = place(preset, heads, width, meta["grid"], state)
    for n in "qk":
        close(rotate(data[n], position.frequencies, grid), data[f"{n}_rot"], atol=1e-11)
        single = tuple(f.float() for f in position.frequencies) if mixed else position.frequencies
        close(rotate(data[n].float(), single, grid), data[f"{n}_rot_fp32"], atol=5e-6)
    close(reference_scores(data["q"], data["k"], position, grid, grid), data["scores"], atol=1e-11)
    q, k, v = split(data["attn_x"], *thirds(data), heads=heads)
    with_class = {"scores": data["attn_scores"], "context": data["attn_context"]}
    assert_attention(q, k, v, position, grid, grid, with_class)


@pytest.mark.parametrize(
    "name",
    [
        "sam__decomposed_same",
        "sam__decomposed_interpolated",
        "sam__decomposed_k_larger",
        "sam__decomposed_q_larger",
        "sam__decomposed_fraction",
        "sam__decomposed_fp32_truncation",
        "mvit__decomposed_cls",
        "mvit__decomposed_nocls",
    ],
)
def test_decomposed(name):
    meta, data = oracle(name)
    attn, q, out = (t if t.ndim == 4 else t[:, None] for t in (data["attn"], data["q"], data["out"]))
    position, q_points, k_points = sam_position(data, meta["q_grid"], meta["k_grid"], q.shape[1], meta["d"])
    k = torch.zeros(*q.shape[:2], attn.shape[3], meta["d"]).double()
    got = reference_terms(q, k, position, q_points, k_points)["query"]
    expected = out - attn
    if name.endswith("truncation"):  # pairs of rows of which float32 makes another than exact arithmetic does
        (qh, _), (kh, _) = meta["q_grid"], meta["k_grid"]
        exact = (torch.arange(qh)[:, None] * kh - torch.arange(kh) * qh + (kh - 1) * qh) // min(qh, kh)
        same = (exact == data["rows_h"]).repeat_interleave(meta["q_grid"][1], 0)
        same = same.repeat_interleave(meta["k_grid"][1], 1)
        assert same.any()
        assert not same.all()
        got, expected = got[:, :, same], expected[:, :, same]
    close(got, expected, atol=1e-11)


def test_sam_attention():
    meta, data = oracle("sam__attention")
    h, w = meta["grid"]
    position, *points = sam_position(data, (h, w), (h, w), meta["H"], meta["d"])
    q, k, v = split(data["x"].flatten(1, 2), *thirds(data), heads=meta["H"])
    for grids in ([Grid(h, w)] * 2, points):
        assert_attention(q, k, v, position, *grids, data)


@pytest.mark.parametrize("name", ["mvit__attention_cls", "mvit__attention_nocls"])
def test_mvit_attention(name):
    meta, data = oracle(name)
    heads, prefix, (h, w) = meta["H"], meta["prefix"], meta["grid"]

    def pool(x, letter, stride):
        patches = x[:, :, prefix:].flatten(0, 1).mT.unflatten(2, (h, w))
        weight = data[f"pool_{letter}_weight"]
        patches = F.conv2d(patches, weight, stride=stride, padding=1, groups=len(weight)).flatten(2).mT
        x = torch.cat([x[:, :, :prefix], patches.unflatten(0, x.shape[:2])], 2)
        norm = data[f"norm_{letter}_weight"], data[f"norm_{letter}_bias"]
        return F.layer_norm(x, x.shape[-1:], *norm, meta["ln_eps"])

    q, k, v = split(data["x"], *thirds(data), heads=heads)
    q = pool(q, "q", meta["stride_q"])
    k, v = pool(k, "k", meta["stride_kv"]), pool(v, "v", meta["stride_kv"])
    k_size = (h // meta["stride_kv"], w // meta["stride_kv"])
    position, *points = sam_position(data, meta["q_grid"], k_size, heads, meta["d"])
    close(reference_scores(q, k, position, *points), data["scores"], atol=1e-11)
    for backend in able(position, *points).values():
        context = backend(q, k, v, position, *points, None, 0.0)
        if meta["residual_pooling"]:
            context = context + F.pad(q[:, :, prefix:], (0, 0, prefix, 0))
        close(joined(context), data["context"], atol=1e-11)


def test_botnet():
    meta, data = oracle("contextual__botnet_posembedrel")
    q, grid = data["q"][:, None], Grid(*meta["grid"])
    state = {f"query.table_{n[0]}": data[f"{n}_rel"].flip(0)[None] for n in ("height", "width")}
    position = place({"preset": "sam"}, 1, meta["d"], meta["grid"], state)
    close(reference_terms(q, torch.zeros_like(q), position, grid, grid)["query"][:, 0], data["bias"], atol=1e-11)
