#!/usr/bin/env python
"""Writes the model of a finished run as a folder to share, with a model card; timm loads it with "local-dir:DIR".

python scripts/export.py runs/digits/version_0 /tmp/digits_model
python scripts/export.py runs/digits/version_0 /tmp/digits_model --onnx       # needs onnx, onnxscript and onnxruntime
"""

import argparse
import sys

from vitrel.training.export import export
from vitrel.training.run import guarded

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("folder", metavar="dir", help="where to write: new, empty, or an earlier export")
    parser.add_argument("--onnx", action="store_true", help="also write model.onnx, checked in onnxruntime")
    parser.add_argument("--license", default="unknown", help="licence of the weights, for example apache-2.0 [unknown]")
    args = parser.parse_args()
    sys.exit(guarded(lambda: print(export(args.run, args.folder, onnx=args.onnx, license=args.license))))
