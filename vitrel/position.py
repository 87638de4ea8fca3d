"""The parameters of a ``RelPos`` for one attention layer, as a module and as ready-to-use tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from vitrel.computed import MlpTable, SinusoidTable
from vitrel.initial import LOCAL
from vitrel.learned import LearnedTable
from vitrel.lookup import Axes, Tables
from vitrel.relpos import RelPos
from vitrel.rotary import AxialFrequencies, Frequencies, MixedFrequencies
from vitrel.stretched import Stretched
from vitrel.terms import TERMS, Term

T = TypeVar("T")
_NOTHING = object()

KEPT_BYTES = 128 << 20  # per layer; beyond, the oldest goes, and what is larger is made anew for each call


@dataclass(frozen=True)
class Position:
    """The position parameters of one attention layer, ready to use.

    Attributes:
        scales: Factor of ``content`` and of each term; its keys are the terms that are on.
        axes: Distance maps of rows and columns.
        tables: Per term that brings a table, what its table module returned, for all H heads.
        vectors: Per term that brings a vector, that vector, (H, d).
        prefix: Scalars (H, 3) for prefix->patch, patch->prefix and prefix->prefix, or None.
        kept: What ``recall`` keeps; None to keep nothing.
    """

    scales: dict[str, float]
    axes: Axes
    tables: dict[str, Tables]
    vectors: dict[str, Tensor]
    prefix: Tensor | None = None
    kept: dict[Hashable, Any] | None = None

    def recall(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returns, made once per key where this position keeps things; it must follow from both."""
        if self.kept is None:
            return make()
        found = self.kept.get(key, _NOTHING)
        if found is not _NOTHING:
            return cast(T, found)
        made = make()
        if _bytes(made) <= KEPT_BYTES:
            self.kept[key] = made
            while sum(map(_bytes, list(self.kept.values()))) > KEPT_BYTES:  # another thread may add to it meanwhile
                self.kept.pop(next(iter(list(self.kept))), None)
        return made

    @property
    def terms(self) -> tuple[str, ...]:
        return tuple(t for t in self.scales if t != "content")

    @property
    def frequencies(self) -> Tables | None:
        """Rotary frequencies (rows, columns), each (H or 1, d/2), if a rotary term is on."""
        return self.tables.get("rotary") or self.tables.get("rotary_mixed")


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
        self.rel_pos, self.num_heads, self.head_dim = rel_pos, num_heads, head_dim
        self.scales, self.axes, self.grid_size = rel_pos.scales(head_dim), rel_pos.axes(grid_size), grid_size
        self._kept: tuple[Hashable, list[Tensor], Position] | None = None
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self._vectors = [name for name in rel_pos.terms if TERMS[name].vector]
        self._vectors += ["prefix"] if rel_pos.prefix == "learned" else []
        for name in rel_pos.terms:
            term = TERMS[name]
            if term.table:
                self.add_module(name, self._table(term, dim, dd))
        for name in self._vectors:
            width = 3 if name == "prefix" else head_dim
            self.register_parameter(name, nn.Parameter(torch.zeros(num_heads, width, **dd)))

    def _table(self, term: Term, dim: int, dd: dict[str, Any]) -> nn.Module:
        spec, heads = self.rel_pos, 1 if self.rel_pos.share_heads else self.num_heads
        if term.table == "axial":
            return AxialFrequencies(self.head_dim, self.grid_size, spec.theta or 100.0, spec.resize, dd["device"])
        if term.table == "mixed":
            return MixedFrequencies(heads, self.head_dim, self.grid_size, spec.theta or 10.0, spec.resize, **dd)
        width = self.head_dim if term.table == "vector" else None
        options: dict[str, Any]
        if spec.source == "mlp":
            options = {"coords": spec.mlp_coords, "hidden": spec.mlp_hidden, "resize": spec.resize}
            return MlpTable(heads, self.axes, **options, **dd)
        local = spec.init if spec.init in LOCAL and term.table == "scalar" else None
        std = self._init_std(term)
        if spec.source == "sinusoid":
            options = {"sinusoid_width": dim, "resize": spec.resize, "init_std": std}
            return SinusoidTable(heads, self.axes, width, **options, **dd)
        weights = term.table == "weights"
        options = {"joint": weights or spec.table == "joint", "sums": weights}
        options |= {"resize": spec.resize, "init_std": std, "local": local}
        return LearnedTable(heads, self.axes, width, **options, **dd)

    def _init_std(self, term: Term) -> float:
        normal = term.table == "vector" or self.rel_pos.source == "sinusoid"
        init = self.rel_pos.init
        if init is None or init in LOCAL:
            init = "normal" if normal else "zeros"
        return {"zeros": 0.0, "normal": self.rel_pos.init_std, "scaled": self.head_dim**-0.5}[init]

    def reset_parameters(self) -> None:
        for _, vector in self.named_parameters(recurse=False):
            nn.init.zeros_(vector)

    def set_grid_size(self, grid_size: tuple[int, int]) -> None:
        """Give the tables the size of another grid (h, w), by the rule ``rel_pos.resize``."""
        self.axes, self.grid_size = self.rel_pos.axes(grid_size), grid_size
        for table in self.children():
            if isinstance(table, Frequencies):
                table.grid_size = grid_size
            elif isinstance(table, (LearnedTable, SinusoidTable, MlpTable)):
                table.set_axes(self.axes)

    def covers(self, dh: Tensor, dw: Tensor, as_they_are: bool = False) -> Tensor:
        """Whether the entries that offsets (dh, dw) read can have been trained, boolean, their common shape.

        An entry is not covered where a table was made larger than the grid it was trained on (``clamp``, ``crop``), or
        where a larger grid reads past its end without a ``max_distance`` that was chosen for it.
        ``as_they_are``: tables are not stretched to that grid, whatever ``rel_pos.resize`` says.
        """
        spec = self.rel_pos
        kept = as_they_are or spec.resize in ("clamp", "crop")
        follows_grid = spec.distance == "clamp" and spec.max_distance is None and kept
        covered = torch.ones(torch.broadcast_shapes(dh.shape, dw.shape), dtype=torch.bool)
        for table in self.children():
            if isinstance(table, LearnedTable):
                for offset, axis, known in zip((dh, dw), self.axes, table.trained_reach(), strict=True):
                    beyond = offset.abs() if follows_grid else axis.bucket(offset)
                    covered = covered & (beyond <= known)
        return covered

    def forward(self, grid_size: tuple[int, int] | None = None, reads: tuple[int, int] | None = None) -> Position:
        """The position of the tables' own grid, or of another one (h, w) at run time.

        For another grid the tables are resized on the fly by ``rel_pos.resize``; ``clamp`` reads them as they are.
        ``reads`` is the grid (h, w) whose offsets will be read, where it is another one than that of the tables:
        nothing is stretched to it, and tables that are computed give the entries beyond their own.
        In inference on a CPU, what follows from parameters and grid alone is kept for the next call, which compares
        every value of every parameter before it takes it.
        """
        read = reads or grid_size
        if read is not None and self.training and torch.is_grad_enabled():
            for module in self.children():
                if isinstance(module, LearnedTable):
                    module.note_training(read)
        if torch.compiler.is_compiling():
            return self._position(grid_size, reads)
        if not self._may_keep():
            self._kept = None
            return self._position(grid_size, reads)
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        made_for = tuple(table.made_for for table in self.children() if isinstance(table, Stretched))
        other = self._other_axes(grid_size, reads)
        key = (
            grid_size or self.grid_size,
            other or self.axes,
            self.axes,
            made_for,
            self.rel_pos,
            tuple(self.scales.items()),
            autocast,
        )
        parameters = list(self.parameters())
        kept = self._kept  # another thread may set it to None
        if kept is not None and kept[0] == key and _same(kept[1], parameters):
            return kept[2]
        position = replace(self._position(grid_size, reads), kept={})
        self._kept = (key, [p.detach().clone() for p in parameters], position)
        return position

    def _may_keep(self) -> bool:
        return (
            not self.training
            and not getattr(self, "_is_replica", False)  # of DataParallel, which lists no parameters
            and not torch.is_grad_enabled()
            and not torch.jit.is_tracing()
            and not torch._C._are_functorch_transforms_active()
            and all(type(p) is nn.Parameter and p.device.type == "cpu" for p in self.parameters())
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def _other_axes(self, grid_size: tuple[int, int] | None, reads: tuple[int, int] | None) -> Axes | None:
        """Distance maps that tables are read by, where they are not their own."""
        computed = self.rel_pos.source != "learned"
        if grid_size is not None:
            return self.rel_pos.axes(grid_size) if computed or self.rel_pos.resize != "clamp" else None
        if not computed or reads is None:
            return None
        rows, cols = (max(sides) for sides in zip(reads, self.grid_size, strict=True))
        return None if (rows, cols) == self.grid_size else self.rel_pos.axes((rows, cols))

    def _position(self, grid_size: tuple[int, int] | None, reads: tuple[int, int] | None) -> Position:
        other = self._other_axes(grid_size, reads)
        vectors: dict[str, Tensor] = {name: getattr(self, name) for name in self._vectors}
        return Position(
            scales=self.scales,
            axes=other or self.axes,
            tables={
                name: tuple(t.expand(self.num_heads, *t.shape[1:]) for t in self._entries(table, grid_size, other))
                for name, table in self.named_children()
            },
            prefix=vectors.pop("prefix", None),
            vectors=vectors,
        )

    @staticmethod
    def _entries(table: nn.Module, grid_size: tuple[int, int] | None, other: Axes | None) -> Tables:
        if isinstance(table, Frequencies):
            found = table(grid_size)
        elif isinstance(table, LearnedTable):
            found = table(other)
        else:
            found = table(other, stretch=grid_size is not None)
        return cast(Tables, found)

    def extra_repr(self) -> str:
        return f"{'+'.join(self.rel_pos.terms) or 'none'}, table={self.rel_pos.table}, source={self.rel_pos.source}"


def _bytes(made: Any) -> int:
    parts = made if isinstance(made, tuple) else (made,)
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))


def _same(old: list[Tensor], new: list[nn.Parameter]) -> bool:
    return len(old) == len(new) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(old, new, strict=True))
