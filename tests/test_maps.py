import pytest
import timm
import torch

import vitrel


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
    for name in model.position_parameters():
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
