#!/usr/bin/env python
"""Times things side by side in one run: ratios to the same thing without positions, medians of interleaved repeats.

python scripts/benchmark.py --what train --presets bias txl shaw deberta --peers    # a training step of whole models
python scripts/benchmark.py --what model --presets bias txl --dtype bfloat16        # inference, under autocast
python scripts/benchmark.py --what attention --grids 8 14 32 64 --peers             # softmax(...)v alone
python scripts/benchmark.py --what memory --grids 32 64 --presets bias txl --peers  # peak of one image, a process each
python scripts/benchmark.py --what loader --config cifar100.yaml --data.root DIR    # an epoch against tensors in memory

A preset may carry a table and prefix tokens: bias, bias:joint, txl:prefix=5. Prints Markdown; --json FILE keeps it all.
"""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import RelPosBias, RotaryEmbeddingCat, apply_rot_embed_cat
from timm.models.eva import Eva
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias

from vitrel.attention import RelativeAttention2d
from vitrel.backends import BACKENDS, Case, choose
from vitrel.grid import Grid
from vitrel.relpos import RelPos
from vitrel.training.fileio import one_line, write_whole

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
HEADS, WIDTH = 6, 64  # of "attention" and "memory": those of a ViT-S
Run = Callable[[], object]


def scheme(preset: str) -> tuple[RelPos, int]:
    """``bias:joint`` or ``txl:prefix=5`` as a scheme and a number of prefix tokens."""
    name, *options = preset.split(":")
    changes: dict[str, Any] = {}
    prefix = 0
    for option in options:
        if option.startswith("prefix=") and option[7:].isdigit():
            prefix = int(option[7:])
            changes["prefix"] = "learned"
        elif option in ("joint", "separable"):
            changes["table"] = option
        else:
            raise ValueError(f"--presets {preset}: {option!r} is unknown, expected joint, separable or prefix=N")
    return RelPos.preset(name, **changes), prefix


def paired(steps: dict[str, Run], repeats: int, sync: Run) -> dict[str, list[float]]:
    """Seconds of each step, taken in turn, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            sync()
            if count:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio_rows(seconds: dict[str, list[float]], base: str, **where: Any) -> list[dict[str, Any]]:
    """One row per name: the median, and the ratio to ``base`` pair by pair (median and middle half)."""
    rows = []
    for name, own in seconds.items():
        ratios = sorted(a / b for a, b in zip(own, seconds[base], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        cells = {"seconds": statistics.median(own), "ratio": statistics.median(ratios), "from": low, "to": high}
        rows.append({**where, "name": name, **cells})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    heads = list(rows[0])
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for row in rows:
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        print("| " + " | ".join(cells) + " |", flush=True)


def naive_txl(q, k, v, r, u, bias):
    """Transformer-XL's four terms as its write-ups print them, with R of size L x L x d. Same values as ``txl``."""
    content = torch.einsum("bhid,bhjd->bhij", q + u, k)
    return ((content + torch.einsum("bhid,hijd->bhij", q + bias, r)) * WIDTH**-0.5).softmax(-1) @ v


def attention_runs(
    presets: Sequence[str],
    backends: Sequence[str],
    peers: bool,
    grid: int,
    batch: int,
    place: dict[str, Any],
    grad: bool,
) -> tuple[dict[str, Run], dict[str, str]]:
    """Functions that attend once (and go back), and which backend each takes."""
    tokens, device = grid * grid, place["device"]
    make = lambda *shape: torch.randn(*shape, **place, requires_grad=grad)  # noqa: E731
    q, k, v = (make(batch, HEADS, tokens, WIDTH) for _ in range(3))
    runs, taken = {}, {}

    def add(name: str, attend: Callable[[], torch.Tensor], leaves: list[torch.Tensor], backend: str = "") -> None:
        def once() -> None:
            with torch.set_grad_enabled(grad):
                out = attend()
            if grad:
                torch.autograd.grad(out, [q, k, v, *leaves], torch.ones_like(out), allow_unused=True)

        runs[name], taken[name] = once, backend

    add("none", lambda: F.scaled_dot_product_attention(q, k, v), [])
    for preset in presets:
        spec, prefix = scheme(preset)
        options = {"grid_size": (grid, grid), "rel_pos": spec, "num_prefix_tokens": prefix}
        terms = RelativeAttention2d(HEADS * WIDTH, HEADS, **options).to(**place).position_terms.train(grad)
        for parameter in terms.parameters():
            torch.nn.init.normal_(parameter)
        case = Case(spec, tokens + prefix, torch.device(device).type, grad=grad)
        inputs = [make(batch, HEADS, prefix + tokens, WIDTH) for _ in range(3)] if prefix else [q, k, v]
        for wanted in backends:
            try:
                backend = choose(wanted, case)
            except ValueError:
                continue
            where = Grid(grid, grid)
            attend = lambda b=backend, t=terms, x=inputs, w=where: BACKENDS[b](*x, t((grid, grid)), w, w)  # noqa: E731
            add(preset if wanted == "auto" else f"{preset} {wanted}", attend, list(terms.parameters()), backend)
    if peers:
        bias = RelPosBias((grid, grid), HEADS).to(**place)
        add(
            "timm RelPosBias", lambda: F.scaled_dot_product_attention(q, k, v, bias.get_bias()), list(bias.parameters())
        )
        rope = RotaryEmbeddingCat(WIDTH, in_pixels=False, feat_shape=(grid, grid), device=device)
        turn = lambda x: apply_rot_embed_cat(x, rope.get_embed()).type_as(x)  # noqa: E731
        add("timm rope", lambda: F.scaled_dot_product_attention(turn(q), turn(k), v), [])
        sam = [make(2 * grid - 1, WIDTH) for _ in range(2)]
        size = (grid, grid)

        def segment_anything() -> torch.Tensor:
            flat = q.flatten(0, 1)
            mask = get_decomposed_rel_pos_bias(flat, *sam, size, size).unflatten(0, (batch, HEADS))
            return F.scaled_dot_product_attention(q, k, v, mask)

        add("timm samvit", segment_anything, sam)
        if grid <= 14:
            line = torch.arange(grid, device=device)
            index = line[:, None] - line + grid - 1
            tables = [make(HEADS, 2 * grid - 1, WIDTH) for _ in range(2)]
            vectors = [make(HEADS, 1, WIDTH) for _ in range(2)]

            def naive() -> torch.Tensor:
                by_row, by_col = tables[0][:, index], tables[1][:, index]
                r = (by_row[:, :, None, :, None] + by_col[:, None, :, None]).flatten(1, 2).flatten(2, 3)
                return naive_txl(q, k, v, r, *vectors)

            add("naive txl", naive, [*tables, *vectors])
    return runs, taken


