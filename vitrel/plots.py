"""Maps as matplotlib figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from vitrel.maps import bias_maps


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
            "(such as presets bias, swin, beit, t5, cpb, txl)"
        )
    blocks = [blocks] if isinstance(blocks, str) else blocks
    if unknown := [name for name in blocks or () if name not in maps]:
        raise ValueError(f"no block {unknown[0]!r}, expected one of {', '.join(maps)}")
    names = list(blocks or maps)
    heads = max(len(maps[name]) for name in names)
    aspect = max(maps[name].shape[1] / maps[name].shape[2] for name in names)
    figure = Figure(
        figsize=(heads * head_inches + 1.3, len(names) * (head_inches * aspect + 0.75) + 0.4),
        layout="constrained",
    )
    parts = figure.subfigures(len(names), 1, squeeze=False)[:, 0]
    for part, name in zip(parts, names, strict=True):
        _draw_block(part, name, maps[name])
    return figure


def _draw_block(figure: SubFigure, name: str, maps: Tensor) -> None:
    heads, rows, cols = maps.shape
    h, w = rows // 2, cols // 2
    limit = float(maps.abs().max()) or 1.0
    axes = figure.subplots(1, heads, sharex=True, sharey=True, squeeze=False)[0]
    for head, ax in enumerate(axes):
        image = ax.imshow(
            maps[head].numpy(),
            cmap="RdBu_r",
            norm=TwoSlopeNorm(0.0, -limit, limit),
            extent=(-w - 0.5, w + 0.5, h + 0.5, -h - 0.5),
            interpolation="nearest",
        )
        ax.plot(0, 0, marker="+", color="black", markersize=7, markeredgewidth=1.2)
        ax.set_title(f"head {head}", fontsize=9)
        ax.tick_params(labelsize=7)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set_xlabel("columns right of the query", fontsize=7)
    axes[0].set_ylabel("rows below the query", fontsize=7)
    figure.suptitle(f"{name}  (+ is the query, axes in patches)", fontsize=10)
    bar = figure.colorbar(image, ax=list(axes), shrink=0.9, pad=0.02)
    bar.set_label("added to the score", fontsize=8)
    bar.ax.tick_params(labelsize=7)
