"""Whole models: a training step, or inference of a batch."""

import argparse
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models.eva import Eva
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

from benchmarks.attention import scheme
from benchmarks.pairs import Run, paired, ratio_rows


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
