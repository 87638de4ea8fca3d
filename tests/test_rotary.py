import copy

import pytest
import timm
import torch

from vitrel.attention import RelativeAttention2d
from vitrel.computed import SinusoidTable
from vitrel.grid import Grid
from vitrel.relpos import RelPos
from vitrel.rotary import AxialFrequencies, MixedFrequencies, rotate


def test_axial_frequencies_turn_columns_first():
    rows, cols = AxialFrequencies(8, (2, 3), theta=100.0)()
    torch.testing.assert_close(cols[0], torch.tensor([1.0, 0.1, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(rows[0], torch.tensor([0.0, 0.0, 1.0, 0.1], dtype=torch.float64))


def test_mixed_frequencies_start_as_two_sets_at_right_angles():
    rows, cols = MixedFrequencies(3, 8, (2, 3), theta=100.0)()
    magnitude = (rows.square() + cols.square()).sqrt()
    torch.testing.assert_close(magnitude, torch.tensor([1.0, 0.1, 1.0, 0.1]).expand(3, -1))
    inner = rows[:, :2] * rows[:, 2:] + cols[:, :2] * cols[:, 2:]
    torch.testing.assert_close(inner, torch.zeros(3, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [AxialFrequencies, lambda *given: MixedFrequencies(2, *given)])
def test_rotary_needs_pairs_for_both_axes(make):
    with pytest.raises(ValueError, match="rotary: the width of a head must be a multiple of 4, got 6"):
        make(6, (2, 3))


def test_rotation_by_hand():
    """One head of width 4 on a 2x2 grid: the first pair turns with the column, the second with the row."""
    x = torch.tensor([1.0, 0.0, 1.0, 0.0]).expand(1, 1, 5, 4)
    turned = rotate(x, AxialFrequencies(4, (2, 2))(), Grid(2, 2))[0, 0]
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
    frequencies = AxialFrequencies(8, (1, 3))()
    got, expected = rotate(x, frequencies, grid), rotate(x.double(), frequencies, grid)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.01)


SINUSOID = {"preset": "txl", "source": "sinusoid", "init": "normal", "init_std": 1.0}
MLPS = [{"preset": "cpb"}, {"preset": "cpb", "mlp_coords": "cr"}]
SCHEMES = [{"preset": "rope"}, {"preset": "rope_mixed"}, SINUSOID, *MLPS]


@pytest.mark.parametrize("rule", ["interpolate", "geometric", "clamp", "crop"])
@pytest.mark.parametrize("make", [AxialFrequencies, lambda *given, **more: MixedFrequencies(2, *given, **more)])
def test_angles_follow_another_grid(make, rule):
    """From edge to edge as far as before where the rule stretches, and as far per patch where it does not."""
    frequencies = make(8, (2, 3), resize=rule)
    rows, cols = (f.clone() for f in frequencies())
    frequencies.grid_size = (6, 4)
    by = (2 / 6, 3 / 4) if rule in ("interpolate", "geometric") else (1, 1)
    for found in (frequencies(), frequencies((6, 4))):
        torch.testing.assert_close(found[0], rows * by[0])
        torch.testing.assert_close(found[1], cols * by[1])
    assert torch.equal(frequencies((2, 3))[0], rows)


@pytest.mark.parametrize("preset", ["rope", "rope_mixed"])
def test_scores_of_an_enlarged_picture_are_those_of_the_picture(preset):
    """Twice the rows and three times the columns: patches that stand for the same place turn alike."""
    torch.manual_seed(0)
    attn = RelativeAttention2d(16, 2, grid_size=(2, 3), rel_pos=preset, num_prefix_tokens=1).eval()
    x = torch.randn(1, 7, 16)
    before = attn.scores(x)
    token, patches = x[:, :1], x[:, 1:].view(1, 2, 3, 16)
    large = patches.repeat_interleave(2, 1).repeat_interleave(3, 2)
    attn.set_grid_size((4, 9))
    after = attn.scores(torch.cat([token, large.flatten(1, 2)], 1))[..., 1:, 1:].unflatten(-1, (4, 9))
    after = after.unflatten(-3, (4, 9))[..., ::2, ::3, ::2, ::3]
    torch.testing.assert_close(after.flatten(-4, -3).flatten(-2), before[..., 1:, 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rel_pos", SCHEMES, ids=str)
@pytest.mark.parametrize("rule", ["interpolate", "clamp"])
def test_loaded_at_another_size_is_resized_to_it(rel_pos, rule):
    """Through a state dict, ``set_input_size`` and images of another size: one function, and not that of the size."""
    torch.manual_seed(0)
    args = {"depth": 1, "embed_dim": 16, "num_heads": 2, "rel_pos": {**rel_pos, "resize": rule}}
    model = timm.create_model("vitrel_micro_patch4_32", img_size=(16, 24), dynamic_img_size=True, **args).eval()
    x = torch.randn(2, 3, 24, 40)
    other = timm.create_model("vitrel_micro_patch4_32", img_size=(24, 40), **args).eval()
    fresh = {n: b.clone() for n, b in other.named_buffers() if n.endswith("reference")}
    other.load_state_dict(model.state_dict())
    resized = copy.deepcopy(model)
    resized.set_input_size((24, 40))
    with torch.no_grad():
        expected = resized(x)
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(other(x), expected)
        again = timm.create_model("vitrel_micro_patch4_32", img_size=(16, 24), **args).eval()
        again.load_state_dict(other.state_dict())
        torch.testing.assert_close(again(x[..., :16, :24]), model(x[..., :16, :24]))
        # tables that are kept between calls are not those of other weights
        own = {n: v for n, v in other.state_dict().items() if not n.endswith("reference")}
        assert fresh
        other.load_state_dict({**own, **fresh})
        # offsets as parts of the size, stretched with it, and offsets as they are do not depend on it
        independent = "interpolate" if rel_pos == {"preset": "cpb"} else "clamp"
        assert torch.allclose(other(x), expected, atol=1e-6) == (rule == independent)
        # weights of before there was such a note are taken to be of the model's size
        again.load_state_dict({n: v for n, v in model.state_dict().items() if not n.endswith("reference")})
        torch.testing.assert_close(again(x[..., :16, :24]), model(x[..., :16, :24]))


def test_a_sinusoid_is_read_where_a_table_would_be():
    torch.manual_seed(0)
    for rule in ("interpolate", "geometric", "clamp"):
        axes = RelPos.of("txl").axes((4, 3))
        table = SinusoidTable(2, axes, 5, sinusoid_width=8, resize=rule, init_std=1.0, dtype=torch.float64)
        before = table()
        assert all(torch.equal(a, b) for a, b in zip(table(axes), before, strict=True))
        large = RelPos.of("txl").axes((7, 5))
        rows, cols = table(large)
        if rule == "interpolate":  # 6 and 4 are twice 3 and 2
            torch.testing.assert_close(rows[:, ::2], before[0])
            torch.testing.assert_close(cols[:, ::2], before[1])
        elif rule == "geometric":  # the ends, and near the centre nearly as it was
            torch.testing.assert_close(rows[:, [0, 6, 12]], before[0][:, [0, 3, 6]])
            assert (rows[:, 7] - before[0][:, 4]).norm() < (rows[:, 7] - before[0][:, 3]).norm()
        else:
            torch.testing.assert_close(rows[:, 3:-3], before[0])
