"""The blocked form: several blocks over samples, heads and rows, against the reference."""

import pytest
import torch
from forms import CROSS, EVERYTHING, HEADS, STRIP, WIDTH, compare, inputs, place
from torch.utils._python_dispatch import TorchDispatchMode

from vitrel import blocked as module
from vitrel.blocked import block_numbers, blocked
from vitrel.grid import Grid

GRID = Grid(4, 5)
SCHEMES = {
    "bias": "bias",
    "txl": "txl",
    "shaw": "shaw",
    "key": "key",
    "bias+key": "bias+key",
    "deberta": "deberta",
    "all": EVERYTHING,
}


@pytest.fixture(params=["one row of one head", "two rows", "one sample", "all"])
def small_blocks(request, monkeypatch):
    one = 4 * GRID.cols * GRID.patches
    limits = {"one row of one head": (1, 1), "two rows": (10, 1 << 20), "one sample": (999, one * 4 * HEADS)}
    queries, size = limits.get(request.param, (1 << 20, 1 << 30))
    monkeypatch.setattr(module, "BLOCK_QUERIES", queries)
    monkeypatch.setattr(module, "BLOCK_BYTES", size)


@pytest.mark.parametrize("mask", [None, "padding", "boolean", "additive"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_of_every_size_equal_the_reference(small_blocks, scheme, prefix, mask):
    compare("blocked", place(SCHEMES[scheme], (4, 5), max_distance=3), GRID, GRID, (prefix, prefix), mask)


@pytest.mark.parametrize("grids", [STRIP, CROSS], ids=["strip", "cross"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_keys_on_another_grid(small_blocks, scheme, grids):
    compare("blocked", place(SCHEMES[scheme], (6, 5)), *grids, prefix=(1, 3), mask="padding")


@pytest.mark.parametrize("scheme", ["none", "rope", "rope+u", "rope+txl"])
def test_schemes_that_turn_the_content(small_blocks, scheme):
    compare("blocked", place(scheme, (4, 5)), GRID, GRID, (1, 1), "boolean")


def test_a_run_of_half_precision_keeps_the_type():
    terms = place("txl+value", (4, 5)).to(torch.bfloat16)
    q, k, v = (t.detach().bfloat16().requires_grad_() for t in inputs(20, 20))
    out = blocked(q, k, v, terms(), GRID, GRID)
    out.float().sum().backward()
    assert {out.dtype, q.grad.dtype, terms.query.table_h.grad.dtype} == {torch.bfloat16}


def test_dropout_is_refused():
    with pytest.raises(ValueError, match="'blocked' has no attention dropout; use backend='auto'"):
        blocked(*inputs(20, 20), place("bias", (4, 5))(), GRID, GRID, None, 0.1)


class Largest(TorchDispatchMode):
    """The most numbers that any operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "all"])
def test_nothing_of_all_pairs_is_built(monkeypatch, scheme):
    grid = Grid(16, 12)
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 12 * grid.patches)
    q, k, v = (t.detach().requires_grad_() for t in inputs(grid.patches, grid.patches, batch=1))
    terms = place(scheme, (16, 12))
    with Largest() as largest:
        blocked(q, k, v, terms(), grid, grid).sum().backward()
    profiles = HEADS * grid.patches * max(16, 12, WIDTH)
    assert largest.numbers <= max(profiles, HEADS * 16 * 16 * WIDTH, block_numbers(grid, grid.patches))
    assert largest.numbers < HEADS * grid.patches**2 / 4
