"""Draw what position adds to the attention scores: one picture per block, a table of numbers per head, or a page.

    python scripts/bias_maps.py runs/digits/version_0
    python scripts/bias_maps.py runs/digits/version_0 --html report.html       # one file to open in a browser
    python scripts/bias_maps.py runs/digits/version_0/model --out /tmp/maps --pictures a.png b.png
    python scripts/bias_maps.py runs/digits/version_0 --together maps.png --blocks 0 5

Takes a run folder, a saved model folder (config.json and model.safetensors), or the name of a model with weights. What
depends on the picture is seen on test pictures of the run's data, or on the given picture files.
"""

import argparse
import sys
from pathlib import Path

from vitrel.training.looking import look
from vitrel.training.run import guarded

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="RUN_OR_MODEL")
    parser.add_argument("--out", type=Path, help="folder for the pictures [RUN_OR_MODEL/bias_maps, or ./bias_maps]")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    parser.add_argument("--together", type=Path, metavar="FILE", help="write one picture of several blocks instead")
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help="blocks to draw [all]")
    parser.add_argument("--pictures", nargs="+", metavar="FILE", help="image files to see the terms on")
    parser.add_argument("--data.root", "--root", dest="root", help="where the data lie, if not where the run had them")
    args = parser.parse_args()
    sys.exit(guarded(lambda: look(**vars(args))))
