"""Draw what position adds to the attention scores: one picture per block.

    python scripts/bias_maps.py runs/digits/version_0
    python scripts/bias_maps.py runs/digits/version_0/model --out /tmp/maps

Takes a run folder, a saved model folder (config.json and model.safetensors), or the name of a model with weights.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import timm
from safetensors import SafetensorError

import vitrel


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def load(source: str):
    """The trained model behind a run folder, a model folder or a model name."""
    for folder in (Path(source) / "model", Path(source)):
        config = folder / "config.json"
        if config.is_file():
            try:
                return timm.create_model(f"local-dir:{folder}", pretrained=True)
            except (ValueError, KeyError, TypeError) as error:  # no JSON, or not what a saved model has in it
                fail(f"{config}: not the configuration of a saved model: {str(error).splitlines()[0]}")
    if Path(source).exists():
        fail(f"{source}: expected a run folder with model/ in it or a saved model folder; found no config.json")
    if not timm.is_model(source.split(".")[0]):
        fail(f"{source}: no such folder, and no model of that name (see timm.list_models('vitrel*'))")
    return timm.create_model(source, pretrained=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="RUN_OR_MODEL")
    parser.add_argument("--out", type=Path, help="folder for the pictures [RUN_OR_MODEL/bias_maps, or ./bias_maps]")
    args = parser.parse_args()
    try:
        maps = vitrel.bias_maps(load(args.source))
        if not maps:
            fail(f"{args.source}: nothing to draw; no block has a term that is independent of the image")
        out = args.out or (Path(args.source) if Path(args.source).is_dir() else Path()) / "bias_maps"
        out.mkdir(parents=True, exist_ok=True)
        for block in maps:
            path = out / f"{block}.png"
            vitrel.plot_bias_maps(maps, [block]).savefig(path, dpi=120)
            print(path)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        fail(f"{args.source}: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
