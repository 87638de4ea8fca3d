"""Which relative position a model has: ``RelPos`` (plain data), the presets, the terms, and their parameters.

With s = 1/sqrt(d), offset Δ = query minus key and R(Δ) read from a table, the score of query i and key j is

    content  s * q_i.k_j          always there
    bias     β(Δ)                 scalar table, never scaled (T5, Swin, BEiT)
    query    s * q_i.R(Δ)         vector table (Transformer-XL's term b, Shaw's keys)
    u        s * u.k_j            vector per head (Transformer-XL's term c)
    v        s * v.R(Δ)           vector per head, the table of the query term (Transformer-XL's term d)

A scheme of the literature is a set of these terms; a preset is a name for one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrel.tables import LearnedTable, SinusoidTable, Tables


@dataclass(frozen=True)
class Term:
    """One summand of the score.

    Attributes:
        score: ``(q, k, vector, table) -> summand``, unscaled, broadcastable to (B, H, Lq, Lk). ``q`` is (B, H, Lq, d),
            ``k`` is (B, H, Lk, d), ``vector`` is (H, d), ``table`` is (H, Lq, Lk[, d]) as read at each pair.
        table: Kind of table that the term brings, if any.
        reads: Name of the term whose table it reads, if it reads one.
        vector: Whether it brings a vector per head, named after the term.
        scaled: Whether 1/sqrt(d) applies.
        everywhere: Whether it acts on prefix tokens too, and not only between patches.
        needs_input: Whether it depends on q or k.
    """

    score: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    table: Literal["scalar", "vector"] | None = None
    reads: str | None = None
    vector: bool = False
    scaled: bool = True
    everywhere: bool = False
    needs_input: bool = True


CONTENT = Term(lambda q, k, vector, table: torch.einsum("bhid,bhjd->bhij", q, k), everywhere=True)

TERMS: dict[str, Term] = {
    "bias": Term(
        lambda q, k, vector, table: table[None],
        table="scalar",
        reads="bias",
        scaled=False,
        needs_input=False,
    ),
    "query": Term(
        lambda q, k, vector, table: torch.einsum("bhid,hijd->bhij", q, table),
        table="vector",
        reads="query",
    ),
    "u": Term(
        lambda q, k, vector, table: torch.einsum("hd,bhjd->bhj", vector, k)[:, :, None],
        vector=True,
        everywhere=True,
    ),
    "v": Term(
        lambda q, k, vector, table: torch.einsum("hd,hijd->hij", vector, table)[None],
        reads="query",
        vector=True,
        needs_input=False,
    ),
}

PRESETS: dict[str, dict[str, Any]] = {
    "none": {"terms": ()},
    "bias": {"terms": ("bias",)},
    "txl": {"terms": ("query", "u", "v")},
    "txl_learned": {"terms": ("query", "u", "bias")},
}


def _one_of(field: str, value: object, allowed: list[str]) -> ValueError:
    close = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"rel_pos: {field} {value!r} is unknown, expected one of {', '.join(allowed)}{hint}")


@dataclass(frozen=True)
class RelPos:
    """A relative position scheme: which terms, and what their tables are.

    Attributes:
        terms: Names of the position terms; the content term is always there.
        table: ``separable`` (one table per axis, summed) or ``joint`` (one over (Δh, Δw)).
        source: ``learned`` entries, or ``sinusoid`` through a learned projection (separable only).
        max_distance: Largest distance with an entry of its own, in patches, per axis or as a pair (h, w); None for the
            grid's own. Larger offsets share the last entry.
        scale: ``sum`` scales every term but the bias by 1/sqrt(d); ``content`` scales the content alone (SAM, MViTv2).
        init: How learned tables start: ``zeros``, ``normal`` (truncated, ``init_std``), or None for zeros in scalar
            tables and normal in vector tables. A sinusoid's projections start normal unless ``init`` is ``zeros``.
        init_std: Standard deviation of ``normal``.

    Raises:
        ValueError: One line that names the field, for a value that is not one of these.
    """

    terms: tuple[str, ...] = ()
    table: str = "separable"
    source: str = "learned"
    max_distance: int | tuple[int, int] | None = None
    scale: str = "sum"
    init: str | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if isinstance(self.terms, str):
            raise ValueError(f"rel_pos: terms {self.terms!r} is a string, expected a list such as [{self.terms!r}]")
        for term in self.terms:
            if term not in TERMS:
                raise _one_of("term", term, list(TERMS))
        # The order of TERMS, so that equal sets compare equal and draw their initial values in the same order.
        object.__setattr__(self, "terms", tuple(t for t in TERMS if t in self.terms))
        for term in self.terms:
            reads = TERMS[term].reads
            if reads and reads not in self.terms:
                raise ValueError(f"rel_pos: term {term!r} reads the table of {reads!r}; add {reads!r} to the terms")
        if self.table not in ("separable", "joint"):
            raise _one_of("table", self.table, ["separable", "joint"])
        if self.source not in ("learned", "sinusoid"):
            raise _one_of("source", self.source, ["learned", "sinusoid"])
        if self.source == "sinusoid" and self.table == "joint":
            raise ValueError("rel_pos: a sinusoid table is separable by construction; use table='separable'")
        if self.scale not in ("sum", "content"):
            raise _one_of("scale", self.scale, ["sum", "content"])
        if self.init not in (None, "zeros", "normal"):
            raise _one_of("init", self.init, ["zeros", "normal"])
        if not isinstance(self.init_std, (int, float)) or not self.init_std >= 0:
            raise ValueError(f"rel_pos: init_std must be at least 0, got {self.init_std!r}")
        if self.max_distance is not None:
            pair = self.max_distance if isinstance(self.max_distance, (tuple, list)) else (self.max_distance,) * 2
            if len(pair) != 2 or not all(isinstance(k, int) and k >= 0 for k in pair):
                raise ValueError(
                    f"rel_pos: max_distance must be a number of patches or a pair (h, w), got {self.max_distance!r}"
                )
            object.__setattr__(self, "max_distance", tuple(pair))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> RelPos:
        """A named scheme, or several names (presets or terms) joined with ``+``, such as ``"txl+bias"``.

        Args:
            name: Names joined with ``+``; their terms are united.
            **changes: Other fields of ``RelPos``.

        Raises:
            ValueError: If a name or a field is unknown, or two names set a field differently.
        """
        if not isinstance(name, str):
            raise ValueError(f"rel_pos: expected the name of a preset, got {name!r}")
        merged: dict[str, Any] = {"terms": ()}
        for part in name.split("+"):
            preset = PRESETS.get(part) or ({"terms": (part,)} if part in TERMS else None)
            if preset is None:
                raise _one_of("preset", part, [*PRESETS, *(t for t in TERMS if t not in PRESETS)])
            for field, value in preset.items():
                if field == "terms":
                    merged["terms"] += tuple(value)
                elif merged.setdefault(field, value) != value:
                    raise ValueError(f"rel_pos: the parts of {name!r} disagree on {field}; give {field} explicitly")
        return cls.of({**merged, **changes})

    @classmethod
    def of(cls, spec: RelPos | str | Mapping[str, Any] | None) -> RelPos:
        """Read what a user gives as ``rel_pos``.

        Args:
            spec: A RelPos, a name, a mapping of fields (``preset`` may be one of them), or None for no position.

        Raises:
            ValueError: One line that names what is wrong.
        """
        if isinstance(spec, RelPos):
            return spec
        if spec is None:
            return cls()
        if isinstance(spec, str):
            return cls.preset(spec)
        if not isinstance(spec, Mapping):
            raise ValueError(f"rel_pos: expected a name, a mapping or a RelPos, got {spec!r}")
        allowed = [f.name for f in fields(cls)]
        for key in spec:
            if key not in allowed and key != "preset":
                raise _one_of("field", key, ["preset", *allowed])
        if "preset" in spec:
            return cls.preset(spec["preset"], **{k: v for k, v in spec.items() if k != "preset"})
        return cls(**spec)

    def as_dict(self) -> dict[str, Any]:
        """Plain data (for JSON and YAML) that ``RelPos.of`` reads back to an equal RelPos."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def distances(self, grid_size: tuple[int, int]) -> tuple[int, int]:
        """(Kh, Kw), the largest distances with an entry of their own, for a grid of (h, w) patches."""
        if isinstance(self.max_distance, tuple):
            return self.max_distance
        return grid_size[0] - 1, grid_size[1] - 1

    def scales(self, head_dim: int) -> dict[str, float]:
        """Factor of the content and of each position term, for heads of width ``head_dim``."""
        s = head_dim**-0.5
        by_term = {t: s if TERMS[t].scaled and self.scale == "sum" else 1.0 for t in self.terms}
        return {"content": s, **by_term}


