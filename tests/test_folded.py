"""The fold against the reference: grids, points, prefix tokens, masks, and no tensor of all pairs."""

import pytest
import torch
from forms import CROSS, EVERYTHING, HEADS, STRIP, WIDTH, compare, inputs, place
from test_blocked import Largest

from vitrel.attend import reference
from vitrel.backends import BACKENDS
from vitrel.folded import folded
from vitrel.grid import Grid, Points

SCHEMES = {
    "bias": "bias",
    "txl": "txl",
    "shaw": "shaw",
    "deberta": "deberta",
    "key and rotary": "key+rope_mixed+u",
    "all": EVERYTHING,
    "t5": "t5",
    "levit": {"preset": "bias", "directed": False},
}


@pytest.mark.parametrize("mask", [None, "padding", "boolean", "additive"])
@pytest.mark.parametrize("prefix", [(0, 0), (1, 1), (0, 5)], ids=str)
@pytest.mark.parametrize("grids", [STRIP, CROSS, (Grid(1, 7), Grid(1, 7))], ids=["strip", "cross", "line"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_fold_equals_the_reference(scheme, grids, prefix, mask):
    compare("folded", place(SCHEMES[scheme], (6, 5)), *grids, prefix, mask)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_points_of_pictures_with_grids_of_their_own(scheme, prefix):
    """Two pictures, 3x4 and 2x5, padded to 12 patches; what padding holds changes nothing."""
    sizes, coords = [(3, 4), (2, 5)], torch.zeros(2, 12, 2, dtype=torch.long)
    for i, (h, w) in enumerate(sizes):
        coords[i, : h * w] = Grid(h, w).coords()[0]
    terms = place(SCHEMES[scheme], (6, 5))
    compare("folded", terms, Points(coords), Points(coords), (prefix, prefix))
    position, (q, k, v) = terms(), inputs(prefix + 12, prefix + 12)
    garbage = coords.clone()
    garbage[1, 10:] = 10**9
    where = Points(garbage, box=Grid(3, 5))
    mask = torch.arange(prefix + 12) < prefix + torch.tensor([12, 10])[:, None]
    out = BACKENDS["folded"](q, k, v, position, where, where, mask[:, None, None])
    for i, (h, w) in enumerate(sizes):
        n, grid = prefix + h * w, Grid(h, w)
        alone = reference(q[i : i + 1, :, :n], k[i : i + 1, :, :n], v[i : i + 1, :, :n], position, grid, grid)
        torch.testing.assert_close(out[i : i + 1, :, :n], alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("scheme", ["bias", "txl", "shaw", "deberta"])
def test_nothing_of_all_pairs_is_built(scheme):
    grid = Grid(16, 12)
    q, k, v = (t.detach().requires_grad_() for t in inputs(grid.patches, grid.patches, batch=1))
    terms = place(scheme, (16, 12))
    with Largest() as largest:
        folded(q, k, v, terms(), grid, grid).sum().backward()
    assert largest.numbers <= 2 * HEADS * grid.patches * (WIDTH + 3 * (16 + 12))
    assert largest.numbers < HEADS * grid.patches**2
