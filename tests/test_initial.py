import pytest
import timm
import torch

import vitrel
from vitrel.grid import AxisDistance
from vitrel.initial import WINDOWS, alibi, gaussian
from vitrel.relpos import RelPos
from vitrel.tables import LearnedTable


def test_alibi_of_eight_heads_is_that_of_the_paper_on_each_axis():
    rows, cols = alibi(torch.arange(-2, 3), torch.tensor([0, 4]), 8)
    assert (rows.shape, cols.shape) == ((8, 5), (8, 2))
    slopes = [1 / 2**n for n in range(1, 9)]  # "1/2, 1/4, ..., 1/256" for eight heads
    assert rows[:, 0].tolist() == [-2 * m for m in slopes] == rows[:, 4].tolist()
    assert cols[:, 1].tolist() == [-4 * m for m in slopes]


@pytest.mark.parametrize(("heads", "centres"), [
    (1, [(0, 0)]),
    (3, [(-0.5, -0.5), (-0.5, 0.5), (0.5, -0.5)]),
    (9, [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]),
])  # fmt: skip
def test_gaussian_heads_look_at_the_places_of_a_kernel(heads, centres):
    rows, cols = gaussian(torch.arange(-3, 4), torch.arange(-2, 3), heads)
    for h, (y, x) in enumerate(centres):
        for i, dh in enumerate(range(-3, 4)):
            for j, dw in enumerate(range(-2, 3)):
                assert float(rows[h, i] + cols[h, j]) == -((dh - y) ** 2) - (dw - x) ** 2


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("kind", "directed"), [("clamp", True), ("clamp", False), ("t5_log", True), ("piecewise", True)]
)
def test_a_joint_table_starts_as_the_separable_one(window, kind, directed):
    axes = tuple(AxisDistance(kind, k, *(() if kind == "clamp" else (1.9, 4, 12.0)), directed=directed) for k in (4, 6))
    rows, cols = LearnedTable(4, axes, window=window)()
    (joint,) = LearnedTable(4, axes, joint=True, window=window)()
    assert torch.equal(joint, rows[:, :, None] + cols[:, None, :])
    dh, dw = (axis.entry_offsets() for axis in axes)
    assert torch.allclose(rows.double(), WINDOWS[window](dh, dw, 4)[0])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    "scheme", [{"preset": "bias"}, {"preset": "swin", "share_heads": True}, {"preset": "txl+bias"}]
)
def test_a_model_starts_with_the_window_and_goes_back_to_it(window, scheme):
    model = timm.create_model("vitrel_micro_patch4_32", img_size=(24, 40), rel_pos={**scheme, "init": window})
    tables = [m.position_terms.bias for m in model.relative_attentions()]
    before = [tuple(t.clone() for t in table()) for table in tables]
    if scheme["preset"] != "swin":
        peak = vitrel.bias_maps(timm.create_model("vitrel_micro_patch4_32", rel_pos={"preset": "bias", "init": window}))
        for heads in peak.values():
            assert (heads.flatten(1).argmax(1) // 15 - 7).abs().max() <= 1  # the largest entry is a near one
    with torch.no_grad():
        for table in tables:
            for parameter in table.parameters():
                parameter.zero_()
            table.reset_parameters()
    for old, table in zip(before, tables, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, table(), strict=True))


def test_vector_tables_start_as_they_do_without_a_window():
    torch.manual_seed(0)
    plain = timm.create_model("vitrel_micro_patch4_32", rel_pos="txl+bias")
    torch.manual_seed(0)
    window = timm.create_model("vitrel_micro_patch4_32", rel_pos={"preset": "txl+bias", "init": "gaussian"})
    for (name, a), (_, b) in zip(plain.named_parameters(), window.named_parameters(), strict=True):
        assert torch.equal(a, b) == (".bias.table" not in name), name


@pytest.mark.parametrize("scheme", [{"preset": "txl"}, {"preset": "none"}, {"preset": "cpb"}])
def test_a_window_without_a_learned_bias_is_refused(scheme):
    with pytest.raises(ValueError, match="init='alibi' fills the learned table of the bias; add 'bias'"):
        RelPos.of({**scheme, "init": "alibi"})