@dataclass(frozen=True)
class Position:
    """The position parameters of one attention layer, ready to use.

    Attributes:
        scales: Factor of ``content`` and of each term; its keys are the terms that are on.
        tables: Per term that brings a table, what its table module returned.
        vectors: Per term that brings a vector, that vector, (H, d).
    """

    scales: dict[str, float]
    tables: dict[str, Tables]
    vectors: dict[str, Tensor]

    @property
    def terms(self) -> tuple[str, ...]:
        return tuple(t for t in self.scales if t != "content")

    def reads(self, term: str) -> Tables | None:
        """The tables that a term reads, if any."""
        name = TERMS[term].reads
        return self.tables[name] if name else None


class PositionTerms(nn.Module):
    """The parameters of a ``RelPos`` for one attention layer; ``forward()`` gives the ``Position``.

    Args:
        rel_pos: The scheme.
        dim: D, the model's width, which is that of the sinusoids.
        num_heads: H.
        head_dim: d.
        grid_size: (h, w) in patches; gives the tables their size where ``rel_pos.max_distance`` is None.
    """

    def __init__(
        self,
        rel_pos: RelPos,
        dim: int,
        num_heads: int,
        head_dim: int,
        grid_size: tuple[int, int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rel_pos = rel_pos
        self.scales = rel_pos.scales(head_dim)
        max_distance = rel_pos.distances(grid_size)
        for name in rel_pos.terms:
            term = TERMS[name]
            if term.table:
                width = head_dim if term.table == "vector" else None
                std = rel_pos.init_std if self._starts_normal(term) else 0.0
                self.add_module(name, self._table(num_heads, max_distance, width, std, dim, device, dtype))
            if term.vector:
                vector = torch.zeros(num_heads, head_dim, device=device, dtype=dtype)
                self.register_parameter(name, nn.Parameter(vector))

    def _table(
        self,
        num_heads: int,
        max_distance: tuple[int, int],
        width: int | None,
        init_std: float,
        dim: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> nn.Module:
        args: dict[str, Any] = {"init_std": init_std, "device": device, "dtype": dtype}
        if self.rel_pos.source == "sinusoid":
            return SinusoidTable(num_heads, max_distance, width, sinusoid_width=dim, **args)
        return LearnedTable(num_heads, max_distance, width, joint=self.rel_pos.table == "joint", **args)

    def _starts_normal(self, term: Term) -> bool:
        if self.rel_pos.init is not None:
            return self.rel_pos.init == "normal"
        return term.table == "vector" or self.rel_pos.source == "sinusoid"

    def reset_parameters(self) -> None:
        for _, vector in self.named_parameters(recurse=False):
            nn.init.zeros_(vector)

    def forward(self) -> Position:
        return Position(
            scales=self.scales,
            tables={name: table() for name, table in self.named_children()},
            vectors=dict(self.named_parameters(recurse=False)),
        )

    def extra_repr(self) -> str:
        return f"{'+'.join(self.rel_pos.terms) or 'none'}, table={self.rel_pos.table}, source={self.rel_pos.source}"
