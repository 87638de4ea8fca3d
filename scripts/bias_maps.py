"""Draw what position adds to the attention scores: one picture per block.

    python scripts/bias_maps.py runs/digits/version_0
    python scripts/bias_maps.py runs/digits/version_0/model --out /tmp/maps

Takes a run folder, a saved model folder (config.json and model.safetensors), or the name of a model with weights.
"""

import argparse
import sys
from pathlib import Path

import timm
from safetensors import SafetensorError

import vitrel


def load(source: str):
    """The trained model behind a run folder, a model folder or a model name; SystemExit with one line otherwise."""
    for folder in (Path(source) / "model", Path(source)):
        if (folder / "config.json").is_file():
            return timm.create_model(f"local-dir:{folder}", pretrained=True)
    if Path(source).exists():
        sys.exit(f"{source}: expected a run folder with model/ in it or a saved model folder; found no config.json")
    if not timm.is_model(source.split(".")[0]):
        sys.exit(f"{source}: no such folder, and no model of that name (see timm.list_models('vitrel*'))")
    return timm.create_model(source, pretrained=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="RUN_OR_MODEL")
    parser.add_argument("--out", type=Path, help="folder for the pictures [RUN_OR_MODEL/bias_maps, or ./bias_maps]")
    args = parser.parse_args()
    try:
        maps = vitrel.bias_maps(load(args.source))
        if not maps:
            sys.exit(f"{args.source}: nothing to draw; no block has a term that is independent of the image")
        out = args.out or (Path(args.source) if Path(args.source).is_dir() else Path()) / "bias_maps"
        out.mkdir(parents=True, exist_ok=True)
        for block in maps:
            path = out / f"{block}.png"
            vitrel.plot_bias_maps(maps, [block]).savefig(path, dpi=120)
            print(path)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        sys.exit(f"{args.source}: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
