"""The forms of attention by name, what each can serve, and the measured choice between them."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from vitrel.attend import dense, reference
from vitrel.blocked import block_numbers, blocked
from vitrel.folded import folded
from vitrel.grid import Grid, Where
from vitrel.kernel import add_kernel, by_rows
from vitrel.lookup import Axes
from vitrel.position import Position
from vitrel.relpos import RelPos
from vitrel.terms import TERMS
from vitrel.written import written

Form = Callable[..., Tensor]


def _with_kernel(form: Form) -> Form:
    """A form of attention and the kernel term, which does not depend on the weights of attention."""

    @functools.wraps(form)
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Position,
        q_grid: Where,
        k_grid: Where,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        out = form(q, k, v, position, q_grid, k_grid, attn_mask, dropout_p)
        return add_kernel(out, v, position, q_grid, k_grid, attn_mask)

    return attend


BACKENDS: dict[str, Form] = {
    "reference": reference,
    **{form.__name__: _with_kernel(form) for form in (dense, written, folded, blocked)},
}

# Tokens from which a separable scheme is faster, or as fast and much smaller, without its bias or weights being held.
# CPU: 2 cores (avx2), the largest grid where the second form was slower lies below it, measured by
#   python scripts/benchmark.py --what attention --backends dense written blocked folded --grids 8 14 20 24 28 32
# CUDA: not measured; from here on the weights of a layer would outgrow its other activations.
CROSSOVERS: dict[tuple[str, str], int] = {
    ("cpu", "training"): 1024,
    ("cpu", "inference, terms that depend on the input"): 400,
    ("cpu", "inference, a bias that is kept"): 1156,
    ("cuda", "training"): 1024,
    ("cuda", "inference, terms that depend on the input"): 1024,
    ("cuda", "inference, a bias that is kept"): 1024,
}

# Tokens below which plain attention in 16 bits trains faster written out: the fused kernel of a CPU has a slow backward
# pass there. Measured on 2 cores with bfloat16 units by
#   python scripts/benchmark.py --what attention --dtype bfloat16 --presets none --backends written --grids 8 12 14
PLAIN_HALF = 196


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
        half: Whether queries, keys and values have 16 bits.
    """

    rel_pos: RelPos
    tokens: int
    device: str = "cpu"
    grad: bool = False
    full_grids: bool = True
    traced: bool = False
    dropout: bool = False
    mask_grad: bool = False
    half: bool = False

    def reads(self, *terms: str) -> bool:
        """Whether one of these terms is on."""
        return bool(set(terms) & set(self.rel_pos.terms))

    @property
    def adds_scores(self) -> bool:
        """Whether anything but content, u and rotary terms is on."""
        return self.reads("bias", "query", "key", "value") or self.rel_pos.prefix == "learned"

    @property
    def crossover(self) -> int:
        mode = "training"
        if not self.grad:
            free = not self.reads("query", "key", "value")
            mode = "inference, a bias that is kept" if free else "inference, terms that depend on the input"
        return CROSSOVERS["cpu" if self.device == "cpu" else "cuda", mode]

    @property
    def joint(self) -> bool:
        """Whether terms read joint tables."""
        return self.rel_pos.table == "joint" and self.reads("bias", "query", "key", "value")


def unsuited(backend: str, case: Case) -> str | None:
    """Why a backend cannot serve a call; None if it can."""
    if backend in ("folded", "blocked") and case.joint:
        return "needs one table per axis, and these are joint; set table='separable'"
    if backend == "written" and case.reads("value") and (case.joint or not case.full_grids):
        return "needs one table per axis and full grids for a value term"
    if backend == "blocked" and not case.full_grids:
        return "needs full grids, and these are points"
    if backend in ("written", "blocked"):
        if case.traced:
            return "has a backward pass of its own, which torch.compile, torch.export and torch.func cannot trace"
        if case.dropout:
            return "has no attention dropout; set attn_drop to 0"
        if case.mask_grad:
            return "gives a mask no gradient"
    return None


def check(backend: str, rel_pos: RelPos) -> None:
    """See that a backend exists and can serve a scheme.

    Raises:
        ValueError: If not, with the reason.
    """
    if backend != "auto" and backend not in BACKENDS:
        close = difflib.get_close_matches(backend, ["auto", *BACKENDS], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"backend: {backend!r} is unknown, expected one of auto, {', '.join(BACKENDS)}{hint}")
    choose(backend, Case(rel_pos, tokens=1))


def choose(backend: str, case: Case) -> str:
    """The backend to take.

    Args:
        backend: ``auto`` or a key of ``BACKENDS``.
        case: The call.

    Raises:
        ValueError: If the backend is asked for and cannot serve this call, with the reason.
    """
    if backend == "auto":
        return next(name for name in _preferred(case) if unsuited(name, case) is None)
    reason = unsuited(backend, case)
    if reason:
        raise ValueError(f"backend: {backend!r} {reason}, or use backend='auto'")
    return backend


def _preferred(case: Case) -> Iterator[str]:
    """Backends from the best to the one that always serves."""
    if case.adds_scores:
        if case.tokens >= case.crossover:
            if case.device == "cpu":
                yield "blocked"
            yield "folded"
        if case.device == "cpu" and (case.grad or (case.reads("query", "key", "value") and not case.joint)):
            yield "written"
    elif case.half and case.grad and case.device == "cpu" and case.tokens < PLAIN_HALF:
        yield "written"
    yield "dense"


def why(backend: str, case: Case) -> str:
    """Why ``auto`` takes this backend."""
    if not case.adds_scores:
        if backend == "written":
            return "nothing to add to the scores, in 16 bits: softmax written out head by head"
        return "nothing to add to the scores: plain fused attention"
    few = "fewer than" if case.tokens < case.crossover else "at least"
    how = {
        "dense": "one additive bias",
        "written": "softmax written out head by head",
        "folded": "extra columns of q and k, no bias",
        "blocked": "a few rows of queries at a time",
    }[backend]
    return f"{how}; {case.tokens} tokens, {few} {case.crossover}"


def extra_numbers(backend: str, case: Case, axes: Axes, grid_size: tuple[int, int], head_dim: int) -> int:
    """Numbers per head and image that the forward pass holds beyond plain fused attention: its largest tensors."""
    (h, w), spec, tokens = grid_size, case.rel_pos, case.tokens
    reads = [t for t in spec.terms if TERMS[t].reads and t not in ("v", "kernel")]
    contents = [t for t in reads if TERMS[t].needs_input and not TERMS[t].output]
    kernel = 0
    if "kernel" in spec.terms:
        kernel = w * (2 * h - 1) * w if by_rows(h * w, h * w) else (h * w) ** 2
    if backend == "reference":
        return tokens * tokens * (1 + len(spec.terms)) + (h * w * h * w * head_dim if reads else 0)
    if not reads and spec.prefix == "none":
        return kernel + (tokens * tokens if backend == "written" else 0)
    if spec.table == "joint":
        profiles = h * w * len(contents) * math.prod(axis.entries for axis in axes)
    else:
        profiles = h * w * (h + w) * (len(contents) + ("value" in reads))
    if backend == "blocked":
        return kernel + profiles + block_numbers(Grid(h, w), tokens)
    if backend == "folded":
        columns = (h + w) * len({"key" if t == "key" else "query" for t in reads if t != "value"})
        return kernel + profiles + 3 * tokens * max(columns, h + w)
    return kernel + profiles + tokens * tokens * (2 if backend == "dense" and "value" in reads else 1)
