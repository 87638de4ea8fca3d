import math

import pytest
import torch

from vitrel.computed import MlpTable, SinusoidTable
from vitrel.grid import AxisDistance, Grid
from vitrel.learned import LearnedTable
from vitrel.lookup import axis_lookup, lookup
from vitrel.resize import resize_table


def axes(rows, cols, **kwargs):
    return AxisDistance("clamp", rows, **kwargs), AxisDistance("clamp", cols, **kwargs)


def offsets_of(q_grid, k_grid):
    return (q_grid.coords()[:, :, None] - k_grid.coords()[:, None]).unbind(-1)


def test_shapes_of_learned_tables():
    assert [tuple(t.shape) for t in LearnedTable(4, axes(2, 5))()] == [(4, 5), (4, 11)]
    assert [tuple(t.shape) for t in LearnedTable(4, axes(2, 5), 8)()] == [(4, 5, 8), (4, 11, 8)]
    assert [tuple(t.shape) for t in LearnedTable(4, axes(2, 5), joint=True)()] == [(4, 5, 11)]
    assert [tuple(t.shape) for t in LearnedTable(4, axes(2, 5), 8, joint=True)()] == [(4, 5, 11, 8)]
    assert [tuple(t.shape) for t in LearnedTable(4, axes(2, 5, directed=False))()] == [(4, 3), (4, 6)]


def test_names_of_learned_tables():
    assert list(LearnedTable(1, axes(1, 1)).state_dict()) == ["table_h", "table_w", "trained"]
    assert list(LearnedTable(1, axes(1, 1), joint=True).state_dict()) == ["table", "trained"]
    undirected = LearnedTable(1, axes(1, 1, directed=False), joint=True)
    assert list(undirected.state_dict()) == ["table", "trained", "offset_h", "offset_w"]


def test_joint_lookup_on_a_grid_with_unequal_sides_reads_every_entry_once_per_offset():
    table = LearnedTable(1, axes(2, 4), joint=True)
    with torch.no_grad():
        table.table.copy_(torch.arange(45.0).reshape(1, 5, 9))
    read = lookup(table(), table.axes, *offsets_of(Grid(3, 5), Grid(3, 5)))[0, 0]
    for i in range(15):
        for j in range(15):
            (yi, xi), (yj, xj) = divmod(i, 5), divmod(j, 5)
            assert read[i, j] == (yi - yj + 2) * 9 + (xi - xj + 4)
    assert len(read.unique()) == 45


def test_separable_lookup_sums_the_axes_and_clamps():
    rows, cols = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[10.0, 20.0, 40.0]])
    read = lookup((rows, cols), axes(1, 1), torch.tensor([[-1, 0, 1, 7]]), torch.tensor([[0, -3, 1, 1]]))
    assert read.tolist() == [[[21.0, 12.0, 44.0, 44.0]]]


@pytest.mark.parametrize("directed", [True, False])
def test_axis_lookup_equals_lookup(directed):
    table = LearnedTable(2, axes(1, 4, directed=directed), 3, init_std=1.0)
    q_grid, k_grid = Grid(3, 5), Grid(2, 4, top=-2, left=1)
    rows, cols = axis_lookup(table(), table.axes, q_grid, k_grid)
    full = lookup(table(), table.axes, *offsets_of(q_grid, k_grid))[0].reshape(2, 3, 5, 2, 4, 3)
    torch.testing.assert_close(rows[:, :, None, :, None] + cols[:, None, :, None], full)


def test_sinusoid_table_is_the_projection_of_signed_distances():
    table = SinusoidTable(2, axes(1, 2), 3, sinusoid_width=4, init_std=1.0, dtype=torch.float64)
    rows, cols = table()
    assert rows.shape == (2, 3, 3)
    assert cols.shape == (2, 5, 3)
    r = [math.sin(-2.0), math.sin(-0.02), math.cos(-2.0), math.cos(-0.02)]
    expected = (table.proj_w @ torch.tensor(r, dtype=torch.float64)).reshape(2, 3)
    torch.testing.assert_close(cols[:, 0], expected, rtol=0, atol=1e-12)


def test_sinusoid_needs_an_even_width():
    with pytest.raises(ValueError, match="sinusoid_width: expected an even number, got 5"):
        SinusoidTable(1, axes(1, 1), sinusoid_width=5)


def test_mlp_table_on_a_side_of_one_is_finite_and_grows_with_the_grid():
    table = MlpTable(3, axes(0, 4), hidden=8)
    assert table()[0].shape == (3, 1, 9)
    assert table()[0].isfinite().all()
    assert ((table()[0] > 0) & (table()[0] < 16)).all()
    table.set_axes(axes(2, 6))
    assert table()[0].shape == (3, 5, 13)


@pytest.mark.parametrize("coords", ["swin", "cr"])
def test_an_mlp_is_asked_where_a_table_would_be_read(coords):
    def entry(table, dy, dx, sides=(4, 3)):
        y, x = torch.tensor([dy, dx], dtype=torch.float64)
        place = torch.stack([table._log_coords(y, sides[0]), table._log_coords(x, sides[1])])
        out = table.mlp(place)
        return 16 * out.sigmoid() if coords == "swin" else out

    for rule in ("interpolate", "geometric", "clamp", "crop"):
        table = MlpTable(2, axes(3, 2), coords=coords, hidden=8, resize=rule, dtype=torch.float64)
        (before,) = table()
        torch.testing.assert_close(before[:, 4, 0], entry(table, 1, -2))
        (wide,) = table(axes(6, 4))
        if rule == "interpolate":
            torch.testing.assert_close(wide[:, ::2, ::2], before)
            torch.testing.assert_close(wide[:, 7, 1], entry(table, 0.5, -1.5))
        elif rule == "geometric":
            torch.testing.assert_close(wide[:, ::6, ::4], before[:, ::3, ::2])
        else:
            torch.testing.assert_close(wide[:, 3:-3, 2:-2], before)
            torch.testing.assert_close(wide[:, 12, 0], entry(table, 6, -4))
        table.set_axes(axes(6, 4))
        assert torch.equal(table()[0], wide)


