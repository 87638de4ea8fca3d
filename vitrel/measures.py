"""Numbers per head: how far it looks and where to, what decides its scores, and how separable its tables are."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor, nn

from vitrel.maps import table_map
from vitrel.probe import PARTS, Probe, Seen, in_parts, lattice, probes, split
from vitrel.terms import TERMS

Row = dict[str, str | int | float]


@torch.no_grad()
def head_numbers(model: nn.Module, pictures: Seen) -> list[Row]:
    """What each head does with pictures, between patches; one row per block and head.

    Weights are those over the patches alone. ``_content`` marks the attention by content and u alone, ``_position`` the
    one by the other terms alone.

    * ``distance``: mean distance of the attended patch, in patches;
    * ``rows_below``, ``cols_right``: the mean place of the attended patch from the query, in patches;
    * ``direction``: the length of that mean place as a part of the mean distance: 0 for a head that looks evenly to all
      sides, 1 for one that looks to one side;
    * ``entropy``: of the weights, in nats; of h * w patches at most ``entropy_max``;
    * ``share_TERM``: the term's share in the variance of the scores over the keys, its covariance with the scores as a
      part of their variance. Shares add up to 1; one below 0 works against the others;
    * ``var_TERM``, ``cov_TERM_TERM``: the variances and twice the covariances that shares are made of; all of them
      add up to 1 too;
    * ``separable_TERM``: the part of a table's energy, around its mean, that one table per axis would keep, each offset
      counted by its pairs of patches; 1 for separable tables.

    Args:
        model: Any model with ``RelativeAttention2d`` layers.
        pictures: A batch that the model takes, (B, 3, h, w), normalised (a dozen are enough); or its ``probes``.

    Returns:
        Rows with ``block`` and ``head`` first. A number that does not exist is left out.

    Raises:
        ValueError: If the patches of the pictures do not fill one grid.
    """
    rows: list[Row] = []
    for block, probe in probes(model, pictures).items():
        numbers = {**_attended(probe), **_separable(probe)}
        for head in range(probe.attn.num_heads):
            row: Row = {"block": block, "head": head}
            row.update({name: float(values[head]) for name, values in numbers.items()})
            rows.append({k: v for k, v in row.items() if not (isinstance(v, float) and math.isnan(v))})
    return rows


def block_means(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """The mean over the heads of each number: block to name to mean."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        numbers = found.setdefault(str(row["block"]), {})
        for name, value in row.items():
            if isinstance(value, float):
                numbers.setdefault(name, []).append(value)
    return {b: {n: sum(v) / len(v) for n, v in numbers.items()} for b, numbers in found.items()}


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a CSV table with a column per name, in the order in which the names first come."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return text.getvalue()


def separable_share(table: Tensor) -> Tensor:
    """Share of a map's energy around its mean in the best sum of one map per axis, (H,); NaN for a constant map.

    Args:
        table: (H, 2h-1, 2w-1), or with the features of vectors as a last axis. Each place counts as often as a grid of
            h x w patches has such a pair.
    """
    table = (table if table.ndim == 4 else table[..., None]).double()
    down, right = (_pairs(size).to(table.device) for size in table.shape[1:3])
    by_row = torch.einsum("hyxd,x->hyd", table, right)[:, :, None]
    by_col = torch.einsum("hyxd,y->hxd", table, down)[:, None]
    mean = torch.einsum("hyxd,y,x->hd", table, down, right)[:, None, None]
    total, rest = (
        torch.einsum("hyxd,y,x->h", part.square(), down, right)
        for part in (table - mean, table - by_row - by_col + mean)
    )
    scale = torch.einsum("hyxd,y,x->h", table.square(), down, right)
    return torch.where(total > 1e-12 * scale, 1 - rest / total, torch.nan)


def _pairs(size: int) -> Tensor:
    """Part of the pairs along an axis at each place of a map's side, (2n-1,)."""
    n = size // 2 + 1
    pairs = n - torch.arange(-(n - 1), n, dtype=torch.float64).abs()
    return pairs / pairs.sum()


def _attended(probe: Probe) -> dict[str, Tensor]:
    """Distances, places, entropies and shares of variance, each (H,), means over pictures and queries."""
    places = probe.grid.coords(probe.x.device)[0].double()
    queries = lattice(probe.grid)
    sums: dict[str, Tensor] = {}
    products: Tensor | None = None
    names: list[str] = []

    def add(name: str, numbers: Tensor) -> None:
        sums[name] = sums.get(name, torch.zeros(())) + numbers.sum((0, 2)).cpu()

    for some, terms in in_parts(probe, queries):
        terms = {name: summand.double() for name, summand in terms.items()}
        way = places[None] - places[some.to(places.device)][:, None]
        far = way.norm(dim=-1)
        for part, weights in split(terms).items():
            suffix = "" if part == "both" else f"_{part}"
            add(f"distance{suffix}", torch.einsum("bhnk,nk->bhn", weights, far))
            add(f"rows_below{suffix}", torch.einsum("bhnk,nk->bhn", weights, way[..., 0]))
            add(f"cols_right{suffix}", torch.einsum("bhnk,nk->bhn", weights, way[..., 1]))
            add(f"entropy{suffix}", -torch.xlogy(weights, weights).sum(-1))
        names = list(terms)
        centred = torch.stack([s - s.mean(-1, keepdim=True) for s in terms.values()])
        product = torch.einsum("sbhnk,tbhnk->hst", centred, centred).cpu()
        products = product if products is None else products + product

    count = len(probe.x) * len(queries)
    numbers = {name: total / count for name, total in sums.items()}
    for suffix in ("", *(f"_{part}" for part in PARTS[1:])):
        length = torch.hypot(numbers[f"rows_below{suffix}"], numbers[f"cols_right{suffix}"])
        numbers[f"direction{suffix}"] = length / numbers[f"distance{suffix}"]
    numbers["entropy_max"] = torch.full((probe.attn.num_heads,), math.log(probe.grid.patches), dtype=torch.float64)
    assert products is not None
    return {**{name: numbers[name] for name in sorted(numbers)}, **_shares(names, products)}


def _shares(names: list[str], products: Tensor) -> dict[str, Tensor]:
    """Shares, variances and twice the covariances from (H, terms, terms), as parts of the scores' variance."""
    parts = products / products.sum((1, 2), keepdim=True)
    shares = {f"share_{name}": parts[:, i].sum(-1) for i, name in enumerate(names)}
    variances = {f"var_{name}": parts[:, i, i] for i, name in enumerate(names)}
    pairs = combinations(range(len(names)), 2)
    covariances = {f"cov_{names[i]}_{names[j]}": 2 * parts[:, i, j] for i, j in pairs}
    return {**shares, **variances, **covariances}


def _separable(probe: Probe) -> dict[str, Tensor]:
    terms = [t for t in probe.position.terms if TERMS[t].reads == t]
    grid = (probe.grid.rows, probe.grid.cols)
    return {f"separable_{t}": separable_share(table_map(probe.attn, probe.position, t, grid)) for t in terms}
