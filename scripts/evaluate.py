#!/usr/bin/env python
"""Prints the test metrics of a run, a checkpoint or a saved model as JSON; more where it is asked.

python scripts/evaluate.py runs/digits/version_0
python scripts/evaluate.py runs/digits/version_0 --ablate --per_class      # without each position term; by class
python scripts/evaluate.py runs/digits/version_0 --sizes 24 32 48x32       # at other sizes, by each resize rule
python scripts/evaluate.py runs/cifar100/version_0/checkpoints/last.ckpt --data.root DIR
python scripts/evaluate.py exports/cifar100 --config cifar100.yaml --data.root DIR    # or a model's name

A run folder stands for its best checkpoint, and knows its data. Tables and figures go to RUN/evaluation/ as
ablation.csv, ablation.png, sizes.csv, sizes.png and per_class.csv.
"""

import argparse
import sys
from pathlib import Path

from vitrel.training.config import parse
from vitrel.training.evaluation import examine
from vitrel.training.run import guarded

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a run folder, a .ckpt file in its checkpoints/, a saved model folder, or a name")
    parser.add_argument("--config", help="settings of the data, for a model that is not a run's")
    parser.add_argument("--data.root", "--root", dest="root", help="where the data lie, if not where the run had them")
    parser.add_argument("--ablate", action="store_true", help="switch each position term off")
    parser.add_argument("--sizes", nargs="+", default=[], metavar="SIZE", help="in pixels: N, or HxW")
    parser.add_argument("--per_class", action="store_true", help="top-1 of each class")
    parser.add_argument("--out", type=Path, help="folder for tables and figures [RUN/evaluation, or ./evaluation]")
    args = parser.parse_args()
    overrides = {"root": args.root} if args.root else {}
    asked = {name: vars(args)[name] for name in ("ablate", "sizes", "per_class", "out")}

    def work() -> None:
        config = parse(["--config", args.config], folders=[CONFIGS]) if args.config else None
        examine(args.path, config=config, **asked, **overrides)

    sys.exit(guarded(work))
