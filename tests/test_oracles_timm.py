"""Position of timm's layers as they are installed; see test_oracles."""

import pytest
import timm.layers
import timm.models.mvitv2 as timm_mvitv2
import torch
from oracles import GRIDS, bias_of, close, filled, flat_state, place, sam_position
from timm.layers.bottleneck_attn import PosEmbedRel
from timm.models.beit import Attention as BeitAttention
from timm.models.levit import Attention as LevitAttention
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2

from vitrel import RelativeAttention2d
from vitrel.attend import reference_scores, reference_terms
from vitrel.grid import Grid
from vitrel.originals import levit_table, tf_table


def drawn(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module.double().train(False)  # LeViT's train() returns nothing
    return module


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
def test_live_rel_pos_bias(grid_size, prefix):
    theirs = drawn(timm.layers.RelPosBias(grid_size, num_heads=3, prefix_tokens=prefix))
    scheme, state = flat_state(theirs.relative_position_bias_table.detach(), grid_size)
    grid = Grid(*grid_size)
    ours = bias_of(place(scheme, 3, 4, grid_size, state), prefix + grid.patches, 3, 4, grid)
    assert torch.equal(ours, theirs.get_bias()[0])


@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
def test_live_rel_pos_bias_tf(grid_size):
    theirs = drawn(timm.layers.RelPosBiasTf(grid_size, num_heads=3))
    state = {"bias.table": tf_table(theirs.relative_position_bias_table.detach())}
    grid = Grid(*grid_size)
    ours = bias_of(place("swin", 3, 4, grid_size, state), grid.patches, 3, 4, grid)
    close(ours, theirs.get_bias().reshape(ours.shape), atol=1e-12)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize(
    ("mode", "grid_size"), [("cr", g) for g in GRIDS] + [("swin", g) for g in GRIDS if 1 not in g], ids=str
)
def test_live_rel_pos_mlp(mode, grid_size, prefix):
    """timm's swin mode divides by zero on a side of 1. Coordinates are made in float32 there: 5e-6."""
    theirs = timm.layers.RelPosMlp(grid_size, num_heads=3, hidden_dim=16, mode=mode, prefix_tokens=prefix).eval()
    theirs = theirs.double()
    state = {f"bias.{k}": t for k, t in theirs.state_dict().items()}
    rel_pos = {"preset": "cpb", "mlp_coords": mode, "mlp_hidden": 16}
    grid = Grid(*grid_size)
    ours = bias_of(place(rel_pos, 3, 4, grid_size, state), prefix + grid.patches, 3, 4, grid)
    close(ours, theirs.get_bias()[0], atol=5e-6)


@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
def test_live_beit_attention(grid_size):
    theirs = drawn(BeitAttention(12, 3, qkv_bias=True, window_size=grid_size))
    ours = RelativeAttention2d(12, 3, grid_size=grid_size, rel_pos="beit", num_prefix_tokens=1, qkv_bias=True).double()
    _, state = flat_state(theirs.relative_position_bias_table.detach(), grid_size)
    filled(ours.position, state)
    q = theirs.q_bias
    ours.qkv.load_state_dict({"weight": theirs.qkv.weight, "bias": torch.cat([q, torch.zeros_like(q), theirs.v_bias])})
    ours.proj.load_state_dict(theirs.proj.state_dict())
    x = torch.randn(2, 1 + grid_size[0] * grid_size[1], 12).double()
    close(ours(x), theirs(x), atol=1e-10)


@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
def test_live_swin_attention(grid_size):
    theirs = drawn(WindowAttention(12, 3, window_size=grid_size))
    ours = RelativeAttention2d(12, 3, grid_size=grid_size, rel_pos="swin", qkv_bias=True).double()
    filled(ours.position, flat_state(theirs.relative_position_bias_table.detach(), grid_size)[1])
    ours.qkv.load_state_dict(theirs.qkv.state_dict())
    ours.proj.load_state_dict(theirs.proj.state_dict())
    x = torch.randn(2, grid_size[0] * grid_size[1], 12).double()
    close(ours(x), theirs(x), atol=1e-10)


@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
def test_live_swin_v2_bias(grid_size):
    """Coordinates are made in float32 there: 5e-6."""
    theirs = WindowAttentionV2(12, grid_size, 3).double().eval()
    names = {"0.weight": "fc1.weight", "0.bias": "fc1.bias", "2.weight": "fc2.weight"}
    state = {f"bias.mlp.{names[k]}": t for k, t in theirs.cpb_mlp.state_dict().items()}
    grid = Grid(*grid_size)
    ours = bias_of(place("cpb", 3, 4, grid_size, state), grid.patches, 3, 4, grid)
    with torch.no_grad():
        table = theirs.cpb_mlp(theirs.relative_coords_table).reshape(-1, 3)
        expected = 16 * table[theirs.relative_position_index.reshape(-1)].T.reshape(ours.shape).sigmoid()
    close(ours, expected, atol=5e-6)


@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
def test_live_botnet(grid_size):
    theirs = drawn(PosEmbedRel(grid_size, dim_head=12, scale=1.0))
    q, grid = torch.randn(2, grid_size[0] * grid_size[1], 12).double(), Grid(*grid_size)
    state = {f"query.table_{n[0]}": getattr(theirs, f"{n}_rel").detach().flip(0)[None] for n in ("height", "width")}
    position = place("sam", 1, 12, grid_size, state)
    ours = reference_terms(q[:, None], q[:, None], position, grid, grid)["query"][:, 0]
    close(ours, theirs(q), atol=1e-12)


@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
def test_live_levit(grid_size):
    theirs = drawn(LevitAttention(12, 4, num_heads=3, resolution=grid_size))
    state = {"bias.table": levit_table(theirs.attention_biases.detach(), grid_size)}
    grid = Grid(*grid_size)
    ours = bias_of(place("levit", 3, 4, grid_size, state), grid.patches, 3, 4, grid)
    assert torch.equal(ours, theirs.get_attention_biases(torch.device("cpu")))


@pytest.mark.parametrize("sizes", [((3, 5), (3, 5)), ((2, 6), (4, 3)), ((4, 1), (2, 3))], ids=str)
@pytest.mark.parametrize("prefix", [0, 1])
def test_live_mvit_position(sizes, prefix):
    q_size, k_size = sizes
    sides = zip(q_size, k_size, strict=True)
    tables = {f"rel_pos_{axis}": torch.randn(2 * max(s) - 1, 8).double() for axis, s in zip("hw", sides, strict=True)}
    q = torch.randn(2, 3, prefix + q_size[0] * q_size[1], 8).double()
    k = torch.zeros(2, 3, prefix + k_size[0] * k_size[1], 8).double()
    position, *points = sam_position(tables, q_size, k_size, 3, 8)
    theirs = timm_mvitv2.cal_rel_pos_type(q @ k.mT, q, bool(prefix), q_size, k_size, *tables.values())
    close(reference_terms(q, k, position, *points)["query"], theirs, atol=1e-12)


@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
def test_live_axial_rotary(grid_size):
    """timm's first half of the pairs turns with the row, ours with the column. Its frequencies are of float32: 1e-5."""
    theirs = timm.layers.RotaryEmbeddingCat(8, temperature=100.0, in_pixels=False, feat_shape=grid_size)
    q, k = torch.randn(2, 2, 3, grid_size[0] * grid_size[1], 8).double()
    emb = theirs.get_embed().double()
    expected = timm.layers.apply_rot_embed_cat(q, emb) @ timm.layers.apply_rot_embed_cat(k, emb).mT
    grid = Grid(*grid_size)
    position = place("rope", 3, 8, grid_size, {})
    swapped = (t.unflatten(-1, (2, 4)).flip(-2).flatten(-2) for t in (q, k))
    close(reference_scores(*swapped, position, grid, grid) * 8**0.5, expected, atol=1e-5)


@pytest.mark.parametrize("grid_size", GRIDS, ids=str)
def test_live_mixed_rotary(grid_size):
    theirs = timm.layers.RotaryEmbeddingMixed(24, depth=1, num_heads=3, feat_shape=list(grid_size)).double()
    q, k = torch.randn(2, 2, 3, grid_size[0] * grid_size[1], 8).double()
    emb = theirs.get_embed()[0].detach()
    expected = timm.layers.apply_rot_embed_cat(q, emb) @ timm.layers.apply_rot_embed_cat(k, emb).mT
    freqs = theirs.freqs.detach()[:, 0]
    state = {"rotary_mixed.freqs_w": freqs[0], "rotary_mixed.freqs_h": freqs[1]}
    grid = Grid(*grid_size)
    position = place("rope_mixed", 3, 8, grid_size, state)
    close(reference_scores(q, k, position, grid, grid) * 8**0.5, expected, atol=1e-5)
