"""The form with its softmax written out, against the reference."""

import pytest
import torch
from forms import CROSS, EVERYTHING, STRIP, compare, inputs, place

from vitrel.attend import reference
from vitrel.backends import BACKENDS
from vitrel.grid import Grid, Points
from vitrel.written import written

SCHEMES = {
    "bias": "bias",
    "txl": "txl",
    "shaw": "shaw",
    "deberta": "deberta",
    "bias and key": "bias+key",
    "turned": "rope_mixed+txl+key",
    "rope+u": "rope+u",
    "all": EVERYTHING,
    "none": "none",
    "joint": {"preset": "txl+key", "table": "joint"},
    "irpe_qk": "irpe_qk",
    "beit": "beit",
}


@pytest.mark.parametrize("mask", [None, "padding", "boolean", "additive"])
@pytest.mark.parametrize("prefix", [(0, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("grids", [STRIP, CROSS], ids=["strip", "cross"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_equals_the_reference(scheme, grids, prefix, mask):
    compare("written", place(SCHEMES[scheme], (6, 5)), *grids, prefix, mask)


@pytest.mark.parametrize("scheme", ["bias", "txl", "deberta", "joint"])
def test_points(scheme):
    coords = torch.randint(0, 5, (2, 9, 2), generator=torch.Generator().manual_seed(3))
    compare("written", place(SCHEMES[scheme], (6, 5)), Points(coords), Points(coords), (1, 1), "padding")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inference_is_the_same_to_rounding(scheme):
    """Without gradients it reuses one buffer for the weights of all heads."""
    grid, terms = Grid(3, 5), place(SCHEMES[scheme], (3, 5))
    q, k, v = inputs(17, 17)
    with torch.no_grad():
        out = BACKENDS["written"](q, k, v, terms(), grid, grid)
        torch.testing.assert_close(out, reference(q, k, v, terms(), grid, grid), rtol=0, atol=1e-11)
    with torch.inference_mode():
        written(q, k, v, terms(), grid, grid)
    written(q, k, v, terms(), grid, grid).sum().backward()  # the kept index tables serve both
    assert q.grad.isfinite().all()


def test_what_it_cannot_serve_is_refused():
    grid = Grid(3, 5)
    with pytest.raises(ValueError, match="'written' has no attention dropout; use backend='auto'"):
        written(*inputs(15, 15), place("bias", (3, 5))(), grid, grid, None, 0.1)
    points = Points(grid.coords().expand(2, -1, -1))
    with pytest.raises(ValueError, match="'written' needs separable tables on full grids for a value term"):
        written(*inputs(15, 15), place("shaw", (3, 5))(), points, points)


def test_autocast_gives_the_half_type_and_gradients_in_the_parameters_own():
    terms, grid = place("txl+value", (3, 5)).float(), Grid(3, 5)
    q, k, v = (t.detach().bfloat16().requires_grad_() for t in inputs(15, 15))
    with torch.autocast("cpu", torch.bfloat16):
        out = written(q, k, v, terms(), grid, grid)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert (q.grad.dtype, terms.query.table_h.grad.dtype) == (torch.bfloat16, torch.float32)
