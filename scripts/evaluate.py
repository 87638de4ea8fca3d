#!/usr/bin/env python
"""Prints the test metrics of a checkpoint, or of the best checkpoint of a run folder, as JSON.

python scripts/evaluate.py runs/digits/version_0
python scripts/evaluate.py runs/cifar100/version_0/checkpoints/last.ckpt --data.root DIR
"""

import argparse
import json
import sys

from vitrel.training.run import evaluate, guarded

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a run folder, or a .ckpt file in its checkpoints/")
    parser.add_argument("--data.root", "--root", dest="root", help="where the data lie, if not where the run had them")
    args = parser.parse_args()
    overrides = {"root": args.root} if args.root else {}
    sys.exit(guarded(lambda: print(json.dumps(evaluate(args.path, **overrides), indent=2))))
