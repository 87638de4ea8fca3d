import json

import pytest
import torch

from vitrel.relpos import PRESETS, PositionTerms, RelPos


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
    spec = RelPos.preset(name, max_distance=(2, 3), init="zeros")
    assert RelPos.of(json.loads(json.dumps(spec.as_dict()))) == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tlx", "preset 'tlx' is unknown, expected one of none, bias, txl.*did you mean 'txl'"),
        ({"tabel": "joint"}, "field 'tabel' is unknown.*did you mean 'table'"),
        ({"terms": ["bias"], "table": "jont"}, "table 'jont' is unknown.*did you mean 'joint'"),
        ({"terms": "bias"}, r"terms 'bias' is a string, expected a list such as \['bias'\]"),
        ({"terms": ["bais"]}, "term 'bais' is unknown.*did you mean 'bias'"),
        ({"terms": ["v"]}, "term 'v' reads the table of 'query'; add 'query'"),
        ({"preset": "bias", "max_distance": -1}, "max_distance must be a number of patches or a pair"),
        ({"preset": "bias", "max_distance": [1, 2, 3]}, "max_distance must be a number of patches or a pair"),
        ({"preset": "bias", "init_std": "x"}, "init_std must be at least 0, got 'x'"),
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
    assert RelPos.preset("txl", scale="content").scales(16) == {"content": 0.25, "query": 1.0, "u": 1.0, "v": 1.0}


def test_parameters_and_their_names():
    terms = PositionTerms(RelPos.preset("txl+bias"), dim=16, num_heads=2, head_dim=8, grid_size=(3, 5))
    assert {k: tuple(v.shape) for k, v in terms.state_dict().items()} == {
        "u": (2, 8),
        "v": (2, 8),
        "bias.table_h": (2, 5),
        "bias.table_w": (2, 9),
        "query.table_h": (2, 5, 8),
        "query.table_w": (2, 9, 8),
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
