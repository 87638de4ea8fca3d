#!/usr/bin/env python
"""Times things side by side in one run: ratios to the same thing without positions, medians of interleaved repeats.

python scripts/benchmark.py --what train --presets bias txl shaw deberta --peers    # a training step of whole models
python scripts/benchmark.py --what model --presets bias txl --dtype bfloat16        # inference, under autocast
python scripts/benchmark.py --what attention --grids 8 14 32 64 --peers             # softmax(...)v alone
python scripts/benchmark.py --what memory --grids 32 64 --presets bias txl --peers  # peak of one image, a process each
python scripts/benchmark.py --what strips --presets bias txl                        # tall images by height
python scripts/benchmark.py --what loader --config cifar100.yaml --data.root DIR    # an epoch against tensors in memory

A preset may carry a table and prefix tokens: bias, bias:joint, txl:prefix=5; for train and model, learned is timm's
absolute embedding. Prints Markdown; --json FILE keeps it all.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.attention import attention
from benchmarks.memory import memory
from benchmarks.models import whole_models
from benchmarks.pairs import Run, show
from benchmarks.strips import strips

from vitrel.backends import BACKENDS
from vitrel.training.fileio import one_line, write_whole


def _loader(argv: list[str], args: argparse.Namespace, sync: Run) -> list[dict[str, Any]]:
    from benchmarks.loader import loader  # fresh processes of the others start without Lightning and its company

    return loader(argv, args.steps, args.repeats, sync)


def arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Options, and what is left of them for the config of ``--what loader``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ["attention", "model", "train", "memory", "strips", "loader"]
    parser.add_argument("--what", choices=kinds, default="train")
    parser.add_argument("--presets", nargs="*", help="bias txl, and but for strips shaw deberta, unless given")
    parser.add_argument("--backends", nargs="+", default=["auto"], choices=["auto", *BACKENDS], help="where timed")
    parser.add_argument("--peers", action="store_true", help="timm's own, and the naive four terms, as well")
    parser.add_argument("--grids", nargs="+", type=int, default=[8, 14, 32, 64], help="for attention and memory")
    parser.add_argument("--rows", nargs="+", type=int, default=[42, 112, 224, 448], help="patch rows, for strips")
    parser.add_argument("--arch", nargs="+", default=["vitrel_micro_patch4_32", "vitrel_small_patch16_224"])
    parser.add_argument("--batch", type=int, default=0, help="0 for one that fits the size")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--compile", action="store_true", help="torch.compile the models")
    parser.add_argument("--peak", action="store_true", help="for model and train, peak memory as well")
    parser.add_argument("--steps", type=int, default=100, help="for loader")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="file to keep the rows in")
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args(argv)
    if args.presets is None:
        args.presets = ["bias", "txl"] if args.what == "strips" else ["bias", "txl", "shaw", "deberta"]
    if rest and args.what != "loader":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.peak and args.what not in ("model", "train"):
        parser.error(f"--peak: is for --what model and train; --what memory measures attention alone, got {args.what}")
    if args.peak and args.compile and args.device == "cpu":
        parser.error("--peak: on the CPU the compiler's own memory would be in it; leave --compile out")
    for name, least in (("repeats", 1), ("steps", 1), ("batch", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name}: expected at least {least}, got {getattr(args, name)}")
    return args, rest


def main() -> int:
    args, rest = arguments()
    sync: Run = torch.cuda.synchronize if args.device == "cuda" else lambda: None

    measure: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "attention": lambda: attention(args, sync),
        "model": lambda: whole_models(args, sync, train=False),
        "train": lambda: whole_models(args, sync, train=True),
        "memory": lambda: memory(args),
        "strips": lambda: strips(args, sync),
        "loader": lambda: _loader(rest, args, sync),
    }
    try:
        rows = measure[args.what]()
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    if rows:
        show(rows)
    if rows and args.json:
        machine: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        machine["device"] = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
        record = {"command": " ".join(sys.argv), "machine": machine, "rows": rows}
        write_whole(args.json, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
