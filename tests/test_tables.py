import math

import pytest
import torch

from vitrel.grid import Grid
from vitrel.tables import LearnedTable, SinusoidTable, axis_lookup, lookup, table_distance


def test_shapes_of_learned_tables():
    assert [tuple(t.shape) for t in LearnedTable(4, (2, 5))()] == [(4, 5), (4, 11)]
    assert [tuple(t.shape) for t in LearnedTable(4, (2, 5), 8)()] == [(4, 5, 8), (4, 11, 8)]
    assert [tuple(t.shape) for t in LearnedTable(4, (2, 5), joint=True)()] == [(4, 5, 11)]
    assert [tuple(t.shape) for t in LearnedTable(4, (2, 5), 8, joint=True)()] == [(4, 5, 11, 8)]


def test_names_of_learned_tables():
    assert list(LearnedTable(1, (1, 1)).state_dict()) == ["table_h", "table_w"]
    assert list(LearnedTable(1, (1, 1), joint=True).state_dict()) == ["table"]


@pytest.mark.parametrize("joint", [False, True])
def test_distance_is_read_off_the_shape(joint):
    assert table_distance(LearnedTable(2, (2, 5), joint=joint)()) == (2, 5)


def test_joint_lookup_on_a_grid_with_unequal_sides_reads_every_entry_once_per_offset():
    table = LearnedTable(1, (2, 4), joint=True)
    with torch.no_grad():
        table.table.copy_(torch.arange(45.0).reshape(1, 5, 9))
    coords = Grid(3, 5).coords()
    dh, dw = (coords[:, None] - coords[None]).unbind(-1)
    read = lookup(table(), dh, dw)[0]
    for i in range(15):
        for j in range(15):
            (yi, xi), (yj, xj) = divmod(i, 5), divmod(j, 5)
            assert read[i, j] == (yi - yj + 2) * 9 + (xi - xj + 4)
    assert len(read.unique()) == 45


def test_separable_lookup_sums_the_axes_and_clamps():
    rows, cols = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[10.0, 20.0, 40.0]])
    read = lookup((rows, cols), torch.tensor([-1, 0, 1, 7]), torch.tensor([0, -3, 1, 1]))
    assert read.tolist() == [[21.0, 12.0, 44.0, 44.0]]


def test_axis_lookup_equals_lookup():
    table = LearnedTable(2, (1, 4), 3, init_std=1.0)
    q_grid, k_grid = Grid(3, 5), Grid(2, 4, top=-2, left=1)
    rows, cols = axis_lookup(table(), q_grid, k_grid)
    dh, dw = (q_grid.coords()[:, None] - k_grid.coords()[None]).unbind(-1)
    full = lookup(table(), dh, dw).reshape(2, 3, 5, 2, 4, 3)
    torch.testing.assert_close(rows[:, :, None, :, None] + cols[:, None, :, None], full)


def test_sinusoid_table_is_the_projection_of_signed_distances():
    table = SinusoidTable(2, (1, 2), 3, sinusoid_width=4, init_std=1.0, dtype=torch.float64)
    rows, cols = table()
    assert rows.shape == (2, 3, 3)
    assert cols.shape == (2, 5, 3)
    r = [math.sin(-2.0), math.sin(-0.02), math.cos(-2.0), math.cos(-0.02)]
    expected = (table.proj_w @ torch.tensor(r, dtype=torch.float64)).reshape(2, 3)
    torch.testing.assert_close(cols[:, 0], expected, rtol=0, atol=1e-12)


def test_sinusoid_needs_an_even_width():
    with pytest.raises(ValueError, match="sinusoid_width: expected an even number, got 5"):
        SinusoidTable(1, (1, 1), sinusoid_width=5)


@pytest.mark.parametrize("make", [lambda std: LearnedTable(2, (3, 3), 4, init_std=std)])
def test_initial_values(make):
    assert not any(t.any() for t in make(0.0)())
    assert all(0 < t.std() < 0.05 for t in make(0.02)())
