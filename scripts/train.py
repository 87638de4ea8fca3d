#!/usr/bin/env python
"""Trains an image classifier and writes a run folder.

python scripts/train.py                                                    # digits: a minute on a laptop
python scripts/train.py --config cifar100.yaml --data.root DIR             # or --data.download true
python scripts/train.py --config folder.yaml --data.root DIR --model.arch vitrel_tiny_patch16_224
python scripts/train.py --config cifar100.yaml --ckpt_path last            # resume
torchrun --nproc_per_node 2 scripts/train.py --config cifar100.yaml --trainer.devices 2
python scripts/train.py --help                                             # every setting
"""

import sys
from pathlib import Path

from vitrel.training.run import main

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

if __name__ == "__main__":
    sys.exit(main(folders=[CONFIGS], default=str(CONFIGS / "digits.yaml")))
