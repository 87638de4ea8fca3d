"""The terms that position can add to attention: formula, and what each brings to learn.

With s = 1/sqrt(d), offset Δ = query minus key, and R, P, V read from tables:

    content  s * q_i.k_j               always there
    bias     β(Δ)                      scalar table, never scaled
    query    s * q_i.R(Δ)              vector table (c2p)
    key      s * k_j.P(Δ)              vector table, the same Δ (p2c)
    u        s * u.k_j                 vector per head
    v        s * v.R(Δ)                vector per head, the table of the query term
    rotary   s * (Tq_i.Tk_j - q_i.k_j) T turns feature pairs by angles of (row, column)
    value    out_i += Σ_j A_ij V(Δ)    vector table, after the softmax
    kernel   out_i += s Σ_j W(Δ) v_j   joint scalar table, after the softmax: a convolution (CoAtNet, arXiv 2106.04803)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Term:
    """One summand of the score, or (``value``, ``kernel``) of the output.

    Attributes:
        formula: ``(q, k, vector, table) -> summand``, unscaled, broadcastable to (B, H, Lq, Lk), with ``q``
            (B, H, Lq, d), ``k`` (B, H, Lk, d), ``vector`` (H, d), and ``table`` (B, H, Lq, Lk[, d]) as read at each
            pair. A rotary term gets q and k turned. A term of the output gets the weights (B, H, Lq, Lk) for q and v
            for k, and its summand is (B, H, Lq, d).
        table: What the term brings, if anything, that is looked up by position. ``weights`` is a scalar table that is
            joint whatever the scheme's are, since a sum over the axes is no kernel, and 0 where ``clamp`` would repeat
            its last entry.
        reads: Name of the term whose table it reads, if it reads one.
        vector: Whether it brings a vector per head, named after the term.
        scaled: Whether 1/sqrt(d) applies.
        everywhere: Whether it acts on prefix tokens too, and not only between patches.
        needs_input: Whether it depends on q, k or v.
        output: Whether it adds to the output, after the softmax, and not to the scores.
    """

    formula: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    table: Literal["scalar", "vector", "axial", "mixed", "weights"] | None = None
    reads: str | None = None
    vector: bool = False
    scaled: bool = True
    everywhere: bool = False
    needs_input: bool = True
    output: bool = False


CONTENT = Term(lambda q, k, vector, table: torch.einsum("bhid,bhjd->bhij", q, k), everywhere=True)

TERMS: dict[str, Term] = {
    "bias": Term(lambda q, k, vector, table: table, table="scalar", reads="bias", scaled=False, needs_input=False),
    "query": Term(
        lambda q, k, vector, table: torch.einsum("bhid,bhijd->bhij", q, table), table="vector", reads="query"
    ),
    "key": Term(lambda q, k, vector, table: torch.einsum("bhjd,bhijd->bhij", k, table), table="vector", reads="key"),
    "u": Term(
        lambda q, k, vector, table: torch.einsum("hd,bhjd->bhj", vector, k)[:, :, None], vector=True, everywhere=True
    ),
    "v": Term(
        lambda q, k, vector, table: torch.einsum("hd,bhijd->bhij", vector, table),
        reads="query",
        vector=True,
        needs_input=False,
    ),
    "rotary": Term(CONTENT.formula, table="axial", everywhere=True),
    "rotary_mixed": Term(CONTENT.formula, table="mixed", everywhere=True),
    "value": Term(
        lambda weights, v, vector, table: torch.einsum("bhij,bhijd->bhid", weights, table),
        table="vector",
        reads="value",
        scaled=False,
        output=True,
    ),
    "kernel": Term(
        lambda weights, v, vector, table: torch.einsum("bhij,bhjd->bhid", table, v),
        table="weights",
        reads="kernel",
        output=True,
    ),
}
