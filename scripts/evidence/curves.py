"""The picture ``docs/cifar100_curves.png``: validation accuracy by epoch, a line per row of a group."""

from pathlib import Path
from statistics import fmean

from matplotlib import colormaps
from matplotlib.figure import Figure

from evidence.rows import RESULTS
from evidence.tables import by_row
from vitrel.training.fileio import write_whole
from vitrel.training.pictures import png


def draw(group: str = "positions") -> list[Path]:
    """Draws the mean over seeds of each row; nothing where no run of the group has ended."""
    rows, _ = by_row(group)
    if not rows:
        return []
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)
    for name, runs in rows.items():
        curves = [row["val/acc"] for _, row in runs]
        mean = [100 * fmean(values) for values in zip(*curves, strict=False)]
        baseline = {"none": "0.6", "learned": "0.2"}.get(name)
        style = {} if baseline is None else {"color": baseline, "linestyle": "--"}
        axes.plot(range(1, len(mean) + 1), mean, label=name, linewidth=1.5, **style)
    axes.set(xlabel="epoch", ylabel="validation top-1 %")
    axes.legend(fontsize="small", ncols=2, title="best on test first", title_fontsize="small")
    file = RESULTS.parent / "docs" / "cifar100_curves.png"
    write_whole(file, png(figure))
    return [file]
