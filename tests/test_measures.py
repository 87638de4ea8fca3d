"""Numbers per head against definitions written out with loops, and planted tables that point one way."""

import csv
import io
import itertools
import math

import pytest
import timm
import torch

import vitrel
from vitrel.measures import as_csv, block_means, head_numbers, separable_share
from vitrel.probe import probes


def model(rel_pos, grid=(3, 5), **kwargs):
    torch.manual_seed(0)
    small = {"embed_dim": 24, "num_heads": 3, "depth": 1, "num_classes": 3}
    size = (4 * grid[0], 4 * grid[1])
    return timm.create_model("vitrel_micro_patch4_32", rel_pos=rel_pos, img_size=size, **{**small, **kwargs}).eval()


def randomised(rel_pos, **kwargs):
    made = model(rel_pos, **kwargs)
    for name in sorted(made.position_parameters()):
        torch.nn.init.normal_(made.get_parameter(name))
    return made


def plant(net, head, dh, dw, value=12.0):
    """One large value of a joint table, at an offset query minus key."""
    h, w = net.blocks[0].attn.grid_size
    with torch.no_grad():
        net.blocks[0].attn.position.bias.table[head, h - 1 + dh, w - 1 + dw] = value


@pytest.mark.parametrize("grid", [(4, 4), (3, 6), (6, 3)])
def test_a_planted_table_points_where_it_was_planted(grid):
    net = model("swin", grid)
    plant(net, 0, 0, -1)  # a key one to the right is at query minus key = (0, -1)
    plant(net, 1, -1, 0)  # below
    plant(net, 2, 0, 1)  # left
    rows = head_numbers(net, torch.zeros(1, 3, 4 * grid[0], 4 * grid[1]))
    h, w = grid
    # Queries at the edge have no such patch and look everywhere: their mean place is the grid's centre.
    right, below = ((n - 1) / n - (n - 1) / 2 / n for n in (w, h))
    found = [(row["rows_below_position"], row["cols_right_position"]) for row in rows]
    expected = [(0, right), (below, 0), (0, -right)]
    assert found == [(pytest.approx(a, abs=1e-3), pytest.approx(b, abs=1e-3)) for a, b in expected]
    for row in rows:  # content is the same for every key of a blank picture
        assert row["rows_below"] == pytest.approx(row["rows_below_position"], abs=1e-4)
        assert (row["rows_below_content"], row["cols_right_content"]) == (pytest.approx(0, abs=1e-4),) * 2


@pytest.mark.parametrize("scheme", ["txl+bias", "rope+bias", "irpe_qkv", "deberta", "beit"])
def test_shares_are_those_of_a_dense_computation_and_add_up(scheme):
    net, pictures = randomised(scheme, class_token=True), torch.randn(2, 3, 12, 20)
    caught = []
    net.blocks[0].attn.register_forward_pre_hook(lambda m, args: caught.append(args[0]))
    rows = head_numbers(net, pictures)
    terms = net.blocks[0].attn.terms(caught[0])
    terms = {n: t.detach().double()[:, :, 1:, 1:] for n, t in terms.items() if n != "prefix"}
    for head, row in enumerate(rows):
        of_head = {n: t[:, head].flatten(0, 1) for n, t in terms.items()}  # (pictures * queries, keys)
        scores = sum(of_head.values())
        total = scores.var(-1, correction=0).sum()
        for name, summand in of_head.items():
            both = torch.stack(
                [torch.stack([s, t]).cov(correction=0)[0, 1] for s, t in zip(summand, scores, strict=True)]
            )
            assert row[f"share_{name}"] == pytest.approx(float(both.sum() / total), abs=1e-5)
            assert row[f"var_{name}"] == pytest.approx(float(summand.var(-1, correction=0).sum() / total), abs=1e-5)
        for a, b in itertools.combinations(of_head, 2):
            both = sum(torch.stack([s, t]).cov(correction=0)[0, 1] for s, t in zip(of_head[a], of_head[b], strict=True))
            assert row[f"cov_{a}_{b}"] == pytest.approx(2 * float(both / total), abs=1e-5)
        assert sum(v for n, v in row.items() if n.startswith("share_")) == pytest.approx(1)
        assert sum(v for n, v in row.items() if n.startswith(("var_", "cov_"))) == pytest.approx(1)


