import json

import pytest
import torch

from vitrel.position import PositionTerms
from vitrel.relpos import PRESETS, RelPos


@pytest.mark.parametrize(
    ("spec", "terms"),
    [
        (None, ()),
        ("none", ()),
        ("bias", ("bias",)),
        ("txl", ("query", "u", "v")),
        ("txl_learned", ("bias", "query", "u")),
        ("txl+bias", ("bias", "query", "u", "v")),
        ("query+u", ("query", "u")),
        ("rope+bias", ("bias", "rotary")),
        ("txl+value", ("query", "u", "v", "value")),
        ("deberta", ("query", "key")),
        ({"terms": ["u"]}, ("u",)),
        ({"preset": "txl", "table": "joint"}, ("query", "u", "v")),
    ],
)
def test_what_a_user_may_give(spec, terms):
    assert RelPos.of(spec).terms == terms


def test_equal_sets_of_terms_are_equal():
    assert RelPos.preset("u+query+v") == RelPos.preset("txl")


@pytest.mark.parametrize("name", PRESETS)
def test_plain_data_round_trip(name):
    spec = RelPos.preset(name, max_distance=(20, 30), init="zeros")
    assert RelPos.of(json.loads(json.dumps(spec.as_dict()))) == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tlx", "preset 'tlx' is unknown, expected one of none, bias, .*did you mean 'txl'"),
        ({"tabel": "joint"}, "field 'tabel' is unknown.*did you mean 'table'"),
        ({"terms": ["bias"], "table": "jont"}, "table 'jont' is unknown.*did you mean 'joint'"),
        ({"terms": "bias"}, r"terms 'bias' is a string, expected a list such as \['bias'\]"),
        ({"terms": ["bais"]}, "term 'bais' is unknown.*did you mean 'bias'"),
        ({"terms": ["v"]}, "term 'v' reads the table of 'query'; add 'query'"),
        ({"preset": "bias", "max_distance": -1}, "max_distance must be a number of patches or a pair"),
        ({"preset": "bias", "max_distance": [1, 2, 3]}, "max_distance must be a number of patches or a pair"),
        ({"preset": "bias", "init_std": "x"}, "init_std must be a number of at least 0, got 'x'"),
        ({"preset": "bias", "share_heads": 1}, "share_heads must be true or false, got 1"),
        ({"preset": "bias", "distance": "log"}, "distance 'log' is unknown"),
        ({"preset": "t5", "max_distance": 4}, "t5_log needs 0 < exact <= buckets and exact < max_distance"),
        ({"preset": "txl", "source": "mlp"}, "source='mlp' makes joint scalar tables"),
        ({"preset": "t5", "source": "sinusoid"}, "source='sinusoid' needs distance='clamp'"),
        ("rope+rope_mixed", "'rotary' and 'rotary_mixed' turn the same features"),
        ({"preset": "bias", "prefix": "beit"}, "prefix 'beit' is unknown, expected one of none, learned"),
        ({"preset": "bias", "resize": "bicubic"}, "resize 'bicubic' is unknown"),
        ({"preset": "bias", "table": "joint", "source": "sinusoid"}, "a sinusoid table is separable by construction"),
        ({"preset": 3}, "expected the name of a preset, got 3"),
        (3, "expected a name, a mapping or a RelPos, got 3"),
        ({"preset": "bias", "scale": "sums"}, "scale 'sums' is unknown"),
        ({"preset": "bias", "source": "learnt"}, "source 'learnt' is unknown"),
        ({"preset": "bias", "init": "zero"}, "init 'zero' is unknown.*did you mean 'zeros'"),
    ],
)
def test_mistakes_are_named_in_one_line(spec, message):
    with pytest.raises(ValueError, match=f"^rel_pos: {message}") as error:
        RelPos.of(spec)
    assert "\n" not in str(error.value)


