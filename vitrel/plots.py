"""Maps, attention and tables of results as matplotlib figures, on white in light and dark notebooks alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrel.maps import SCORE, TermMap, bias_maps
from vitrel.probe import PARTS, probes, split

HEADS_PER_LINE = 6
LEAST_INCHES = 5.2
"""Width that the titles need."""
SEPARATE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours, which differ for every kind of colour vision."""


def plot_bias_maps(
    model: nn.Module | Mapping[str, Tensor], blocks: Sequence[str] | None = None, *, head_inches: float = 2.1
) -> Figure:
    """Draw bias maps: a row per block, heads side by side, one scale and one colour bar per block.

    Args:
        model: A model, or what ``bias_maps`` returns for one: block name to (H, 2h-1, 2w-1).
        blocks: Names of the blocks to draw, all by default.
        head_inches: Width of one head's map, in inches.

    Returns:
        A figure; save it with ``figure.savefig(path)``.

    Raises:
        ValueError: If there is nothing to draw, or a block is unknown.
    """
    maps = bias_maps(model) if isinstance(model, nn.Module) else dict(model)
    if not maps:
        raise ValueError(
            "nothing to draw: no block has a term that is independent of the image; rel_pos needs bias or v "
            "(such as presets bias, swin, beit, t5, cpb, txl); vitrel.term_maps(model, pictures) has the maps of others"
        )
    blocks = [blocks] if isinstance(blocks, str) else blocks
    if unknown := [name for name in blocks or () if name not in maps]:
        raise ValueError(f"no block {unknown[0]!r}, expected one of {', '.join(maps)}")
    names = list(blocks or maps)
    return _rows([(name, SCORE, maps[name], True) for name in names], head_inches)


def plot_term_maps(maps: Mapping[str, TermMap], block: str = "", *, head_inches: float = 2.1) -> Figure:
    """Draw every map of a block: a row per map, and one for its spread, each with one scale and one colour bar.

    Args:
        maps: What ``term_maps`` returns for the block.
        block: Its name, for the titles.
        head_inches: Width of one head's map, in inches.

    Raises:
        ValueError: If there is nothing to draw.
    """
    if not maps:
        raise ValueError("nothing to draw: the block has no maps; vitrel.term_maps(model, pictures) says what there is")
    rows = []
    for one in maps.values():
        title = f"{block}: {one.title}" if block else one.title
        rows.append((title, one.unit, one.values, one.signed))
        if one.spread is not None:
            title = f"{title.removesuffix(', mean')}, spread over queries and pictures"
            rounding = one.spread <= 1e-5 * one.values.nan_to_num(0).abs().max()
            rows.append((title, "standard deviation", one.spread.masked_fill(rounding, 0), False))
    return _rows(rows, head_inches)


def plot_blocks(maps: Mapping[str, Mapping[str, TermMap]], *, head_inches: float = 2.1) -> Figure:
    """Draw the maps of several blocks, a row per map: what ``term_maps`` returns, or a part of it."""
    rows = [(f"{name}: {one.title}", one.unit, one.values, one.signed)
            for name, block in maps.items() for one in block.values()]  # fmt: skip
    return _rows(rows, head_inches)


