import torch

from vitrel.grid import Grid, clamp_index, offsets


def test_tokens_are_row_major():
    assert Grid(2, 3).coords().tolist() == [list(divmod(t, 3)) for t in range(6)]


def test_a_grid_may_start_elsewhere():
    assert Grid(2, 2, top=-2, left=1).coords().tolist() == [[-2, 1], [-2, 2], [-1, 1], [-1, 2]]


def test_a_grid_of_one_row_or_column():
    assert Grid(1, 3).coords().tolist() == [[0, 0], [0, 1], [0, 2]]
    assert Grid(3, 1).coords().tolist() == [[0, 0], [1, 0], [2, 0]]


def test_offset_is_query_minus_key():
    assert offsets(torch.arange(3), torch.arange(2)).tolist() == [[0, -1], [1, 0], [2, 1]]


def test_clamp_index_shares_the_last_entry():
    assert clamp_index(torch.tensor([-5, -2, -1, 0, 1, 2, 5]), 2).tolist() == [0, 0, 1, 2, 3, 4, 4]
    assert clamp_index(torch.tensor([-5, 0, 5]), 0).tolist() == [0, 0, 0]