def test_scales():
    assert RelPos.preset("txl+bias").scales(16) == {"content": 0.25, "bias": 1.0, "query": 0.25, "u": 0.25, "v": 0.25}
    assert RelPos.preset("sam").scales(16) == {"content": 0.25, "query": 1.0}
    assert RelPos.preset("deberta").scales(12) == {"content": 1 / 6, "query": 1 / 6, "key": 1 / 6}
    assert RelPos.preset("query", scale="deberta").scales(8) == {"content": 0.25, "query": 0.25}
    assert RelPos.preset("txl", scale="seed").scales(16) == {"content": 0.25, "query": 0.25, "u": 1.0, "v": 1.0}
    assert RelPos.preset("rope", scale="content").scales(16) == {"content": 0.25, "rotary": 0.25}


def test_distances_of_the_originals():
    (rows, cols) = RelPos.preset("t5").axes((4, 9))
    assert (rows.kind, rows.size, rows.exact, rows.buckets, rows.max_distance) == ("t5_log", 15, 8, 15, 128)
    assert rows == cols
    (rows, cols) = RelPos.preset("irpe_k").axes((4, 9))
    assert (rows.kind, rows.size, rows.exact, rows.buckets, rows.max_distance) == ("piecewise", 3, 1.9, 3.8, 15.2)
    assert rows == cols
    assert [a.size for a in RelPos.preset("bias").axes((4, 9))] == [3, 8]
    assert [a.entries for a in RelPos.preset("levit").axes((4, 9))] == [4, 9]


def test_parts_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"rel_pos: the parts of 'sam\+deberta' disagree on scale"):
        RelPos.preset("sam+deberta")
    assert RelPos.preset("sam+deberta", scale="sum").scales(4)["query"] == 0.5


def test_parameters_and_their_names():
    terms = PositionTerms(RelPos.preset("txl+bias"), dim=16, num_heads=2, head_dim=8, grid_size=(3, 5))
    assert {k: tuple(v.shape) for k, v in terms.state_dict().items()} == {
        "u": (2, 8),
        "v": (2, 8),
        "bias.table_h": (2, 5),
        "bias.table_w": (2, 9),
        "query.table_h": (2, 5, 8),
        "query.table_w": (2, 9, 8),
        "bias.trained": (2,),
        "query.trained": (2,),
    }


def test_default_initial_values():
    position = PositionTerms(RelPos.preset("txl+bias"), dim=16, num_heads=2, head_dim=8, grid_size=(3, 5))()
    assert not any(t.any() for t in [*position.tables["bias"], *position.vectors.values()])
    assert all(t.any() for t in position.tables["query"])


@pytest.mark.parametrize("source", ["learned", "sinusoid"])
@pytest.mark.parametrize("init", ["zeros", "normal"])
def test_chosen_initial_values(source, init):
    spec = RelPos.preset("txl+bias", source=source, init=init, init_std=0.5)
    position = PositionTerms(spec, dim=16, num_heads=2, head_dim=8, grid_size=(3, 5))()
    for tables in position.tables.values():
        assert all(bool(t.any()) == (init == "normal") for t in tables)


def test_reset_parameters_sets_vectors_to_zero():
    terms = PositionTerms(RelPos.preset("txl"), dim=16, num_heads=2, head_dim=8, grid_size=(3, 5))
    torch.nn.init.ones_(terms.u)
    terms.reset_parameters()
    assert not terms.u.any()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"terms": None}, "terms must be a list of names, got None"),
        ({"preset": "cpb", "mlp_hidden": 2.5}, "mlp_hidden must be a whole number of at least 1, got 2.5"),
        ({"preset": "bias", "max_distance": True}, "max_distance must be a number of patches or a pair"),
        ({"preset": "rope", "theta": 0}, "theta must be above 0, got 0"),
        ({"preset": "bias", "theta": 3}, "theta belongs to a rotary term"),
        ({"preset": "bias", "buckets": 3}, "buckets and exact belong to a logarithmic distance"),
        ({"preset": "bias", "init_std": float("inf")}, "init_std must be a number of at least 0, got inf"),
        ("sam+txl", "the parts of 'sam.txl' disagree on scale"),
        ("t5+swin", "the parts of 't5.swin' disagree on"),
        ("levit+txl", "the parts of 'levit.txl' disagree on"),
    ],
)
def test_settings_that_would_do_nothing_or_something_else_are_refused(spec, message):
    with pytest.raises(ValueError, match=f"^rel_pos: {message}"):
        RelPos.of(spec)
