"""What the tests of the forms of attention share: random positions, inputs, and the comparison with the reference."""

import torch

from vitrel import RelPos
from vitrel.attend import reference
from vitrel.backends import BACKENDS, Case, unsuited
from vitrel.grid import Grid, Points
from vitrel.position import PositionTerms

HEADS, WIDTH = 3, 8
EVERYTHING = {"terms": ["bias", "query", "key", "u", "v", "value", "kernel"], "prefix": "learned"}


def place(rel_pos, grid_size, **changes):
    """Position parameters, asymmetric and large enough to matter, in float64."""
    generator = torch.Generator().manual_seed(0)
    spec = RelPos.of({**RelPos.of(rel_pos).as_dict(), **changes})
    terms = PositionTerms(spec, HEADS * WIDTH, HEADS, WIDTH, grid_size, dtype=torch.float64)
    with torch.no_grad():
        for parameter in terms.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return terms


def inputs(q_length, k_length, batch=2):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(batch, HEADS, n, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (q_length, k_length, k_length)
    ]


def mask_of(kind, q_length, k_length, batch=2):
    generator = torch.Generator().manual_seed(2)
    if kind == "padding":
        return (torch.arange(k_length) < torch.tensor([k_length, k_length - 3])[:batch, None])[:, None, None]
    if kind == "boolean":
        mask = torch.rand(batch, HEADS, q_length, k_length, generator=generator) < 0.6
        mask[0, 1, q_length // 2] = False  # a query that sees nothing
        return mask
    if kind == "additive":
        return torch.randn(q_length, k_length, generator=generator, dtype=torch.float64)
    return None


def compare(form, terms, q_grid, k_grid, prefix=(0, 0), mask=None, batch=2, atol=1e-11):
    """The form's output and every gradient against the reference; the form by its name, or as a function."""
    form = BACKENDS[form] if isinstance(form, str) else form
    lengths = prefix[0] + q_grid.patches, prefix[1] + k_grid.patches
    q, k, v = inputs(*lengths, batch)
    leaves = [q, k, v, *terms.parameters()]
    results = []
    for attend in (form, reference):
        out = attend(q, k, v, terms(), q_grid, k_grid, mask_of(mask, *lengths, batch))
        weight = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()
        results.append([out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(
            torch.zeros(()) if got is None else got,
            torch.zeros_like(got) if expected is None else expected,
            rtol=0,
            atol=atol,
        )


def serves(name, rel_pos, *where):
    points = any(isinstance(w, Points) for w in where)
    return unsuited(name, Case(RelPos.of(rel_pos), tokens=1, full_grids=not points)) is None


STRIP = Grid(2, 5, top=4), Grid(6, 5, top=0)  # the last rows of an image, with a memory of the rows above
CROSS = Grid(3, 4, top=1, left=2), Grid(5, 2)
