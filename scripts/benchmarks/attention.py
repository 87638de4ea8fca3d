"""Attention on given q, k and v: the schemes, timm's ways, and the naive formula."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import RelPosBias, RotaryEmbeddingCat, apply_rot_embed_cat
from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias

from benchmarks.pairs import Run, paired, ratio_rows
from vitrel.attention import RelativeAttention2d
from vitrel.backends import BACKENDS, Case, choose
from vitrel.grid import Grid
from vitrel.relpos import RelPos

HEADS, WIDTH = 6, 64  # those of a ViT-S


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
        case = Case(spec, tokens + prefix, torch.device(device).type, grad=grad, half=q.element_size() == 2)
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
