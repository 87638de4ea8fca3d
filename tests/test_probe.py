"""Rows of attention computed again are the rows of the readable reference, whatever form the model takes."""

import pytest
import timm
import torch

import vitrel
from vitrel.attend import masked_softmax
from vitrel.grid import Grid
from vitrel.probe import PAIRS, lattice, probes, scattered, split
from vitrel.relpos import PRESETS

SCHEMES = [*PRESETS, "txl+value+key", "rope+bias", "shaw+kernel"]


def model(rel_pos, **kwargs):
    torch.manual_seed(0)
    small = {"embed_dim": 24, "num_heads": 3, "depth": 2, "img_size": (12, 20), "num_classes": 3}
    made = timm.create_model("vitrel_micro_patch4_32", rel_pos=rel_pos, **{**small, **kwargs})
    for name in sorted(made.position_parameters()):
        torch.nn.init.normal_(made.get_parameter(name))
    return made


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_those_of_the_reference(scheme):
    net, pictures, queries = model(scheme, class_token=True, reg_tokens=1), torch.randn(2, 3, 12, 20), [0, 7, 14]
    inputs = {}
    for name in ("blocks.0", "blocks.1"):
        net.get_submodule(name).attn.register_forward_pre_hook(
            lambda m, args, name=name: inputs.update({name: args[0]})
        )
    found = probes(net, pictures)
    assert list(found) == ["blocks.0", "blocks.1"]
    for name, probe in found.items():
        expected = net.get_submodule(name).attn.terms(inputs[name])
        expected.pop("prefix", None)  # reaches no pair of patches
        rows = probe.terms(torch.tensor(queries))
        assert list(rows) == list(expected)
        for term, summand in rows.items():
            torch.testing.assert_close(summand, expected[term][:, :, 2:, 2:][:, :, queries], atol=1e-5, rtol=1e-4)


def test_a_rotary_embedding_of_the_model_counts_as_a_term():
    torch.manual_seed(0)
    net = timm.create_model("vit_base_patch16_rope_224", img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2)
    vitrel.relativize(net, "bias", init="normal")
    caught = {}
    net.blocks[0].attn.register_forward_pre_hook(
        lambda m, args, kwargs: caught.update(x=args[0], **kwargs), with_kwargs=True
    )
    probe = probes(net, torch.randn(1, 3, 32, 32))["blocks.0"]
    expected, prefix = net.blocks[0].attn.terms(caught["x"], caught["rope"]), net.num_prefix_tokens
    rows = probe.terms(torch.arange(16))
    assert set(rows) == set(expected) == {"content", "bias", "rotary"}
    for term, summand in rows.items():
        torch.testing.assert_close(summand, expected[term][:, :, prefix:, prefix:], atol=1e-6, rtol=1e-4)


def test_parts_of_the_attention():
    terms = {name: torch.randn(1, 2, 3, 6) for name in ("content", "query", "u", "bias")}
    parts = split(terms)
    torch.testing.assert_close(parts["both"], masked_softmax(sum(terms.values())))
    torch.testing.assert_close(parts["content"], masked_softmax(terms["content"] + terms["u"]))
    torch.testing.assert_close(parts["position"], masked_softmax(terms["query"] + terms["bias"]))
    assert split({"content": terms["content"]})["position"].eq(1 / 6).all()


@pytest.mark.parametrize("grid", [(1, 9), (7, 7), (8, 12), (64, 64), (37, 50)])
@pytest.mark.parametrize("at_most", [4, 30, 1000])
def test_a_lattice_has_the_corners_and_looks_the_same_from_every_side(grid, at_most):
    h, w = grid
    queries = lattice(Grid(h, w), at_most)
    rows, cols = queries // w, queries % w
    assert {0, w - 1, h * w - w, h * w - 1} <= set(queries.tolist())
    assert len(queries) <= max(at_most, 4) or min(grid) < 2
    assert queries.unique().numel() == len(queries)
    assert (rows.double().mean(), cols.double().mean()) == ((h - 1) / 2, (w - 1) / 2)
    if h * w <= at_most:
        assert len(queries) == h * w


def test_scattered_queries_see_every_offset():
    for grid in (Grid(7, 5), Grid(64, 64), Grid(30, 100)):
        queries = scattered(grid)
        assert {0, grid.cols - 1, grid.patches - grid.cols, grid.patches - 1} <= set(queries.tolist())
        assert queries.unique().numel() == len(queries) <= 4 + PAIRS // grid.patches
        assert torch.equal(queries, scattered(grid))


def test_modules_keep_their_modes_and_no_hook_stays():
    net = model("txl").train()
    net.blocks[1].eval()
    before = [m.training for m in net.modules()]
    probes(net, torch.randn(1, 3, 12, 20))
    assert [m.training for m in net.modules()] == before
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_a_padded_batch_is_refused():
    net = timm.create_model("naflexvit_base_patch16_gap", embed_dim=24, depth=1, num_heads=2, num_classes=3)
    vitrel.relativize(net, "bias")
    batch = {
        "patches": torch.randn(1, 6, 16 * 16 * 3),
        "patch_coord": torch.cartesian_prod(torch.arange(2), torch.arange(3))[None],
        "patch_valid": torch.ones(1, 6, dtype=torch.bool),
    }

    class Padded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, pictures):
            return self.net(batch)

    with pytest.raises(ValueError, match="expected pictures whose patches fill one grid, got a padded batch"):
        probes(Padded(), torch.zeros(1))
