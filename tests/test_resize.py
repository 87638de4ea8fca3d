"""Tables that follow another grid: what each rule keeps."""

import math

import pytest
import torch

from vitrel.grid import AxisDistance
from vitrel.resize import RESIZE, resize_table


def axes(rows, cols, **kwargs):
    return AxisDistance("clamp", rows, **kwargs), AxisDistance("clamp", cols, **kwargs)


@pytest.mark.parametrize("rule", RESIZE)
def test_resize_to_the_same_size_is_the_same_tensor(rule):
    table = torch.randn(2, 5, 9)
    assert resize_table(table, axes(2, 4), axes(2, 4), rule) is table


@pytest.mark.parametrize("sizes", [(2, 4), (5, 11), (7, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("rule", RESIZE)
def test_zero_offset_stays_the_centre(rule, sizes):
    table = torch.randn(2, 7, 11, 3)
    new = resize_table(table, axes(3, 5), axes(*sizes), rule)
    assert new.shape == (2, 2 * sizes[0] + 1, 2 * sizes[1] + 1, 3)
    assert torch.equal(new[:, sizes[0], sizes[1]], table[:, 3, 5])


def test_clamp_and_crop_keep_entries_at_their_offsets():
    table = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]])
    for rule in ("clamp", "crop"):
        (grown,), (cut,) = (resize_table(table, axes(2, 0)[:1], axes(k, 0)[:1], rule) for k in (4, 1))
        assert grown.tolist() == [-2.0, -2.0, -2.0, -1.0, 0.0, 1.0, 2.0, 2.0, 2.0]
        assert cut.tolist() == [-1.0, 0.0, 1.0]


def test_interpolate_keeps_corners_and_a_linear_field():
    table = torch.linspace(-7, 7, 15)[None, :, None] + 10 * torch.linspace(-3, 3, 7)[None, None]
    new = resize_table(table, axes(7, 3), axes(11, 5), "interpolate")
    expected = torch.linspace(-7, 7, 23)[None, :, None] + 10 * torch.linspace(-3, 3, 11)[None, None]
    torch.testing.assert_close(new, expected)


def test_geometric_keeps_near_entries_and_stretches_far_ones():
    """BEiT's grid from K=3 to K=6: places 0, 1, 1+q, 1+q+q² = 6 with q² + q = 5."""
    q = (-1 + math.sqrt(21)) / 2
    table = torch.tensor([[-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    (new,) = resize_table(table, axes(3, 0)[:1], axes(6, 0)[:1], "geometric")
    expected = [0.0, 1.0, 1 + 1 / q, 2 + (2 - q) / q**2, 2 + (3 - q) / q**2, 2 + (4 - q) / q**2, 3.0]
    torch.testing.assert_close(new[6:], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(new, -new.flip(0), rtol=0, atol=1e-12)


def over_keys(table, directed):
    """What a query in the middle of a large grid sums: an undirected entry stands for Δ and -Δ."""
    if directed:
        return table.sum((1, 2))
    once = table[:, 0] + 2 * table[:, 1:].sum(1)
    return once[:, 0] + 2 * once[:, 1:].sum(1)


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("sizes", [(7, 9), (4, 8), (2, 3), (13, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("rule", ["interpolate", "geometric"])
@pytest.mark.parametrize("kind", ["random", "peak"])
def test_weights_of_a_sum_keep_their_sum(kind, rule, sizes, directed):
    """Whatever the table; geometric cuts the far end off a smaller grid, as it does with other tables."""
    old, new = axes(4, 6, directed=directed), axes(*sizes, directed=directed)
    entries = [axis.entries for axis in old]
    table = torch.randn(2, *entries, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if kind == "peak":  # at the centre, as trained kernels have it
        table = torch.zeros_like(table)
        table[:, entries[0] // 2 if directed else 0, entries[1] // 2 if directed else 0] = 1
    kept = resize_table(table, old, new, rule, sums=True)
    assert kept.shape == (2, *(axis.entries for axis in new))
    if kind == "peak" or rule == "interpolate" or sizes in [(7, 9), (4, 8)]:
        torch.testing.assert_close(over_keys(kept, directed), over_keys(table, directed))
    if directed:
        flipped = resize_table(table.flip(1, 2), old, new, rule, sums=True)
        torch.testing.assert_close(flipped, kept.flip(1, 2))


@pytest.mark.parametrize("rule", RESIZE)
def test_a_kernel_of_one_row_survives_more_rows(rule):
    table = torch.tensor([[[1.0, 2.0, 4.0]]])
    new = resize_table(table, axes(0, 1), axes(2, 1), rule, sums=True)
    assert new.sum(1).tolist() == [pytest.approx([1, 2, 4])]


def test_weights_of_a_sum_are_zero_where_clamp_repeats_the_last_entry():
    table = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    (grown,), (cut,) = (resize_table(table, axes(2, 0)[:1], axes(k, 0)[:1], "clamp", sums=True) for k in (4, 1))
    assert grown.tolist() == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0]
    assert cut.tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", RESIZE)
def test_half_precision_tables_resize(rule, dtype):
    table = torch.randn(2, 5, 9).to(dtype)
    new = resize_table(table, axes(2, 4), axes(6, 3), rule)
    assert new.dtype == dtype
    assert torch.equal(new, resize_table(table.float(), axes(2, 4), axes(6, 3), rule).to(dtype))
