"""The kernel term a row of queries at a time against the reference: grids, masks, prefix tokens, second gradients."""

import pytest
import torch
from forms import CROSS, STRIP, compare, inputs, place
from test_blocked import Largest

from vitrel import kernel as module
from vitrel.grid import Grid
from vitrel.kernel import add_kernel

GRIDS = {"own": (Grid(4, 5), Grid(4, 5)), "strip": STRIP, "cross": CROSS, "row": (Grid(1, 5), Grid(1, 5))}


@pytest.fixture
def by_rows(monkeypatch):
    monkeypatch.setattr(module, "BY_ROWS_FROM", 0)


@pytest.mark.parametrize("mask", [None, "padding", "boolean", "additive"])
@pytest.mark.parametrize("grids", GRIDS)
@pytest.mark.parametrize("max_distance", [None, 2])
@pytest.mark.parametrize("backend", ["dense", "blocked"])
def test_rows_equal_the_reference(by_rows, backend, max_distance, grids, mask):
    terms = place("bias+kernel", (4, 5), max_distance=max_distance)
    compare(backend, terms, *GRIDS[grids], prefix=(1, 3), mask=mask)


def test_rows_differentiate_twice(by_rows):
    grid, terms = Grid(2, 3), place("kernel", (2, 3))
    _, _, v = inputs(6, 6)

    def attend(v, table):
        position = terms()
        position.tables["kernel"] = (table,)
        return add_kernel(torch.zeros_like(v), v, position, grid, grid)

    table = terms().tables["kernel"][0].detach().requires_grad_()
    assert torch.autograd.gradcheck(attend, (v, table))
    assert torch.autograd.gradgradcheck(attend, (v, table))


def test_a_large_grid_holds_no_weights_of_all_pairs():
    grid, terms = Grid(24, 20), place("kernel", (24, 20))
    _, _, v = inputs(grid.patches, grid.patches, batch=1)
    with Largest() as largest:
        add_kernel(torch.zeros_like(v), v, terms(), grid, grid).sum().backward()
    assert 0 < largest.numbers < grid.patches**2 / 2
    assert terms.kernel.table.grad.abs().sum() > 0


def test_no_images(by_rows):
    grid, terms = Grid(4, 5), place("kernel", (4, 5))
    _, _, v = inputs(20, 20, batch=0)
    out = add_kernel(torch.zeros_like(v), v, terms(), grid, grid)
    out.sum().backward()
    assert (out.shape, v.grad.shape) == (v.shape, v.shape)


def test_half_precision_keeps_the_type_and_sums_in_float(by_rows):
    grid, terms = Grid(9, 9), place("kernel", (9, 9))
    _, _, v = (t.detach() for t in inputs(81, 81))
    exact = add_kernel(torch.zeros_like(v), v, terms(), grid, grid)
    with torch.no_grad():
        terms.to(torch.bfloat16)
    half = v.bfloat16().requires_grad_()
    out = add_kernel(torch.zeros_like(half), half, terms(), grid, grid)
    out.float().sum().backward()
    assert {out.dtype, half.grad.dtype, terms.kernel.table.grad.dtype} == {torch.bfloat16}
    torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item())
