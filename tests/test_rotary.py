import pytest
import torch

from vitrel.grid import Grid
from vitrel.rotary import AxialFrequencies, MixedFrequencies, rotate


def test_axial_frequencies_turn_columns_first():
    rows, cols = AxialFrequencies(8, theta=100.0)()
    torch.testing.assert_close(cols[0], torch.tensor([1.0, 0.1, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(rows[0], torch.tensor([0.0, 0.0, 1.0, 0.1], dtype=torch.float64))


def test_mixed_frequencies_start_as_two_sets_at_right_angles():
    rows, cols = MixedFrequencies(3, 8, theta=100.0)()
    magnitude = (rows.square() + cols.square()).sqrt()
    torch.testing.assert_close(magnitude, torch.tensor([1.0, 0.1, 1.0, 0.1]).expand(3, -1))
    inner = rows[:, :2] * rows[:, 2:] + cols[:, :2] * cols[:, 2:]
    torch.testing.assert_close(inner, torch.zeros(3, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [AxialFrequencies, lambda width: MixedFrequencies(2, width)])
def test_rotary_needs_pairs_for_both_axes(make):
    with pytest.raises(ValueError, match="rotary: the width of a head must be a multiple of 4, got 6"):
        make(6)


def test_rotation_by_hand():
    """One head of width 4 on a 2x2 grid: the first pair turns with the column, the second with the row."""
    x = torch.tensor([1.0, 0.0, 1.0, 0.0]).expand(1, 1, 5, 4)
    turned = rotate(x, AxialFrequencies(4)(), Grid(2, 2))[0, 0]
    right, down = torch.tensor(1.0).cos(), torch.tensor(1.0).sin()
    assert turned[0].tolist() == [1, 0, 1, 0]  # a prefix token
    torch.testing.assert_close(turned[1], torch.tensor([1.0, 0, 1, 0]))
    torch.testing.assert_close(turned[2], torch.stack([right, down, torch.tensor(1.0), torch.tensor(0.0)]))
    torch.testing.assert_close(turned[3], torch.stack([torch.tensor(1.0), torch.tensor(0.0), right, down]))
    torch.testing.assert_close(turned[4], torch.stack([right, down, right, down]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_angles_are_not_rounded_to_half_precision(dtype):
    """At column 1000 an angle in half precision would be off by up to half a radian."""
    grid = Grid(1, 3, left=1000)
    x = torch.ones(1, 1, 3, 8, dtype=dtype)
    frequencies = AxialFrequencies(8)()
    got, expected = rotate(x, frequencies, grid), rotate(x.double(), frequencies, grid)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.01)
