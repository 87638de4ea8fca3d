"""The forms of attention by name, what each can serve, and the measured choice between them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrel.attend import dense, reference
from vitrel.blocked import block_numbers, blocked
from vitrel.folded import folded, written
from vitrel.grid import Grid
from vitrel.relpos import TERMS, RelPos
from vitrel.tables import Axes

BACKENDS: dict[str, Callable[..., Tensor]] = {
    "reference": reference,
    "dense": dense,
    "written": written,
    "folded": folded,
    "blocked": blocked,
}

# Tokens from which the second form is faster than the dense one, or about as fast and much smaller, for separable
# tables. Measured on 2 CPU cores (avx2) by
#   python scripts/benchmark.py --what attention --backends dense blocked folded --grids 8 14 20 24 28 32 64
# Nothing was measured on CUDA: its row takes the fold where the bias of a layer outgrows the rest of its activations.
CROSSOVERS: dict[tuple[str, bool], tuple[int, str]] = {
    ("cpu", False): (576, "blocked"),
    ("cpu", True): (1024, "blocked"),
    ("cuda", False): (1024, "folded"),
    ("cuda", True): (1024, "folded"),
}


@dataclass(frozen=True)
class Case:
    """What one call of attention is about.

    Attributes:
        rel_pos: The scheme.
        tokens: The larger of the numbers of queries and keys.
        device: ``cpu``, ``cuda``, ...
        grad: Whether gradients are recorded.
        full_grids: Whether queries and keys fill grids (and are no ``Points``).
        traced: Whether torch.compile or torch.export is at work.
        dropout: Whether attention weights are dropped out.
        mask_grad: Whether the mask needs a gradient.
    """

    rel_pos: RelPos
    tokens: int
    device: str = "cpu"
    grad: bool = False
    full_grids: bool = True
    traced: bool = False
    dropout: bool = False
    mask_grad: bool = False

    @property
    def reads_tables(self) -> bool:
        return self.rel_pos.prefix == "learned" or any(TERMS[t].reads for t in self.rel_pos.terms)


def _joint(rel_pos: RelPos) -> str | None:
    if rel_pos.table == "joint" and any(TERMS[t].reads for t in rel_pos.terms):
        return "needs one table per axis, and these are joint; set table='separable'"
    return None


def _blocked(case: Case) -> str | None:
    if not case.full_grids:
        return "needs full grids, and these are points"
    if case.traced:
        return "is a loop with a backward pass of its own, which torch.compile and torch.export cannot trace"
    if case.dropout:
        return "has no attention dropout; set attn_drop to 0"
    return "gives a mask no gradient" if case.mask_grad else None


def check(backend: str, rel_pos: RelPos) -> None:
    """See that a backend exists and can serve a scheme.

    Raises:
        ValueError: If not, with the reason.
    """
    if backend != "auto" and backend not in BACKENDS:
        close = difflib.get_close_matches(backend, ["auto", *BACKENDS], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"backend: {backend!r} is unknown, expected one of auto, {', '.join(BACKENDS)}{hint}")
    reason = _joint(rel_pos) if backend in ("written", "folded", "blocked") else None
    if reason:
        raise ValueError(f"backend: {backend!r} {reason}, or use backend='auto'")


def choose(backend: str, case: Case) -> tuple[str, str]:
    """The backend to take and the reason.

    Args:
        backend: ``auto`` or a key of ``BACKENDS``.
        case: The call.

    Raises:
        ValueError: If the backend is asked for and cannot serve this call, with the reason.
    """
    if backend != "auto":
        reason = _blocked(case) if backend == "blocked" else None
        if reason:
            raise ValueError(f"backend: 'blocked' {reason}, or use backend='auto'")
        return backend, "asked for"
    if not case.reads_tables:
        return "dense", "nothing to add to the scores: plain fused attention"
    if _joint(case.rel_pos):
        return "dense", "joint tables: one additive bias"
    tokens, second = CROSSOVERS.get((case.device, case.grad), CROSSOVERS["cuda", case.grad])
    if not case.full_grids:
        return "dense", "points: one additive bias"
    if case.tokens < tokens:
        return "dense", f"{case.tokens} tokens, fewer than {tokens}: one additive bias"
    if second == "blocked" and _blocked(case):
        return "folded", f"{case.tokens} tokens, at least {tokens}; blocked {_blocked(case)}"
    what = {"blocked": "a few rows of queries at a time", "folded": "extra columns of q and k"}[second]
    return second, f"{case.tokens} tokens, at least {tokens}: {what}"


def extra_numbers(backend: str, case: Case, axes: Axes, grid_size: tuple[int, int], head_dim: int) -> int:
    """Numbers per head and image that the forward pass holds beyond plain fused attention: its largest tensors."""
    (h, w), spec, tokens = grid_size, case.rel_pos, case.tokens
    reads = [t for t in spec.terms if TERMS[t].reads and t != "v"]
    contents = [t for t in reads if TERMS[t].needs_input and t != "value"]
    if backend == "reference":
        return tokens * tokens * (1 + len(spec.terms)) + (h * w * h * w * head_dim if reads else 0)
    if not reads and spec.prefix == "none":
        return 0
    if spec.table == "joint":
        profiles = h * w * len(contents) * math.prod(axis.entries for axis in axes)
    else:
        profiles = h * w * (h + w) * (len(contents) + ("value" in reads))
    if backend == "blocked":
        return profiles + block_numbers(Grid(h, w), tokens)
    if backend == "folded":
        columns = (h + w) * len({"key" if t == "key" else "query" for t in reads if t != "value"})
        return profiles + 3 * tokens * max(columns, h + w)
    written_out = "value" in reads or (case.device == "cpu" and case.grad)
    return profiles + tokens * tokens * (2 if written_out else 1)


def traced() -> bool:
    """Whether torch.compile, torch.export, torch.jit.trace or torch.func is at work."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
