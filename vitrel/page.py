"""What a model learned as one HTML file that opens from disk: maps, numbers and attention of every block and head.

The file holds plotly, the numbers and the pictures; nothing is fetched. Maps are kept as whole numbers of one scale per
block, so that models of any size fit: 16 bits each, or 8 where there are too many.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.maps import TermMap, term_maps
from vitrel.measures import Row, head_numbers
from vitrel.probe import PARTS, Probe, Seen, lattice, probes, split

MAP_BYTES, ALL_BYTES, ATTENTION_BYTES = 7_000_000, 10_500_000, 4_000_000
"""What maps may take before they get coarser, what maps and attention may take, and what attention may; in all a file
of less than 20 MB with plotly's 5 MB, since text holds three bytes in four letters."""
FEW = 36
"""Queries of a picture that are worth more than a second picture."""
LARGEST_SIDE = 16
"""Of a picture of attention, in cells; on larger grids a cell stands for several patches."""


def report(
    model: nn.Module,
    pictures: Seen | None = None,
    shown: Sequence[NDArray[np.uint8]] = (),
    *,
    title: str = "What position learned",
    captions: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
) -> str:
    """The page of a model.

    Args:
        model: Any model with ``RelativeAttention2d`` layers.
        pictures: A batch that the model takes, (B, 3, h, w), normalised, or its ``probes``: for the maps of
            terms that depend on the picture, and for the numbers per head; None to leave both out.
        shown: The first pictures of the batch as they look, (H, W, 3) each: examples whose patches can be clicked, as
            many of them as the file has room for.
        title: Heading.
        captions: A line for each of ``shown``.
        facts: Names and values for the line below the heading.

    Returns:
        HTML; write it to a file.

    Raises:
        ValueError: If the model has no relative attention, or nothing to show.
        ModuleNotFoundError: If plotly is not installed.
    """
    seen = None if pictures is None else probes(model, pictures)
    maps = term_maps(model, seen)
    numbers = [] if seen is None else head_numbers(model, seen)
    seen = seen if seen and len(shown) else {}
    if not maps and not seen:
        raise ValueError("nothing to show: no block has relative attention with a map; give pictures, or another model")
    blocks, stored = _blocks(maps, numbers, seen)
    most = min(ATTENTION_BYTES, ALL_BYTES - stored)
    shown = shown[: max(1, most // (FEW * _row_bytes(seen)))]
    found = {name: replace(probe, x=probe.x[: len(shown)]) for name, probe in seen.items()}
    data = {
        "title": title,
        "facts": dict(facts or {}),
        "blocks": blocks,
        "pictures": [
            {"source": _png(picture), "caption": caption}
            for picture, caption in zip(shown, [*captions, *[""] * len(shown)], strict=False)
        ],
        "attention": _attention(found, most),
    }
    return fill(data)


def fill(data: Mapping[str, Any]) -> str:
    """The page around its data."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ModuleNotFoundError("the page needs plotly; pip install 'vitrel[page]'") from None

    template = resources.files("vitrel").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    head, rest = template.split("/*PLOTLY*/")
    middle, tail = rest.split("/*DATA*/")
    return "".join([head, get_plotlyjs(), middle, text, tail])


def _blocks(
    maps: Mapping[str, Mapping[str, TermMap]], numbers: Sequence[Row], found: Mapping[str, Probe]
) -> tuple[list[dict[str, Any]], int]:
    """The page's blocks, and the bytes of their maps."""
    count = sum(one.values.numel() for block in maps.values() for one in block.values())
    spreads = sum(one.values.numel() for block in maps.values() for one in block.values() if one.spread is not None)
    wide = 2 * count + spreads <= MAP_BYTES
    with_spread = count + spreads <= MAP_BYTES
    blocks = []
    for name in dict.fromkeys([*maps, *(str(row["block"]) for row in numbers), *found]):
        rows = [row for row in numbers if row["block"] == name]
        kinds = []
        for kind, one in maps.get(name, {}).items():
            kinds.append({"name": kind, "title": one.title, "unit": one.unit, "signed": one.signed,
                          **_packed(one.values, wide)})  # fmt: skip
            if one.spread is not None and with_spread:
                kinds.append({"name": f"{kind} spread", "title": f"{one.title.removesuffix(', mean')}, spread",
                              "unit": "standard deviation", "signed": False,
                              **_packed(one.spread, wide=False)})  # fmt: skip
        heads = len(rows) or (len(next(iter(maps[name].values())).values) if name in maps else 0)
        of_heads = [{k: v for k, v in row.items() if k not in ("block", "head")} for row in rows]
        heads = heads or found[name].attn.num_heads
        blocks.append({"name": name, "heads": heads, "kinds": kinds, "numbers": of_heads})
    return blocks, count * (2 if wide else 1) + spreads * with_spread


def _packed(values: Tensor, wide: bool) -> dict[str, Any]:
    """Maps as signed whole numbers: value = number * limit / largest number; the lowest number stands for NaN."""
    limit = float(values.nan_to_num(0).abs().max()) or 1.0
    largest = 32767 if wide else 127
    whole = (values.double() / limit * largest).round().nan_to_num(-largest - 1)
    packed = whole.numpy().astype("<i2" if wide else "i1")
    return {"limit": limit, "rows": values.shape[1], "cols": values.shape[2], "bytes": 2 if wide else 1,
            "data": _base64(packed)}  # fmt: skip


def _attention(found: Mapping[str, Probe], most: int) -> dict[str, Any] | None:
    """Weights of each picture, block, head, query and part over cells of patches, a byte each and a scale per row."""
    if not found:
        return None
    grid, cell, _, _ = _shape(found)
    queries = lattice(grid, max(4, most // (len(next(iter(found.values())).x) * _row_bytes(found))))
    blocks = {}
    for name, probe in found.items():
        weights = torch.stack([_cells(part, probe, cell) for part in _weights(probe, queries)], 3).nan_to_num(0)
        peaks = weights.amax(-1, keepdim=True).clamp(min=1e-12)
        blocks[name] = {
            "data": _base64((weights / peaks * 255).round().numpy().astype("u1")),
            "peaks": _base64(peaks.numpy().astype("<f4")),
        }
    return {"rows": grid.rows, "cols": grid.cols, "cell": cell, "queries": queries.tolist(), "parts": list(PARTS),
            "blocks": blocks}  # fmt: skip


def _shape(found: Mapping[str, Probe]) -> tuple[Grid, int, int, int]:
    """The grid, the side of a cell in patches, and the rows and columns of cells."""
    grid = next(iter(found.values())).grid
    cell = math.ceil(max(grid.rows, grid.cols) / LARGEST_SIDE)
    return grid, cell, math.ceil(grid.rows / cell), math.ceil(grid.cols / cell)


def _row_bytes(found: Mapping[str, Probe]) -> int:
    """What one query of one picture takes."""
    if not found:
        return 1
    _, _, rows, cols = _shape(found)
    return sum(probe.attn.num_heads for probe in found.values()) * len(PARTS) * rows * cols


def _weights(probe: Probe, queries: Tensor) -> list[Tensor]:
    """The weights of each part, (B, H, n, patches)."""
    step = max(1, (1 << 22) // (len(probe.x) * probe.attn.num_heads * probe.grid.patches))
    parts = [split(probe.terms(some)) for some in queries.split(step)]
    return [torch.cat([weights[part].float().cpu() for weights in parts], 2) for part in PARTS]


def _cells(weights: Tensor, probe: Probe, cell: int) -> Tensor:
    """Weights summed over cells of patches, (B, H, n, cells)."""
    if cell == 1:
        return weights
    rows, cols = probe.grid.rows, probe.grid.cols
    grid = weights.unflatten(-1, (rows, cols))
    padded = torch.nn.functional.pad(grid, (0, -cols % cell, 0, -rows % cell))
    return padded.unflatten(-1, (-1, cell)).unflatten(-3, (-1, cell)).sum((-1, -3)).flatten(-2)


def _png(picture: NDArray[np.uint8]) -> str:
    stored = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(stored, "PNG")
    return "data:image/png;base64," + base64.b64encode(stored.getvalue()).decode()


def _base64(numbers: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers).tobytes()).decode()