def test_distances_and_entropies_are_their_definitions():
    net, pictures = randomised("txl"), torch.randn(2, 3, 12, 20)
    rows = head_numbers(net, pictures)
    (probe,) = probes(net, pictures).values()
    terms = probe.terms(torch.arange(15))
    scores = {"": sum(terms.values()), "_content": terms["content"] + terms["u"]}
    scores["_position"] = terms["query"] + terms["v"]
    for suffix, score in scores.items():
        weights = score.double().softmax(-1)
        for head, row in enumerate(rows):
            distance = down = right = entropy = 0.0
            for b, i, j in itertools.product(range(2), range(15), range(15)):
                weight, dy, dx = float(weights[b, head, i, j]), j // 5 - i // 5, j % 5 - i % 5
                distance += weight * math.hypot(dy, dx) / 30
                down, right = down + weight * dy / 30, right + weight * dx / 30
                entropy -= weight * math.log(weight) / 30
            expected = {"distance": distance, "rows_below": down, "cols_right": right, "entropy": entropy,
                        "direction": math.hypot(down, right) / distance}  # fmt: skip
            for name, value in expected.items():
                assert row[name + suffix] == pytest.approx(value, abs=1e-5), name + suffix
            assert row["entropy_max"] == pytest.approx(math.log(15))


def test_separable_tables_are_separable_and_a_product_is_not():
    assert [r["separable_bias"] for r in head_numbers(randomised("bias"), torch.zeros(1, 3, 12, 20))] == [
        pytest.approx(1)
    ] * 3
    product = torch.arange(-2.0, 3)[:, None] * torch.arange(-4.0, 5)[None]
    both = torch.stack([product, torch.arange(-2.0, 3)[:, None] + torch.arange(9.0)[None] ** 2, torch.ones(5, 9)])
    shares = separable_share(both)
    assert shares[:2].tolist() == [pytest.approx(0), pytest.approx(1)]
    assert shares[2].isnan()


def test_the_best_separable_fit_is_the_least_squares_one():
    torch.manual_seed(0)
    table = torch.randn(2, 5, 7, 4, dtype=torch.float64)
    weight = torch.tensor([[(3 - abs(y)) * (4 - abs(x)) for x in range(-3, 4)] for y in range(-2, 3)]).double()
    design = torch.zeros(5, 7, 12, dtype=torch.float64)
    for y, x in itertools.product(range(5), range(7)):
        design[y, x, y] = design[y, x, 5 + x] = 1
    root = weight.sqrt().flatten()[:, None]
    for head in range(2):
        target = table[head].flatten(0, 1)
        fit = torch.linalg.lstsq(design.flatten(0, 1) * root, target * root, driver="gelsd").solution
        rest = ((design.flatten(0, 1) @ fit - target) * root).square().sum()
        mean = (target * weight.flatten()[:, None]).sum(0) / weight.sum()
        total = ((target - mean) * root).square().sum()
        assert float(separable_share(table)[head]) == pytest.approx(float(1 - rest / total))


def test_rows_become_a_tidy_table():
    rows = head_numbers(randomised("shaw", depth=2), torch.randn(1, 3, 12, 20))
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [(r["block"], r["head"]) for r in read] == [(f"blocks.{b}", str(h)) for b in (0, 1) for h in (0, 1, 2)]
    assert float(read[4]["distance"]) == pytest.approx(rows[4]["distance"], rel=1e-5)
    assert "separable_value" in read[0]
    means = block_means(rows)
    assert means["blocks.1"]["distance"] == pytest.approx(sum(r["distance"] for r in rows[3:]) / 3)


def test_a_model_without_position_has_numbers_of_its_content():
    rows = vitrel.head_numbers(model("none"), torch.randn(1, 3, 12, 20))
    assert all(row["share_content"] == pytest.approx(1) for row in rows)
    assert all(row["entropy_position"] == pytest.approx(row["entropy_max"]) for row in rows)
