import pytest
import timm
import torch

import vitrel
from vitrel.grid import AxisDistance
from vitrel.initial import LOCAL, alibi, convit
from vitrel.learned import LearnedTable
from vitrel.relpos import RelPos


def test_alibi_of_eight_heads_is_that_of_the_paper_on_each_axis():
    rows, cols = alibi(torch.arange(-2, 3), torch.tensor([0, 4]), 8)
    assert (rows.shape, cols.shape) == ((8, 5), (8, 2))
    slopes = [1 / 2**n for n in range(1, 9)]  # "1/2, 1/4, ..., 1/256" for eight heads
    assert rows[:, 0].tolist() == [-2 * m for m in slopes] == rows[:, 4].tolist()
    assert cols[:, 1].tolist() == [-4 * m for m in slopes]


@pytest.mark.parametrize(("heads", "centres"), [
    (1, [(0, 0)]),
    (3, [(0, 0)] * 3),
    (6, [(-0.5, -0.5), (-0.5, 0.5), (0.5, -0.5), (0.5, 0.5), (0, 0), (0, 0)]),
    (9, [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]),
])  # fmt: skip
def test_convit_heads_look_at_the_places_of_a_kernel(heads, centres):
    rows, cols = convit(torch.arange(-3, 4), torch.arange(-2, 3), heads)
    for h, (y, x) in enumerate(centres):
        for i, dh in enumerate(range(-3, 4)):
            for j, dw in enumerate(range(-2, 3)):
                assert float(rows[h, i] + cols[h, j]) == -((dh - y) ** 2) - (dw - x) ** 2


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("kind", ["clamp", "t5_log", "piecewise"])
def test_a_table_holds_the_values_of_its_entries(local, kind):
    """Entry by entry, also where an entry serves a bucket of offsets; a joint table the sum of both axes."""
    axes = tuple(AxisDistance(kind, k, *(() if kind == "clamp" else (1.9, 4, 12.0))) for k in (4, 6))
    rows, cols = LearnedTable(4, axes, local=local)()
    (joint,) = LearnedTable(4, axes, joint=True, local=local)()
    for i, dh in enumerate(axes[0].entry_offsets().tolist()):
        for j, dw in enumerate(axes[1].entry_offsets().tolist()):
            a, b = LOCAL[local](torch.tensor([dh]), torch.tensor([dw]), 4)
            assert torch.allclose(joint[:, i, j].double(), (a + b)[:, 0])
            assert torch.allclose((rows[:, i] + cols[:, j]).double(), (a + b)[:, 0])


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("scheme", ["bias", "swin", "txl+bias"])
def test_a_model_starts_local_and_goes_back_to_it(local, scheme):
    model = timm.create_model("vitrel_micro_patch4_32", img_size=(24, 40), rel_pos={"preset": scheme, "init": local})
    for heads in vitrel.bias_maps(model).values():
        if scheme != "txl+bias":
            h, w = 6, 10
            peaks = heads.flatten(1).argmax(1)
            assert (peaks // (2 * w - 1) - (h - 1)).abs().max() <= 1
            assert (peaks % (2 * w - 1) - (w - 1)).abs().max() <= 1
    tables = [m.position_terms.bias for m in model.relative_attentions()]
    before = [tuple(t.clone() for t in table()) for table in tables]
    with torch.no_grad():
        for table in tables:
            for parameter in table.parameters():
                parameter.zero_()
            table.reset_parameters()
    for old, table in zip(before, tables, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, table(), strict=True))


def test_vector_tables_start_as_they_do_otherwise():
    torch.manual_seed(0)
    plain = timm.create_model("vitrel_micro_patch4_32", rel_pos="txl+bias")
    torch.manual_seed(0)
    near = timm.create_model("vitrel_micro_patch4_32", rel_pos={"preset": "txl+bias", "init": "convit"})
    for (name, a), (_, b) in zip(plain.named_parameters(), near.named_parameters(), strict=True):
        assert torch.equal(a, b) == (".bias.table" not in name), name


@pytest.mark.parametrize("scheme", [{"preset": "txl"}, {"preset": "none"}, {"preset": "cpb"}])
def test_what_has_no_learned_bias_for_each_head_is_refused(scheme):
    with pytest.raises(ValueError, match="init='alibi' fills the learned table of the bias; add 'bias'"):
        RelPos.of({**scheme, "init": "alibi"})


@pytest.mark.parametrize("field", [{"share_heads": True}, {"directed": False}])
def test_heads_that_cannot_differ_are_refused(field):
    with pytest.raises(ValueError, match="init='convit' begins each head in its own way and direction"):
        RelPos.of({"preset": "bias", "init": "convit", **field})
