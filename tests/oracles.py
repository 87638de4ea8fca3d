"""Reading the oracle files, and the position of one layer from the parameters of an original."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrel import RelPos
from vitrel.attend import dense_scores, reference_scores
from vitrel.backends import BACKENDS, Case, unsuited
from vitrel.grid import Grid, Points
from vitrel.originals import flat_table, sam_axis
from vitrel.position import PositionTerms

ORACLES = Path(os.environ.get("VITREL_ORACLES") or Path(__file__).parents[2] / "shared" / "oracles")
GRIDS = [(3, 5), (5, 3), (1, 7), (4, 4)]
LINES = pytest.mark.parametrize("upright", [False, True], ids=["1xL", "Lx1"])

close = partial(torch.testing.assert_close, rtol=0)


def oracle(name):
    path = ORACLES / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not at {ORACLES}: oracle files are not part of the repository")
    data = np.load(path)
    meta = json.loads(str(data["meta"]))
    return meta, {k: torch.from_numpy(data[k]) for k in data.files if k != "meta"}


def filled(module, state):
    """Load parameters that must fit as they are; those not named become zero."""
    parameters = dict(module.named_parameters())
    for name, tensor in state.items():
        assert parameters[name].shape == tensor.shape, f"{name}: {tensor.shape}, expected {parameters[name].shape}"
    zeros = {name: torch.zeros_like(p) for name, p in parameters.items()}
    module.load_state_dict(module.state_dict() | zeros | state)
    return module


def able(position, *where):
    """The backends that can serve these tables and places."""
    joint = any(len(tables) == 1 for tables in position.tables.values())
    spec = RelPos(position.terms, table="joint" if joint else "separable")
    case = Case(spec, tokens=1, full_grids=not any(isinstance(w, Points) for w in where))
    return {name: backend for name, backend in BACKENDS.items() if unsuited(name, case) is None}


@torch.no_grad()
def place(rel_pos, heads, width, grid_size, state, dtype=torch.float64):
    """The position of one layer whose parameters are ``state``."""
    terms = PositionTerms(RelPos.of(rel_pos), heads * width, heads, width, grid_size, dtype=dtype)
    return filled(terms, state)()


def line(length, upright, first=0):
    return Grid(length, 1, top=first) if upright else Grid(1, length, left=first)


def on_line(upright, term, table):
    return {f"{term}.table_{'h' if upright else 'w'}": table}


def reach(upright, distance):
    return (distance, 0) if upright else (0, distance)


def split(x, *weights, heads):
    """Linear maps of tokens as heads, (B, H, L, d) each."""
    return [F.linear(x, *w).unflatten(-1, (heads, -1)).transpose(1, 2) for w in weights]


def thirds(data, *, bias=True):
    """Weight and bias of q, k and v in a joined projection."""
    weights = data["qkv_weight"].chunk(3)
    if not bias:
        return [(w,) for w in weights]
    if "qkv_bias" in data:
        return list(zip(weights, data["qkv_bias"].chunk(3), strict=True))
    return [(w, data.get(f"{n}_bias")) for w, n in zip(weights, "qkv", strict=True)]


def joined(heads):
    return heads.transpose(1, 2).flatten(2)


def assert_attention(q, k, v, position, q_grid, k_grid, data, atol=1e-11):
    """Scores where they are visible, and every backend's context."""
    blocked = data.get("blocked", torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool))
    blocked = blocked[:, None] if blocked.ndim == 3 else blocked
    for scores in (reference_scores, dense_scores):
        got = scores(q, k, position, q_grid, k_grid)
        close(got.masked_fill(blocked, 0), data["scores"].masked_fill(blocked, 0), atol=atol)
    contexts = {}
    for name, backend in able(position, q_grid, k_grid).items():
        contexts[name] = joined(backend(q, k, v, position, q_grid, k_grid, ~blocked, 0.0))
        close(contexts[name], data["context"], atol=atol)
    return contexts["reference"]


def sam_position(data, q_size, k_size, heads, width):
    """Position, query points and key points for grids of unlike sides."""
    rows, cols = (sam_axis(data[f"rel_pos_{axis}"], q, k) for axis, q, k in zip("hw", q_size, k_size, strict=True))
    rel_pos = {"preset": "sam", "share_heads": True, "max_distance": (rows[0].shape[1] // 2, cols[0].shape[1] // 2)}
    state = {"query.table_h": rows[0], "query.table_w": cols[0]}
    position = place(rel_pos, heads, width, q_size, state, dtype=data["rel_pos_h"].dtype)
    return position, *(Points(torch.cartesian_prod(rows[i], cols[i])[None]) for i in (1, 2))


def bias_of(position, length, heads, width, grid):
    """Sum of what position adds, for tokens without content, (H, L, L)."""
    zeros = torch.zeros(1, heads, length, width).double()
    return reference_scores(zeros, zeros, position, grid, grid)[0]


def flat_state(table, grid_size):
    """Scheme and parameters of a flat table."""
    offsets, prefix = flat_table(table, grid_size)
    if prefix is None:
        return "swin", {"bias.table": offsets}
    return "beit", {"bias.table": offsets, "prefix": prefix}