def plot_attention(
    model: nn.Module,
    picture: Tensor,
    query: tuple[int, int],
    block: str | None = None,
    *,
    heads: Sequence[int] | None = None,
    shown: NDArray[np.uint8] | None = None,
    head_inches: float = 1.9,
) -> Figure:
    """Draw where one query patch looks, over the picture: by both, by content alone, by position alone.

    Args:
        model: Any model with ``RelativeAttention2d`` layers.
        picture: What the model takes, normalised, (3, h, w).
        query: (row, column) of the query, in patches.
        block: Name of the block, the last one by default.
        heads: Which heads to draw, all by default.
        shown: The picture to draw over, (H, W, 3); the given one by default.
        head_inches: Width of one panel, in inches.

    Returns:
        A figure with a row per part and a column per head; weights over the patches, on one scale.

    Raises:
        ValueError: If the block or a head is unknown, or the query outside the grid.
    """
    found = probes(model, picture[None])
    block = list(found)[-1] if block is None and found else block
    if block not in found:
        raise ValueError(f"no block {block!r}, expected one of {', '.join(found) or 'a model with relative attention'}")
    probe = found[block]
    h, w = probe.grid.rows, probe.grid.cols
    if not (0 <= query[0] < h and 0 <= query[1] < w):
        raise ValueError(f"query {tuple(query)}: expected a row below {h} and a column below {w}")
    weights = split(probe.terms(torch.tensor([query[0] * w + query[1]])))
    under = _grey(picture if shown is None else torch.from_numpy(np.ascontiguousarray(shown)).movedim(-1, 0))
    heads = range(probe.attn.num_heads) if heads is None else heads
    if unknown := [head for head in heads if not 0 <= head < probe.attn.num_heads]:
        raise ValueError(f"no head {unknown[0]} in {block}, expected 0 to {probe.attn.num_heads - 1}")
    size = (max(LEAST_INCHES, len(heads) * head_inches + 1.5), 3 * head_inches * h / w + 1.2)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots(3, len(heads), squeeze=False)
    most = 100 * max(float(part.max()) for part in weights.values())
    norm = Normalize(0, most)
    for row, part in enumerate(PARTS):
        for column, head in enumerate(heads):
            ax, heat = axes[row, column], 100 * weights[part][0, head, 0].reshape(h, w)
            # Neither black nor white, on which colours would not show.
            ax.imshow(under, cmap="gray", extent=(-0.5, w - 0.5, h - 0.5, -0.5), vmin=-0.3, vmax=1.6)
            cover = (0.1 + 0.8 * (heat / most).sqrt()).cpu().numpy()  # what is not attended leaves the picture bare
            ax.imshow(heat.cpu().numpy(), cmap="plasma", norm=norm, alpha=cover, extent=(-0.5, w - 0.5, h - 0.5, -0.5))
            ax.add_patch(Rectangle((query[1] - 0.5, query[0] - 0.5), 1, 1, fill=False, edgecolor="cyan", linewidth=1.5))
            ax.set_xticks([])
            ax.set_yticks([])
            if row == 0:
                ax.set_title(f"head {head}", fontsize=9)
        axes[row, 0].set_ylabel({"both": "both", "content": "content only", "position": "position only"}[part])
    figure.suptitle(
        f"{block}: attention of the patch in row {query[0]}, column {query[1]} (cyan)",
        fontsize=10,
    )
    bar = figure.colorbar(ScalarMappable(norm, "plasma"), ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("% of the attention among patches", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def plot_ablation(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw what each term is worth: a bar per row of an ablation with its change of top-1.

    Args:
        rows: With ``off``, ``top1``, ``change`` and ``standard_error`` (parts of 1), the whole model first.
    """
    base, bars = rows[0], rows[1:]
    figure = Figure(figsize=(6.4, 1.5 + 0.5 * len(bars)), layout="constrained", facecolor="white")
    ax = figure.subplots()
    changes, errors = ([100 * row[name] for row in bars] for name in ("change", "standard_error"))
    ax.barh(range(len(bars)), changes, xerr=errors, color=SEPARATE[0], ecolor="black", capsize=3)
    ax.set_yticks(range(len(bars)), [f"without {row['off']}\n{100 * row['change']:+.1f}" for row in bars])
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    ax.margins(x=0.15)
    ax.set_xlabel("change of top-1, percentage points (bar: one standard error)", fontsize=9)
    ax.set_title(f"Terms switched off in the trained model (whole: {100 * base['top1']:.1f} % top-1)", fontsize=10)
    return figure


def plot_sizes(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw accuracy over input size, a curve per resize rule; the trained size is marked.

    Args:
        rows: With ``rows`` and ``cols`` in pixels, ``rule`` and ``top1`` (part of 1), the trained size first.
    """
    trained, others = rows[0], rows[1:]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained", facecolor="white")
    ax = figure.subplots()
    styles = zip(dict.fromkeys(row["rule"] for row in others), SEPARATE, ("o", "s", "^", "D", "v", "P"), strict=False)
    for rule, colour, marker in styles:
        points = [trained, *(row for row in others if row["rule"] == rule)]
        sides = sorted((math.sqrt(p["rows"] * p["cols"]), 100 * p["top1"]) for p in points)
        ax.plot(*zip(*sides, strict=True), marker=marker, color=colour, label=rule, markersize=5)
    side = math.sqrt(trained["rows"] * trained["cols"])
    ax.axvline(side, color="black", linewidth=0.8, linestyle=":")
    ax.annotate("trained", (side, 0), xycoords=("data", "axes fraction"), xytext=(4, 4), textcoords="offset points")
    ticks = {math.sqrt(r["rows"] * r["cols"]): _size(r["rows"], r["cols"]) for r in rows}
    ax.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    ax.set_xlabel("input size, pixels")
    ax.set_ylabel("top-1, %")
    ax.set_ylim(0, 103)
    ax.grid(axis="y", alpha=0.3)
    if len(others):
        figure.legend(title="resize", fontsize=8, title_fontsize=8, loc="outside right upper")
    return figure


def _size(rows: int, cols: int) -> str:
    return str(rows) if rows == cols else f"{rows}x{cols}"


def _grey(picture: Tensor) -> NDArray[np.float32]:
    """(3, h, w) of any range as grey from 0 to 1."""
    grey = picture.float().mean(0)
    low, high = grey.min(), grey.max()
    return np.asarray((grey - low) / max(float(high - low), 1e-9), dtype=np.float32)


# Of a row of maps, in inches. Placed by hand: the layout engines of matplotlib take ten times as long as the drawing.
LEFT, RIGHT, GAP, TITLE, HEAD, FOOT = 0.6, 1.0, 0.12, 0.34, 0.24, 0.52


def _rows(rows: Sequence[tuple[str, str, Tensor, bool]], head_inches: float) -> Figure:
    """Rows of (title, unit, (H, 2h-1, 2w-1), signed)."""
    columns = min(HEADS_PER_LINE, max(len(values) for _, _, values, _ in rows))
    sides = [(head_inches * values.shape[1] / values.shape[2], math.ceil(len(values) / columns))
             for _, _, values, _ in rows]  # fmt: skip
    heights = [TITLE + lines * (HEAD + side) + FOOT for side, lines in sides]
    width = max(LEAST_INCHES, LEFT + columns * (head_inches + GAP) + RIGHT)
    figure = Figure(figsize=(width, sum(heights)), facecolor="white")
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights, hspace=0)[:, 0]
    for part, height, (title, unit, values, signed) in zip(parts, heights, rows, strict=True):
        _draw_heads(part, (width, height), title, unit, values, signed, columns, head_inches)
    return figure


def _draw_heads(
    figure: SubFigure,
    inches: tuple[float, float],
    title: str,
    unit: str,
    maps: Tensor,
    signed: bool,
    columns: int,
    head_inches: float,
) -> None:
    heads, rows, cols = maps.shape
    h, w = rows // 2, cols // 2
    finite = maps.nan_to_num(0, 0, 0)
    limit = float(finite.abs().max()) or 1.0
    norm = TwoSlopeNorm(0.0, -limit, limit) if signed else Normalize(0.0, limit)
    width, height = inches
    side = head_inches * rows / cols

    def place(left: float, top: float, wide: float, high: float) -> Axes:
        return figure.add_axes((left / width, 1 - (top + high) / height, wide / width, high / height))

    for head in range(heads):
        line, column = divmod(head, columns)
        ax = place(LEFT + column * (head_inches + GAP), TITLE + line * (HEAD + side) + HEAD, head_inches, side)
        image = ax.imshow(
            maps[head].numpy(),
            cmap="RdBu_r" if signed else "viridis",
            norm=norm,
            extent=(-w - 0.5, w + 0.5, h + 0.5, -h - 0.5),
            interpolation="nearest",
            aspect="auto",
        )
        _label(ax, head, "black" if signed else "white", last_line=head + columns >= heads, first=column == 0)
    figure.suptitle(f"{title}  (+ is the query)", fontsize=10, y=1 - 0.08 / height)
    lines = math.ceil(heads / columns)
    bar_left = LEFT + min(heads, columns) * (head_inches + GAP)
    bar = figure.colorbar(image, cax=place(bar_left, TITLE + HEAD, 0.12, lines * (HEAD + side) - HEAD))
    bar.set_label(unit, fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _label(ax: Axes, head: int, mark: str, *, last_line: bool, first: bool) -> None:
    ax.plot(0, 0, marker="+", color=mark, markersize=7, markeredgewidth=1.2)
    ax.set_title(f"head {head}", fontsize=9, pad=4)
    ax.tick_params(labelsize=7, labelbottom=last_line, labelleft=first)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if last_line:
        ax.set_xlabel("columns right of the query", fontsize=7)
    if first:
        ax.set_ylabel("rows below the query", fontsize=7)