def attention(args: argparse.Namespace, sync: Run) -> list[dict[str, Any]]:
    """Attention on given q, k, v, forward, and forward and backward; ratios to plain fused attention."""
    rows = []
    place = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    for grid in args.grids:
        batch = args.batch or max(1, 2048 // (grid * grid))
        for grad in (False, True):
            runs, taken = attention_runs(args.presets, args.backends, args.peers, grid, batch, place, grad)
            what = {"grid": f"{grid}x{grid}", "batch": batch, "pass": "forward+backward" if grad else "forward"}
            new = ratio_rows(paired(runs, args.repeats, sync), "none", **what)
            rows += [{**row, "backend": taken[row["name"]]} for row in new]
    return rows


def whole_models(args: argparse.Namespace, sync: Run, train: bool) -> list[dict[str, Any]]:
    """A training step (forward and backward) or inference of a batch by whole models; ratios to ``none``."""
    rows = []
    half = getattr(torch, args.dtype)
    for arch in args.arch:
        plain = timm.create_model(arch, num_classes=100, rel_pos="none")
        size, patch = plain.patch_embed.img_size, plain.patch_embed.patch_size
        body = {"img_size": size, "patch_size": patch, "embed_dim": plain.embed_dim, "depth": len(plain.blocks)}
        attn, mlp = plain.blocks[0].attn, plain.blocks[0].mlp
        body |= {"num_heads": attn.num_heads, "mlp_ratio": mlp.fc1.out_features / plain.embed_dim}
        body |= {"num_classes": 100, "class_token": False, "global_pool": "avg", "init_values": None}
        models = {"none": plain}
        for preset in args.presets:
            spec, prefix = scheme(preset)
            for backend in args.backends:
                name = preset if backend == "auto" else f"{preset} {backend}"
                options = {"rel_pos": spec, "reg_tokens": prefix, "backend": backend}
                models[name] = timm.create_model(arch, num_classes=100, **options)
        if args.peers:
            models["timm vit_relpos"] = VisionTransformerRelPos(**body, rel_pos_type="bias")
            rotary = {"use_rot_pos_emb": True, "use_abs_pos_emb": False, "attn_type": "rope", "rope_temperature": 100.0}
            models["timm rope"] = Eva(**body, **rotary, rope_grid_indexing="xy")
        batch = args.batch or (64 if size[0] <= 64 else 8)
        pictures = torch.randn(batch, 3, *size, device=args.device)
        labels = torch.randint(0, 100, (batch,), device=args.device)

        def step(model: torch.nn.Module, x: torch.Tensor = pictures, y: torch.Tensor = labels) -> None:
            with torch.set_grad_enabled(train), torch.autocast(args.device, half, enabled=half != torch.float32):
                out = model(x)
            if train:
                model.zero_grad()
                F.cross_entropy(out.float(), y).backward()

        steps = {}
        for name, model in models.items():
            model = model.to(args.device).train(train)
            model = torch.compile(model) if args.compile else model
            steps[name] = lambda model=model: step(model)
        what = {"model": arch, "batch": batch, "dtype": args.dtype, "compiled": args.compile}
        rows += ratio_rows(paired(steps, args.repeats, sync), "none", **what)
    return rows


def peak(run: Run, device: str) -> float:
    """Peak memory of a run beyond what was there before it, in MB; on Linux from the kernel's own high-water mark."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    status, marks = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not marks.exists():
        raise ValueError("--what memory: needs Linux (/proc/self/clear_refs) or --device cuda")
    read = lambda key: int(status.read_text().split(key)[1].split()[0]) / 1e3  # noqa: E731
    gc.collect()
    marks.write_text("5")
    before = read("VmRSS:")
    run()
    return read("VmHWM:") * 1.024 - before * 1.024


def _fresh(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.splitlines()[-1])


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak memory of attention on one image, a fresh process for each; ``extra`` is what goes beyond plain."""
    place = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    if args.only:  # the fresh process
        name, grid, grad = args.only[0], int(args.only[1]), args.only[2] == "1"
        peer = args.peers
        warm, _ = attention_runs(args.presets, args.backends, peer, 4, 1, place, grad)
        warm[name]()  # thread pools and the like
        runs, _ = attention_runs(args.presets, args.backends, peer, grid, 1, place, grad)
        print(json.dumps(peak(runs[name], args.device)))
        return []
    rows = []
    for grid in args.grids:
        for grad in (False, True):
            peers = ["timm RelPosBias", "timm rope", "timm samvit"] if args.peers else []
            plain = 0.0
            for name in ["none", *args.presets, *peers]:
                ours = ["--presets", name] if name in args.presets else ["--presets"]
                command = [
                    sys.executable,
                    __file__,
                    "--what",
                    "memory",
                    "--only",
                    name,
                    str(grid),
                    str(int(grad)),
                    *ours,
                ]
                command += ["--device", args.device, "--dtype", args.dtype, *(["--peers"] if name in peers else [])]
                found = [_fresh(command) for _ in range(min(args.repeats, 3))]
                plain = statistics.median(found) if name == "none" else plain
                what = {"grid": f"{grid}x{grid}", "pass": "forward+backward" if grad else "forward", "name": name}
                rows.append({**what, "peak MB": statistics.median(found), "extra MB": statistics.median(found) - plain})
    return rows


def loader(argv: list[str], steps: int, repeats: int, sync: Run) -> list[dict[str, Any]]:
    """``steps`` steps of the Lightning run of a config, from its loader and from batches already in memory."""
    # Here, so that the fresh processes of "memory" start without Lightning and its company.
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader

    from vitrel.training.config import parse
    from vitrel.training.data import PictureDataModule, normalize
    from vitrel.training.model import build_model
    from vitrel.training.sources import find_source
    from vitrel.training.task import ClassificationTask
    from vitrel.training.transforms import InputConfig

    config = parse(argv, [CONFIGS])
    source = find_source(config.data)
    net = build_model(config.model, len(source.classes))
    inputs = InputConfig.of(net, config.data)
    data = PictureDataModule(config.data, inputs, source)
    data.setup("fit")
    batches = [(normalize(x, inputs), y) for (x, y), _ in zip(data.train_dataloader(), range(steps), strict=False)]

    class Memory(PictureDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(batches, batch_size=None)

        def on_after_batch_transfer(self, batch: object, dataloader_idx: int) -> object:
            return batch

    def fit(kind: type[PictureDataModule]) -> None:
        module = kind(config.data, inputs, source)
        module.splits = data.splits
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(
            max_epochs=1, limit_train_batches=steps, limit_val_batches=0, enable_model_summary=False, **quiet
        )
        trainer.fit(ClassificationTask(config.as_dict(), len(source.classes), net), datamodule=module)

    seconds = paired({"memory": lambda: fit(Memory), "loader": lambda: fit(PictureDataModule)}, repeats, sync)
    return ratio_rows(seconds, "memory")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["attention", "model", "train", "memory", "loader"], default="train")
    parser.add_argument("--presets", nargs="*", default=["bias", "txl", "shaw", "deberta"])
    parser.add_argument("--backends", nargs="+", default=["auto"], choices=["auto", *BACKENDS], help="not for memory")
    parser.add_argument("--peers", action="store_true", help="timm's own, and the naive four terms, as well")
    parser.add_argument("--grids", nargs="+", type=int, default=[8, 14, 32, 64], help="for attention and memory")
    parser.add_argument("--arch", nargs="+", default=["vitrel_micro_patch4_32", "vitrel_small_patch16_224"])
    parser.add_argument("--batch", type=int, default=0, help="0 for one that fits the size")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--compile", action="store_true", help="torch.compile the models")
    parser.add_argument("--steps", type=int, default=100, help="for loader")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="file to keep the rows in")
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if rest and args.what != "loader":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    for name, least in (("repeats", 1), ("steps", 1), ("batch", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name}: expected at least {least}, got {getattr(args, name)}")
    sync: Run = torch.cuda.synchronize if args.device == "cuda" else lambda: None

    kinds: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "attention": lambda: attention(args, sync),
        "model": lambda: whole_models(args, sync, train=False),
        "train": lambda: whole_models(args, sync, train=True),
        "memory": lambda: memory(args),
        "loader": lambda: loader(rest, args.steps, args.repeats, sync),
    }
    try:
        rows = kinds[args.what]()
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
