"""Tall images read in strips: time and peak memory against the height."""

import argparse
import json
import statistics
from typing import Any

import timm
import torch

from benchmarks.memory import fresh, peak
from benchmarks.pairs import Run, paired
from vitrel.strips import StripReader

ARCH, COLS, PATCH = "vitrel_small_patch16_224", 14, 16
STRIP, MEMORY = 14, 28


def strips(args: argparse.Namespace, sync: Run) -> list[dict[str, Any]]:
    """One image of 14 columns and growing height in strips of 14 rows, for each preset, with and without memory.

    ``time`` is the ratio to the first height, which is also read in one pass; ``extra MB`` is what reading takes beyond
    the model and the image, in a fresh process.
    """
    if args.only:  # the fresh process
        preset, memory, rows = args.only[0], int(args.only[1]), int(args.only[2])
        print(json.dumps(peak(_reader(preset, memory, rows, args), args.device)))
        return []
    table = []
    for preset in args.presets:
        for memory in (-1, MEMORY, 0):
            heights = args.rows[:1] if memory < 0 else args.rows
            runs = {str(rows): _reader(preset, memory, rows, args) for rows in heights}
            seconds = {
                name: statistics.median(found) for name, found in paired(runs, min(args.repeats, 3), sync).items()
            }
            place = ["--device", args.device, "--dtype", args.dtype, "--what", "strips"]
            for name, spent in seconds.items():
                how = "one pass" if memory < 0 else f"strips, memory {memory}"
                row: dict[str, Any] = {"preset": preset, "rows": int(name), "how": how, "seconds": spent}
                row |= {"ms per row": 1000 * spent / int(name), "time": spent / seconds[str(args.rows[0])]}
                table.append(row | {"extra MB": fresh([*place, "--only", preset, str(memory), name])})
    return table


def _reader(preset: str, memory: int, rows: int, args: argparse.Namespace) -> Run:
    """Reads one image of so many rows; in one pass if ``memory`` is negative."""
    size = ((rows if memory < 0 else STRIP + MEMORY) * PATCH, COLS * PATCH)
    place = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    model = timm.create_model(ARCH, img_size=size, rel_pos=preset).to(**place).eval()
    reader = model if memory < 0 else StripReader(model, STRIP, memory)
    image = torch.randn(1, 3, rows * PATCH, COLS * PATCH, **place)

    def read() -> None:
        with torch.inference_mode():
            reader(image)

    return read
