"""Whole models: a training step, or inference of a batch."""

import argparse
import json
import statistics
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models.eva import Eva
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

from benchmarks.attention import scheme
from benchmarks.memory import fresh, peak
from benchmarks.pairs import Run, paired, ratio_rows


def models(arch: str, args: argparse.Namespace) -> dict[str, torch.nn.Module]:
    """The body without positions, with each preset, and timm's own models of the same body."""
    plain = timm.create_model(arch, num_classes=100, rel_pos="none")
    found = {"none": plain}
    for preset in args.presets:
        if preset == "learned":
            found[preset] = timm.create_model(arch, num_classes=100, rel_pos="none", pos_embed="learn")
            continue
        spec, prefix = scheme(preset)
        for backend in args.backends:
            name = preset if backend == "auto" else f"{preset} {backend}"
            options = {"rel_pos": spec, "reg_tokens": prefix, "backend": backend}
            found[name] = timm.create_model(arch, num_classes=100, **options)
    if args.peers:
        attn, mlp = plain.blocks[0].attn, plain.blocks[0].mlp
        body = {"img_size": plain.patch_embed.img_size, "patch_size": plain.patch_embed.patch_size}
        body |= {"embed_dim": plain.embed_dim, "depth": len(plain.blocks)}
        body |= {"num_heads": attn.num_heads, "mlp_ratio": mlp.fc1.out_features / plain.embed_dim}
        body |= {"num_classes": 100, "class_token": False, "global_pool": "avg", "init_values": None}
        found["timm vit_relpos"] = VisionTransformerRelPos(**body, rel_pos_type="bias")
        rotary = {"use_rot_pos_emb": True, "use_abs_pos_emb": False, "attn_type": "rope", "rope_temperature": 100.0}
        found["timm rope"] = Eva(**body, **rotary, rope_grid_indexing="xy")
    return found


def whole_models(args: argparse.Namespace, sync: Run, train: bool) -> list[dict[str, Any]]:
    """A training step (forward and backward) or inference of a batch by whole models; ratios to ``none``.

    With ``--peak`` also the peak of a step beyond model and pictures, in MB, each in a fresh process.
    """
    rows = []
    half = getattr(torch, args.dtype)
    for arch in args.arch:
        built = models(arch, args)
        size = built["none"].patch_embed.img_size
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
        for name, model in built.items():
            model = model.to(args.device).train(train)
            model = torch.compile(model) if args.compile else model
            steps[name] = lambda model=model: step(model)
        if args.only:  # the fresh process
            measured = steps[args.only[0]]
            if args.compile:
                measured()  # the compiler's own memory is not the model's
            else:
                step(built[args.only[0]], pictures[:1], labels[:1])  # thread pools and the like
            print(json.dumps(peak(measured, args.device)))
            return []
        what = {"model": arch, "batch": batch, "dtype": args.dtype, "compiled": args.compile}
        timed = ratio_rows(paired(steps, args.repeats, sync), "none", **what)
        rows += [{**row, "peak MB": _peak(arch, row["name"], args)} for row in timed] if args.peak else timed
    return rows


def _peak(arch: str, name: str, args: argparse.Namespace) -> float:
    """Median of three fresh processes, each with one model beside the plain one."""
    preset, _, backend = name.partition(" ")
    command = ["--what", args.what, "--arch", arch, "--batch", str(args.batch), "--device", args.device]
    command += ["--dtype", args.dtype, "--only", name, "", "", *(["--compile"] if args.compile else [])]
    command += ["--presets", preset] if preset in args.presets else ["--presets"]
    command += ["--backends", backend] if backend and preset in args.presets else []
    command += ["--peers"] if preset == "timm" else []
    return statistics.median(fresh(command) for _ in range(3))
