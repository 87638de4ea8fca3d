"""Shapes and refusals of the importers; their numbers are tested against the originals in test_oracles."""

import pytest
import torch

from vitrel import originals


def test_flat_table_orders_offsets_and_prefix():
    table = torch.arange(48.0)[:, None] * torch.tensor([1.0, 100.0])
    offsets, prefix = originals.flat_table(table, (3, 5))
    assert offsets.shape == (2, 5, 9)
    assert offsets[0, 1, 2] == 1 * 9 + 2
    assert prefix.tolist() == [[45, 46, 47], [4500, 4600, 4700]]
    assert originals.flat_table(table[:45], (3, 5))[1] is None


def test_causal_tables_leave_the_other_side_at_zero():
    vectors, scalars = originals.txl_learned_tables(torch.ones(3, 2, 4), torch.ones(3, 2))
    assert vectors.shape == (2, 5, 4)
    assert scalars.tolist() == [[0, 0, 0.5, 0.5, 0.5]] * 2
    assert originals.txl_table(torch.ones(3, 6), torch.ones(8, 6), 2).shape == (2, 5, 4)


def test_deberta_shares_its_last_row():
    table = originals.deberta_table(torch.randn(10, 6), torch.randn(8, 6), None, 2)
    assert table.shape == (2, 11, 4)
    assert torch.equal(table[:, 9], table[:, 10])


def test_t5_never_reads_the_first_row_of_its_upper_half():
    assert originals.t5_table(torch.arange(8.0)[:, None]).tolist() == [[7, 6, 5, 0, 1, 2, 3]]


@pytest.mark.parametrize(("q_size", "k_size"), [(3, 3), (4, 2), (2, 6), (3, 5)])
def test_sam_axis_reaches_every_pair(q_size, k_size):
    table, q, k = originals.sam_axis(torch.arange(2.0 * max(q_size, k_size) - 1)[:, None], q_size, k_size)
    delta = q[:, None] - k
    assert table.shape[1] // 2 == delta.abs().max()
    ratio = max(k_size / q_size, 1.0), max(q_size / k_size, 1.0)
    row = torch.arange(q_size)[:, None] * ratio[0] - torch.arange(k_size) * ratio[1] + (k_size - 1) * ratio[1]
    assert torch.equal(table[0, delta + table.shape[1] // 2, 0], row.trunc())


def test_sam_axis_of_half_precision_is_stretched_in_float32():
    table, _, _ = originals.sam_axis(torch.randn(5, 4).bfloat16(), 4)
    assert (table.dtype, table.shape) == (torch.bfloat16, (1, 7, 4))


@pytest.mark.parametrize(
    ("shape", "term", "joint", "expected", "prefix"),
    [
        ((2, 49), "query", True, (2, 7, 7), None),
        ((2, 50), "key", True, (2, 7, 7), (2,)),
        ((1, 4, 50), "query", True, (1, 7, 7, 4), (1, 4)),
        ((2, 50, 4), "value", True, (2, 7, 7, 4), (2, 4)),
        ((2, 4, 7), "key", False, (2, 7, 4), None),
        ((2, 8, 4), "value", False, (2, 7, 4), (2, 4)),
    ],
)
def test_irpe_shapes(shape, term, joint, expected, prefix):
    table, shared = originals.irpe_table(torch.randn(shape), term, joint=joint)
    assert table.shape == expected
    assert (shared if shared is None else tuple(shared.shape)) == prefix


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: originals.flat_table(torch.zeros(46, 2), (3, 5), "t"),
            r"t: has shape \(46, 2\), expected \(45, heads\)",
        ),
        (lambda: originals.flat_table(torch.zeros(45), (3, 5)), r"has shape \(45,\), expected \(45, heads\) for a 3x5"),
        (lambda: originals.tf_table(torch.zeros(2, 4, 5)), r"expected \(heads, 2h-1, 2w-1\)"),
        (lambda: originals.levit_table(torch.zeros(2, 14), (3, 5)), r"attention_biases: has shape .*\(heads, 15\)"),
        (lambda: originals.sam_axis(torch.zeros(4, 2), 3), r"rel_pos: has shape \(4, 2\)"),
        (lambda: originals.irpe_table(torch.zeros(2, 48)), "expected an odd square of buckets, or one more"),
        (lambda: originals.irpe_table(torch.zeros(2, 1, 1, 49)), "expected an odd square of buckets"),
        (lambda: originals.irpe_table(torch.zeros(2, 49), "k"), "'k' is unknown, expected query, key or value"),
        (lambda: originals.txl_learned_tables(torch.zeros(3, 2, 4), torch.zeros(2, 3)), r"r_bias: has shape \(2, 3\)"),
        (lambda: originals.t5_table(torch.zeros(31, 2)), "even number of buckets"),
    ],
)
def test_wrong_tables_are_refused_by_shape(call, message):
    with pytest.raises(ValueError, match=message):
        call()