@pytest.mark.parametrize("rule", ["interpolate", "geometric", "clamp"])
@pytest.mark.parametrize("make", [MlpTable, lambda *given, **more: SinusoidTable(*given, sinusoid_width=8, **more)])
def test_beyond_its_own_axes_a_computed_table_goes_on_as_it_is(make, rule):
    table = make(2, axes(2, 2), resize=rule, dtype=torch.float64)
    table.set_axes(axes(4, 5))
    for own, far in zip(table(), table(axes(6, 5), stretch=False), strict=True):
        rows = 13 if far.shape[1] == 13 else 11
        inner = far[:, 2:-2] if rows == 13 else far
        torch.testing.assert_close(inner, own, rtol=0, atol=1e-12)
    if rule == "interpolate":
        assert table.places(6, 2, 4, torch.device("cpu")).tolist() == [n / 2 for n in range(-6, 7)]


def test_initial_values():
    assert not any(t.any() for t in LearnedTable(2, axes(3, 3), 4)())
    assert all(0 < t.std() < 0.05 for t in LearnedTable(2, axes(3, 3), 4, init_std=0.02)())


def test_a_table_of_another_grid_is_resized_at_load():
    small, large = LearnedTable(2, axes(2, 4), joint=True, init_std=1.0), LearnedTable(2, axes(3, 6), joint=True)
    large.load_state_dict(small.state_dict())
    assert torch.equal(large.table, resize_table(small.table, axes(2, 4), axes(3, 6), "clamp"))


@pytest.mark.parametrize(
    "stored",
    [torch.zeros(3, 5, 9), torch.zeros(2, 45), torch.zeros(2, 4, 9), torch.zeros(2, 5, 9, 1)],
    ids=lambda t: str(tuple(t.shape)),
)
def test_a_wrong_table_is_refused_by_name_and_shape(stored):
    table = torch.nn.ModuleDict({"bias": LearnedTable(2, axes(2, 5), joint=True)})
    with pytest.raises(RuntimeError, match=r"bias\.table: the stored table has shape \(.*expected \(2, 5, 11\)"):
        table.load_state_dict({"bias.table": stored})


def test_a_table_with_logarithmic_buckets_is_never_resized():
    log = AxisDistance("t5_log", 15, 8, 15, 128)
    table = LearnedTable(2, (log, log))
    with pytest.raises(RuntimeError, match="the stored table has shape"):
        table.load_state_dict({"table_h": torch.zeros(2, 15), "table_w": torch.zeros(2, 31)})


PIECEWISE = AxisDistance("piecewise", 3, 1.9, 3.8, 15.2)


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        (AxisDistance("clamp", 3), [-3, -2, -1, 0, 1, 2, 3]),
        (AxisDistance("clamp", 3, directed=False), [0, 1, 2, 3]),
        (PIECEWISE, [-4, -2, -1, 0, 1, 2, 4]),
        (AxisDistance("t5_log", 5, 3, 5, 20), [-11, -6, -3, -2, -1, 0, 1, 2, 3, 6, 11]),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_entry_offsets_are_the_nearest_ones_that_read_each_entry(kind, entries):
    assert kind.entry_offsets().tolist() == entries
    every = torch.arange(-40, 41)
    for entry, offset in enumerate(entries):
        reading = every[kind.index(every) == entry]
        assert reading.abs().min() == abs(offset)
        assert offset in reading


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    ("stored", "own"),
    [
        (PIECEWISE, AxisDistance("clamp", 3)),
        (AxisDistance("clamp", 3), PIECEWISE),
        (AxisDistance("clamp", 6, directed=False), AxisDistance("clamp", 3)),
        (AxisDistance("clamp", 3), AxisDistance("clamp", 6, directed=False)),
        (PIECEWISE, AxisDistance("clamp", 9)),
        (AxisDistance("t5_log", 3, 1, 3, 16), PIECEWISE),
    ],
    ids=lambda axis: f"{axis.kind}{axis.size}{'' if axis.directed else 'u'}",
)
def test_a_table_of_another_distance_map_is_refused_though_its_shape_fits(stored, own, joint):
    state = LearnedTable(2, (stored, stored), joint=joint, init_std=1.0).state_dict()
    LearnedTable(2, (stored, stored), joint=joint).load_state_dict(state)
    table = LearnedTable(2, (own, own), joint=joint, init_std=1.0)
    before = [p.clone() for p in table.parameters()]
    with pytest.raises(
        RuntimeError, match=r"table.*: the stored table has entries for the offsets .* another distance"
    ):
        table.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, table.parameters(), strict=True))


def test_a_state_of_entries_alone_loads_as_wholly_trained():
    table = LearnedTable(2, axes(4, 4))
    state = {"table_h": torch.randn(2, 5), "table_w": torch.randn(2, 9)}
    assert not any(table.load_state_dict(state))
    assert table.trained.tolist() == [2, 4]
    assert table.load_state_dict({}, strict=False).missing_keys == ["table_h", "table_w"]
    with torch.device("meta"):
        empty = LearnedTable(2, axes(2, 4))
    empty.load_state_dict(state, assign=True)
    assert empty.trained.tolist() == [2, 4]
