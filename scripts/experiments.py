#!/usr/bin/env python
"""What position schemes are worth: the trainings of configs/experiments/, one line per finished run in results/.

python scripts/experiments.py --list                                        # all runs, and which are done
python scripts/experiments.py --run positions learning.alibi --data.root DIR --jobs 2 --threads 1
python scripts/experiments.py --tables                                      # tables of README.md and RESULTS.md, curves

What is done is passed over, equal runs of two groups are trained once, and what was cut off goes on from its last
epoch. Further options go to train.py as they are, for example --trainer.accelerator gpu.
"""

import argparse
import signal
import sys
from pathlib import Path

from evidence.plan import plan
from evidence.rows import complete, find
from evidence.train import Trainer

from vitrel.training.fileio import ConfigError
from vitrel.training.run import guarded


def work(args: argparse.Namespace, options: list[str]) -> None:
    if args.list:
        for run in plan():
            row = find(run)
            reached = "to do" if row is None else f"{row['test/acc']:.4f}"
            print(f"{run.name:44}{reached}{'' if row is None or complete(row, run) else '  to be tested further'}")
    elif args.tables:
        from evidence.curves import draw
        from evidence.tables import write

        for file in (*write(), *draw()):
            print(file)
    else:
        problems = Trainer(args.runs, options, args.threads).train(plan(args.run), args.jobs)
        if problems:
            raise ConfigError("; ".join(problems))


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="name all runs and what they reached")
    what.add_argument("--tables", action="store_true", help="write the tables of README.md and RESULTS.md anew")
    what.add_argument("--run", nargs="*", metavar="NAME", help="train GROUP, GROUP.ROW or GROUP.ROW.SEED [all]")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time [1]")
    parser.add_argument("--threads", type=positive, default=2, help="threads of each [2]")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="their folder [runs/experiments]")
    args, options = parser.parse_known_args()
    if options and args.run is None:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(guarded(lambda: work(args, options)))
