"""A relative position table whose entries are parameters, and how it is loaded, resized and noted as trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vitrel.grid import AxisDistance
from vitrel.initial import LOCAL, fill
from vitrel.lookup import Axes, Tables
from vitrel.resize import resize_table


class LearnedTable(nn.Module):
    """A table whose entries are parameters: ``table_h`` and ``table_w``, or ``table``.

    Args:
        heads: H, or 1 for one table shared by all heads.
        axes: Distance maps of rows and columns; they give the number of entries.
        width: d for a vector table, None for a scalar one.
        joint: One table over (Δh, Δw) instead of one per axis.
        resize: Rule by which a table of another size is loaded, a key of ``RESIZE``.
        init_std: Standard deviation of the truncated normal that fills it; 0 fills it with zeros.
        local: A key of ``LOCAL`` to fill a scalar table with instead.
        sums: Whether entries are weights in a sum over keys, which another size has more or fewer of.
    """

    trained: Tensor
    notes = ("offset_h", "offset_w", "trained")
    """What a checkpoint holds beside the entries, where it cannot be read off their shape."""

    def __init__(
        self,
        heads: int,
        axes: Axes,
        width: int | None = None,
        *,
        joint: bool = False,
        resize: str = "clamp",
        init_std: float = 0.0,
        local: str | None = None,
        sums: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.axes, self.resize, self.init_std, self.local, self.sums = axes, resize, init_std, local, sums
        tail = () if width is None else (width,)
        rows, cols = (axis.entries for axis in axes)
        shapes = {"table": (rows, cols)} if joint else {"table_h": (rows,), "table_w": (cols,)}
        self._names = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(heads, *shape, *tail, device=device, dtype=dtype)))
        self.register_buffer("trained", torch.empty(2, dtype=torch.int64, device=device))
        self._noted = (0, 0)  # known to be in it, so that a step need not read it from the device
        self.reset_parameters()

    @property
    def tables(self) -> Tables:
        """The entries as they are; by name, since the replicas of ``DataParallel`` list no parameters."""
        return tuple(getattr(self, name) for name in self._names)

    def reset_parameters(self) -> None:
        self._note_map()
        self._set_trained((self.axes[0].size, self.axes[1].size))
        tables = self.tables
        if self.local is None:
            for table in tables:
                fill(table, self.init_std)
            return
        dh, dw = (axis.entry_offsets() for axis in self.axes)
        rows, cols = LOCAL[self.local](dh, dw, len(tables[0]))
        values = (rows, cols) if len(tables) == 2 else (rows[:, :, None] + cols[:, None, :],)
        with torch.no_grad():
            for table, value in zip(tables, values, strict=True):
                table.copy_(value)

    def forward(self, axes: Axes | None = None) -> Tables:
        """The entries, or what they become for other distance maps (differentiable)."""
        if axes is None or (not torch.compiler.is_compiling() and axes == self.axes):
            return self.tables
        return tuple(
            self._resized(table, self._table_axes(name, self.axes), self._table_axes(name, axes))
            for name, table in zip(self._names, self.tables, strict=True)
        )

    def set_axes(self, axes: Axes) -> None:
        """Resize the entries to other distance maps by the rule ``resize``; the same sizes change nothing."""
        if axes == self.axes:
            return
        for name, table in zip(self._names, self.tables, strict=True):
            old, new = self._table_axes(name, self.axes), self._table_axes(name, axes)
            if new != old:  # else the parameter stays the one that an optimizer holds
                resized = self._resized(table.detach(), old, new)
                setattr(self, name, nn.Parameter(resized, requires_grad=table.requires_grad))
        self._set_trained(self._kept_trained(self.trained_reach(), self.axes, axes))
        self.axes = axes
        self._note_map()

    def _resized(self, table: Tensor, old: tuple[AxisDistance, ...], new: tuple[AxisDistance, ...]) -> Tensor:
        return resize_table(table, old, new, self.resize, sums=self.sums)

    def trained_reach(self) -> list[int]:
        """Largest bucket of rows and of columns that training can have reached."""
        return [axis.size for axis in self.axes] if self.trained.is_meta else self.trained.tolist()

    def _kept_trained(self, trained: Sequence[int], old: Axes, new: Axes) -> list[int]:
        """Which buckets of other distance maps were trained: stretched with the table, or kept."""
        stretched = self.resize in ("interpolate", "geometric")
        return [
            b.size * n // a.size if stretched and a.size else min(n, b.size)
            for n, a, b in zip(trained, old, new, strict=True)
        ]

    @torch.no_grad()
    def _set_trained(self, reach: Sequence[int]) -> None:
        self.trained.copy_(torch.tensor(reach, device="cpu"))
        self._noted = (0, 0)

    def _note_map(self) -> None:
        for name, entries in self._map():
            self.register_buffer(name, entries.to(self.trained.device))

    def _map(self) -> Iterator[tuple[str, Tensor]]:
        """The offset of each entry of an axis, where their number does not tell the distance map."""
        for name, axis in zip(self.notes, self.axes, strict=False):
            if axis.kind != "clamp" or not axis.directed:
                yield name, axis.entry_offsets()

    @torch.no_grad()
    def note_training(self, grid_size: tuple[int, int]) -> None:
        """Count the entries that a grid (h, w) reads as trained."""
        rows, cols = (self._reach(axis, side) for axis, side in zip(self.axes, grid_size, strict=True))
        if rows > self._noted[0] or cols > self._noted[1]:
            self._noted = (max(rows, self._noted[0]), max(cols, self._noted[1]))
            self.trained.copy_(torch.maximum(self.trained, self.trained.new_tensor(self._noted)))

    @staticmethod
    def _reach(axis: AxisDistance, side: int) -> int:
        return min(axis.size, side - 1) if axis.kind == "clamp" else axis.size

    @staticmethod
    def _table_axes(name: str, axes: Axes) -> tuple[AxisDistance, ...]:
        return {"table_h": axes[:1], "table_w": axes[1:], "table": axes}[name]

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):  # type: ignore[no-untyped-def]
        maps = [state_dict.pop(prefix + name, None) for name in self.notes[:2]]
        trained = state_dict.pop(prefix + "trained", None)
        old, known = list(self.axes), [axis.size for axis in self.axes]
        for name, parameter in zip(self._names, self.tables, strict=True):
            stored = state_dict.get(prefix + name)
            if stored is None:
                continue
            dims = {"table_h": [0], "table_w": [1], "table": [0, 1]}[name]
            try:
                own = self._table_axes(name, self.axes)
                stored_axes = self._stored_axes(stored, parameter, own, [maps[d] for d in dims])
            except ValueError as error:
                errors.append(f"{prefix + name}: {error}")
                state_dict[prefix + name] = parameter.detach()
                continue
            state_dict[prefix + name] = self._resized(stored, stored_axes, own)
            for d, axis in zip(dims, stored_axes, strict=True):
                old[d], known[d] = axis, axis.size if trained is None else int(trained[d])
        held = [state_dict[prefix + name] for name in self._names if prefix + name in state_dict]
        kept = self._kept_trained(known, (old[0], old[1]), self.axes) if held else self.trained_reach()
        device = held[0].device if held else self.trained.device
        for name, note in (("trained", torch.tensor(kept, device="cpu")), *self._map()):
            state_dict[prefix + name] = note.to(device)  # never missing: entries without notes are complete, too
        self._noted = (0, 0)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    @staticmethod
    def _stored_axes(
        stored: Tensor, own: Tensor, axes: tuple[AxisDistance, ...], maps: list[Tensor | None]
    ) -> tuple[AxisDistance, ...]:
        """The distance maps of a stored table, from its shape and, but for a directed clamp, its entries' offsets."""
        n = len(axes) + 1
        sizes = stored.shape[1:n]
        if (
            stored.ndim != own.ndim
            or stored.shape[:1] + stored.shape[n:] != own.shape[:1] + own.shape[n:]
            or any(axis.kind != "clamp" and size != axis.entries for axis, size in zip(axes, sizes, strict=True))
            or any(axis.directed and size % 2 == 0 for axis, size in zip(axes, sizes, strict=True))
        ):
            raise ValueError(
                f"the stored table has shape {tuple(stored.shape)}, expected {tuple(own.shape)} or one of another grid "
                "(odd sizes, the same heads and width)"
            )
        old = tuple(axis.with_entries(size) for axis, size in zip(axes, sizes, strict=True))
        for axis, entries in zip(old, maps, strict=True):
            found = torch.arange(axis.entries) - axis.entries // 2 if entries is None else entries.cpu()
            if not torch.equal(found, axis.entry_offsets()):
                raise ValueError(
                    f"the stored table has entries for the offsets {found.tolist()}, expected "
                    f"{axis.entry_offsets().tolist()}: it was made for another distance map, set distance as it was"
                )
        return old
