"""Which relative position a model has: ``RelPos`` (plain data), and the presets.

A scheme of the literature is a set of terms (``vitrel.terms``) with a kind of table; a preset is a name for one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vitrel.grid import BUCKETS, AxisDistance
from vitrel.initial import LOCAL
from vitrel.lookup import Axes
from vitrel.resize import RESIZE
from vitrel.terms import TERMS

_PIECEWISE = {"distance": "piecewise", "exact": 1.9, "buckets": 3.8, "max_distance": 15.2}

PRESETS: dict[str, dict[str, Any]] = {
    "none": {"terms": ()},
    "bias": {"terms": ("bias",)},
    "swin": {"terms": ("bias",), "table": "joint"},
    "beit": {"terms": ("bias",), "table": "joint", "prefix": "learned"},
    "levit": {"terms": ("bias",), "table": "joint", "directed": False},
    "t5": {"terms": ("bias",), "distance": "t5_log"},
    "txl": {"terms": ("query", "u", "v")},
    "txl_learned": {"terms": ("query", "u", "bias")},
    "shaw": {"terms": ("query", "value")},
    "deberta": {"terms": ("query", "key"), "scale": "deberta"},
    "sam": {"terms": ("query",), "scale": "content"},
    "irpe_k": {"terms": ("query",), "table": "joint", **_PIECEWISE},
    "irpe_qk": {"terms": ("query", "key"), "table": "joint", **_PIECEWISE},
    "irpe_qkv": {"terms": ("query", "key", "value"), "table": "joint", **_PIECEWISE},
    "cpb": {"terms": ("bias",), "table": "joint", "source": "mlp"},
    "rope": {"terms": ("rotary",)},
    "rope_mixed": {"terms": ("rotary_mixed",)},
}

DEFAULT = "bias+kernel"
"""The scheme that a model takes unless another is asked for: RESULTS.md has the measurements behind it."""

# exact, buckets and max_distance of the originals: T5's 32 buckets to 128, DeBERTa's log buckets on a patch grid, iRPE
DISTANCES: dict[str, tuple[float, float, float] | None] = {
    "clamp": None,
    "t5_log": (8, 15, 128),
    "deberta_log": (8, 16, 64),
    "piecewise": (1.9, 3.8, 15.2),
}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _one_of(field: str, value: object, allowed: Iterable[str]) -> ValueError:
    allowed = list(allowed)
    close = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"rel_pos: {field} {value!r} is unknown, expected one of {', '.join(allowed)}{hint}")


@dataclass(frozen=True)
class RelPos:
    """A relative position scheme: which terms, and what their tables are.

    Attributes:
        terms: Names of the position terms; the content term is always there.
        table: ``separable`` (one table per axis, summed) or ``joint`` (one over (Δh, Δw)).
        source: ``learned`` entries, ``sinusoid`` through a learned projection (separable), or ``mlp`` over log-spaced
            offsets (joint, scalar tables).
        distance: Distance map: ``clamp``, ``t5_log``, ``deberta_log``, ``piecewise``.
        max_distance: In patches, one number or a pair (h, w). ``clamp``: the largest distance with an entry of its own,
            None for the grid's; larger offsets share the last entry, and have none in a kernel. Other maps: where the
            last bucket is reached.
        buckets: Largest bucket of the logarithmic maps (iRPE's β); None for the original's.
        exact: Distances up to it (T5: below it) have buckets of their own (iRPE's α); None for the original's.
        directed: False to read Δ and -Δ as one (LeViT).
        share_heads: One table for all heads.
        share_layers: One set of tables and vectors for all layers of a model.
        scale: Of scores. ``sum`` scales every term but the bias by s; ``content`` the content alone (SAM, MViTv2);
            ``deberta`` all by 1/sqrt(d(1+n)), n the number of query and key terms; ``seed`` content and query alone,
            not u and v.
        prefix: ``none``, or ``learned``: a scalar per head for prefix->patch, patch->prefix and prefix->prefix (BEiT).
        resize: Rule by which tables, what computes their entries, and rotary angles follow another grid.
            ``interpolate`` and ``geometric`` (for angles the same) stretch or squeeze them, for pictures enlarged or
            reduced; ``clamp`` and ``crop`` do not, for more at the same magnification.
        init: How learned tables start: ``zeros``, ``normal`` (truncated, ``init_std``), ``scaled`` (normal, 1/sqrt(d)),
            or None: zeros for scalar tables, normal for vector tables. A sinusoid's projections start normal unless
            ``zeros``. ``alibi`` and ``convit`` start the bias so that near patches are favoured (``vitrel.initial``),
            and vector tables as None does.
        init_std: Standard deviation of ``normal``.
        theta: Base of the rotary frequencies; None for the originals' 100 (axial) and 10 (mixed).
        mlp_coords: ``swin`` or ``cr``, see ``MlpTable``.
        mlp_hidden: Width of the hidden layer of ``mlp``.

    Raises:
        ValueError: One line that names the field, for a value that is not one of these.
    """

    terms: tuple[str, ...] = ()
    table: str = "separable"
    source: str = "learned"
    distance: str = "clamp"
    max_distance: float | tuple[float, float] | None = None
    buckets: float | None = None
    exact: float | None = None
    directed: bool = True
    share_heads: bool = False
    share_layers: bool = False
    scale: str = "sum"
    prefix: str = "none"
    resize: str = "interpolate"
    init: str | None = None
    init_std: float = 0.02
    theta: float | None = None
    mlp_coords: str = "swin"
    mlp_hidden: int = 512

    def __post_init__(self) -> None:
        if not isinstance(self.terms, (str, tuple, list)):
            raise ValueError(f"rel_pos: terms must be a list of names, got {self.terms!r}")
        if isinstance(self.terms, str):
            raise ValueError(f"rel_pos: terms {self.terms!r} is a string, expected a list such as [{self.terms!r}]")
        for term in self.terms:
            if term not in TERMS:
                raise _one_of("term", term, TERMS)
        # The order of TERMS, so that equal sets compare equal and draw their initial values in the same order.
        object.__setattr__(self, "terms", tuple(t for t in TERMS if t in self.terms))
        choices: dict[str, Iterable[str]] = {
            "table": ("separable", "joint"),
            "source": ("learned", "sinusoid", "mlp"),
            "distance": BUCKETS,
            "scale": ("sum", "content", "deberta", "seed"),
            "prefix": ("none", "learned"),
            "resize": RESIZE,
            "mlp_coords": ("swin", "cr"),
        }
        if self.init is not None:
            choices["init"] = ("zeros", "normal", "scaled", *LOCAL)
        for field, allowed in choices.items():
            if getattr(self, field) not in list(allowed):
                raise _one_of(field, getattr(self, field), allowed)
        for field in ("directed", "share_heads", "share_layers"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"rel_pos: {field} must be true or false, got {getattr(self, field)!r}")
        self._check_numbers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        for field in ("init_std", "theta", "buckets", "exact", "mlp_hidden"):
            value = getattr(self, field)
            if value is not None and (not _is_number(value) or not 0 <= value < math.inf):
                raise ValueError(f"rel_pos: {field} must be a number of at least 0, got {value!r}")
        if not isinstance(self.mlp_hidden, int) or self.mlp_hidden < 1:
            raise ValueError(f"rel_pos: mlp_hidden must be a whole number of at least 1, got {self.mlp_hidden!r}")
        if self.theta is not None and not self.theta > 0:
            raise ValueError(f"rel_pos: theta must be above 0, got {self.theta!r}")
        if self.max_distance is None:
            return
        pair = self.max_distance if isinstance(self.max_distance, (tuple, list)) else (self.max_distance,) * 2
        number = int if self.distance == "clamp" else (int, float)
        if len(pair) != 2 or not all(_is_number(k) and isinstance(k, number) and k >= 0 for k in pair):
            raise ValueError(
                f"rel_pos: max_distance must be a number of patches or a pair (h, w), got {self.max_distance!r}"
            )
        object.__setattr__(self, "max_distance", tuple(pair))

    def _check_combinations(self) -> None:
        for term in self.terms:
            reads = TERMS[term].reads
            if reads and reads not in self.terms:
                raise ValueError(f"rel_pos: term {term!r} reads the table of {reads!r}; add {reads!r} to the terms")
        if self.init in LOCAL:
            if "bias" not in self.terms or self.source != "learned":
                raise ValueError(
                    f"rel_pos: init={self.init!r} fills the learned table of the bias; add 'bias' to the terms, with "
                    "source='learned', or take another init"
                )
            if self.share_heads or not self.directed:
                raise ValueError(
                    f"rel_pos: init={self.init!r} begins each head in its own way and direction; leave share_heads and "
                    "directed as they are, or take another init"
                )
        if {"rotary", "rotary_mixed"} <= set(self.terms):
            raise ValueError("rel_pos: 'rotary' and 'rotary_mixed' turn the same features; take one of them")
        if self.source != "learned" and "kernel" in self.terms:
            raise ValueError("rel_pos: a kernel has learned weights; use source='learned', or leave 'kernel' out")
        if self.source == "sinusoid" and self.table == "joint":
            raise ValueError("rel_pos: a sinusoid table is separable by construction; use table='separable'")
        if self.source == "mlp" and (self.table != "joint" or any(TERMS[t].table == "vector" for t in self.terms)):
            raise ValueError(
                "rel_pos: source='mlp' makes joint scalar tables; use table='joint' and the bias term alone"
            )
        if self.source != "learned" and (self.distance != "clamp" or not self.directed):
            raise ValueError(f"rel_pos: source={self.source!r} needs distance='clamp' and directed=True")
        if self.distance == "clamp" and (self.buckets is not None or self.exact is not None):
            raise ValueError(
                "rel_pos: buckets and exact belong to a logarithmic distance; set distance, or leave them out"
            )
        if self.theta is not None and not {"rotary", "rotary_mixed"} & set(self.terms):
            raise ValueError("rel_pos: theta belongs to a rotary term; add 'rope' or 'rope_mixed', or leave it out")
        if self.distance != "clamp":
            exact, buckets, largest = self._log_numbers()
            if not 0 < exact <= buckets or not all(exact < m for m in largest):
                raise ValueError(
                    f"rel_pos: {self.distance} needs 0 < exact <= buckets and exact < max_distance, "
                    f"got exact={exact}, buckets={buckets}, max_distance={largest}"
                )

    def _log_numbers(self) -> tuple[float, float, tuple[float, float]]:
        defaults = DISTANCES[self.distance]
        assert defaults is not None
        buckets = defaults[1] if self.buckets is None else self.buckets
        ratio = (buckets + 1) / (defaults[1] + 1) if self.distance == "t5_log" else buckets / defaults[1]
        exact = defaults[0] * ratio if self.exact is None else self.exact
        if self.distance != "piecewise":
            exact = int(exact)
        if isinstance(self.max_distance, tuple):
            return exact, buckets, self.max_distance
        return exact, buckets, (defaults[2] * ratio,) * 2

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
        if "terms" in changes:
            raise ValueError(
                f"rel_pos: preset {name!r} names the terms, and so does terms={changes['terms']!r}; give one of "
                "the two, or names joined with '+'"
            )
        merged: dict[str, Any] = {"terms": ()}
        for part in name.split("+"):
            preset = PRESETS.get(part) or ({"terms": (part,)} if part in TERMS else None)
            if preset is None:
                raise _one_of("preset", part, [*PRESETS, *(t for t in TERMS if t not in PRESETS)])
            merged["terms"] += tuple(preset["terms"])
            chosen = {k: v for k, v in preset.items() if k != "terms"}
            if part in PRESETS and any(TERMS[t].reads for t in preset["terms"]):
                chosen = {
                    **{k: getattr(cls(), k) for k in ("table", "source", "distance", "directed", "scale")},
                    **chosen,
                }
            for field, value in chosen.items():
                if merged.setdefault(field, value) != value and field not in changes:
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

    def axes(self, grid_size: tuple[int, int]) -> Axes:
        """The distance maps of rows and columns for a grid of (h, w) patches."""
        if self.distance == "clamp":
            rows, cols = grid_size[0] - 1, grid_size[1] - 1  # not by int(), which would fix a size traced as a variable
            if isinstance(self.max_distance, tuple):
                rows, cols = int(self.max_distance[0]), int(self.max_distance[1])
            return (
                AxisDistance("clamp", rows, directed=self.directed),
                AxisDistance("clamp", cols, directed=self.directed),
            )
        exact, buckets, largest = self._log_numbers()
        return tuple(  # type: ignore[return-value]
            AxisDistance(self.distance, int(buckets), exact, buckets, largest_of_axis, self.directed)
            for largest_of_axis in largest
        )

    def differing(self, other: RelPos) -> list[str]:
        """Fields in which another scheme differs and that change the parameters or what they mean."""
        free = ("resize", "init", "init_std")
        return [f.name for f in fields(self) if f.name not in free and getattr(self, f.name) != getattr(other, f.name)]

    def scales(self, head_dim: int) -> dict[str, float]:
        """Factor of the content and of each position term, for heads of width ``head_dim``."""
        s = head_dim**-0.5
        if self.scale == "deberta":
            s = (head_dim * (1 + len({"query", "key"} & set(self.terms)))) ** -0.5
        unscaled = {"content": set(TERMS), "seed": {"u", "v"}}.get(self.scale, set())
        # Rotary terms are content, turned; a kernel's is no score, and its scale lets it learn at the others' rate.
        always = {"rotary": s, "rotary_mixed": s, "kernel": head_dim**-0.5}
        by_term = {t: s if TERMS[t].scaled and t not in unscaled else 1.0 for t in self.terms}
        return {"content": s, **by_term, **{t: always[t] for t in self.terms if t in always}}
