import math

import pytest
import torch

from vitrel.grid import AxisDistance, Grid, Points, offsets


def test_tokens_are_row_major():
    assert Grid(2, 3).coords()[0].tolist() == [list(divmod(t, 3)) for t in range(6)]


def test_a_grid_may_start_elsewhere():
    assert Grid(2, 2, top=-2, left=1).coords()[0].tolist() == [[-2, 1], [-2, 2], [-1, 1], [-1, 2]]


def test_a_grid_of_one_row_or_column():
    assert Grid(1, 3).coords()[0].tolist() == [[0, 0], [0, 1], [0, 2]]
    assert Grid(3, 1).coords()[0].tolist() == [[0, 0], [1, 0], [2, 0]]


def test_offset_is_query_minus_key():
    assert offsets(torch.arange(3), torch.arange(2)).tolist() == [[0, -1], [1, 0], [2, 1]]


def test_points_need_a_pair_per_patch_and_sample():
    assert Points(torch.zeros(2, 5, 2)).patches == 5
    with pytest.raises(ValueError, match=r"coords: expected shape \(B, N, 2\), got \(5, 2\)"):
        Points(torch.zeros(5, 2))


def test_clamp_shares_the_last_entry():
    offset = torch.tensor([-5, -2, -1, 0, 1, 2, 5])
    assert AxisDistance("clamp", 2).index(offset).tolist() == [0, 0, 1, 2, 3, 4, 4]
    assert AxisDistance("clamp", 0).index(offset).tolist() == [0] * 7
    assert AxisDistance("clamp", 2, directed=False).index(offset).tolist() == [2, 2, 1, 0, 1, 2, 2]


def t5(offset, buckets, largest):
    """Bucket of a non-negative offset by T5's formula for one direction, with ``buckets`` buckets a side."""
    exact = buckets // 2
    if offset < exact:
        return offset
    log = exact + int(math.log(offset / exact) / math.log(largest / exact) * (buckets - exact))
    return min(log, buckets - 1)


def test_t5_log_distances():
    axis = AxisDistance("t5_log", 15, exact=8, buckets=15, max_distance=128)
    for offset in range(200):
        assert axis.index(torch.tensor([offset, -offset])).tolist() == [
            15 + t5(offset, 16, 128),
            15 - t5(offset, 16, 128),
        ]


def test_deberta_log_distances():
    """By hand for 8 buckets to 32: exact to 4, then 4 + ceil(3 ln(x/4) / ln(31/4))."""
    axis = AxisDistance("deberta_log", 8, exact=4, buckets=8, max_distance=32)
    assert axis.bucket(torch.tensor([0, 3, 4, 5, 7, 8, 16, 31, 99])).tolist() == [0, 3, 4, 5, 5, 6, 7, 7, 8]


@pytest.mark.parametrize(("exact", "buckets"), [(4, 16), (8, 32), (12, 16)])
def test_deberta_log_with_its_own_exact_reaches_its_last_bucket_at_max_distance(exact, buckets):
    axis = AxisDistance("deberta_log", buckets, exact=exact, buckets=buckets, max_distance=64)
    found = axis.bucket(torch.tensor([exact, 63, 64, 1000])).tolist()
    assert found == [exact, buckets - 1, buckets, buckets]


def test_piecewise_distances():
    """iRPE's (1.9, 3.8, 15.2): exact at 0 and 1, then round(1.9 + 1.9 ln(x/1.9) / ln 8), at most int(3.8)."""
    axis = AxisDistance("piecewise", 3, exact=1.9, buckets=3.8, max_distance=15.2)
    assert axis.bucket(torch.arange(8)).tolist() == [0, 1, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "axis",
    [
        AxisDistance("clamp", 4),
        AxisDistance("t5_log", 15, 8, 15, 128),
        AxisDistance("deberta_log", 8, 4, 8, 32),
        AxisDistance("piecewise", 3, 1.9, 3.8, 15.2),
    ],
    ids=lambda a: a.kind,
)
def test_every_map_is_odd_and_monotone_and_stays_in_its_table(axis):
    offset = torch.arange(-300, 301)
    index = axis.index(offset)
    assert (index.diff() >= 0).all()
    assert torch.equal(index - axis.size, -(index - axis.size).flip(0))
    assert (index.min(), index.max()) == (0, axis.entries - 1)
    assert index[300] == axis.size
