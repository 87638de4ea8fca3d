"""Whole models of other projects as models of this one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import LayerNorm, LayerNorm2d, LayerScale, Mlp, PatchEmbed, RelPosBias, RelPosMlp
from timm.layers.classifier import ClassifierHead
from timm.models.beit import Beit
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn

from vitrel.originals import flat_table, refuse, sam_axis
from vitrel.vit import RelativeVisionTransformer


@torch.no_grad()
def from_timm(model: nn.Module) -> RelativeVisionTransformer:
    """A ``RelativeVisionTransformer`` with the weights of a timm model with relative position, and the same logits.

    Serves ``vit_relpos_*`` and ``vit_srelpos_*`` (``VisionTransformerRelPos``), ``beit_*`` and ``beitv2_*`` (``Beit``),
    and ``samvit_*`` (``VisionTransformerSAM``) where every block attends over the whole grid. In training mode timm
    also drops out inside the MLP of ``RelPosMlp``, which is not done here.

    Raises:
        TypeError: If the model is of another class.
        ValueError: If a part of it cannot be served exactly, or a table does not belong to its grid; names the part.
    """
    convert = next((convert for kind, convert in _CONVERTERS.items() if isinstance(model, kind)), None)
    if convert is None:
        raise TypeError(
            f"from_timm: cannot convert {type(model).__name__}, expected a timm VisionTransformerRelPos "
            "(vit_relpos_*), Beit (beit_*, beitv2_*) or VisionTransformerSAM (samvit_*)"
        )
    new, state = convert(model)
    new.load_state_dict(state)
    cfg = getattr(model, "pretrained_cfg", {})  # how images are prepared; not the name, which builds another class
    data = ("input_size", "interpolation", "crop_pct", "mean", "std", "license")
    # Saved under the name of one of ours: the recorded arguments replace its own, every one of them.
    ours: Any = timm.get_pretrained_cfg("vitrel_base_patch16_224")
    new.pretrained_cfg = {
        **ours.to_dict(),
        **{k: cfg[k] for k in data if k in cfg},
        "num_classes": new.num_classes,
    }  # type: ignore[assignment]
    new.set_input_size(new.patch_embed.img_size)  # the size it has: timm notes it for saving
    new.set_grad_checkpointing(bool(model.grad_checkpointing))
    return new.train(model.training)


def _build(model: Any, **args: Any) -> RelativeVisionTransformer:
    """A model with the body of ``model``; ``args`` for what its class has of its own."""
    embed, block = model.patch_embed, model.blocks[0]
    if type(embed) is not PatchEmbed or not isinstance(embed.norm, nn.Identity):
        raise ValueError(f"patch_embed: {type(embed).__name__} cannot be served, expected a PatchEmbed without a norm")
    attn, mlp, weight = block.attn, block.mlp, embed.proj.weight
    body: dict[str, Any] = {
        "img_size": embed.img_size,
        "patch_size": embed.patch_size,
        "in_chans": weight.shape[1],
        "num_classes": model.num_classes,
        "embed_dim": weight.shape[0],
        "depth": len(model.blocks),
        "num_heads": attn.num_heads,
        "mlp_ratio": (mlp.fc2.in_features + 0.5) / weight.shape[0],  # timm rounds the hidden width down
        "qkv_bias": attn.qkv.bias is not None,
        "qk_norm": not isinstance(getattr(attn, "q_norm", nn.Identity()), nn.Identity),
        "scale_mlp_norm": not isinstance(mlp.norm, nn.Identity),
        "init_values": 1.0 if isinstance(getattr(block, "ls1", None), LayerScale) else None,
        "class_token": getattr(model, "cls_token", None) is not None,
        "pos_embed": "none" if getattr(model, "pos_embed", None) is None else "learn",
        "proj_drop_rate": attn.proj_drop.p,
        "attn_drop_rate": attn.attn_drop.p,
        "drop_path_rate": getattr(model.blocks[-1].drop_path1, "drop_prob", 0.0),
        "norm_layer": _norm_layer(block.norm1),
        "weight_init": "skip",
        **args,
    }
    if type(mlp.act) is not nn.GELU:  # timm's defaults stay out, so that the arguments can be saved as JSON
        body["act_layer"] = type(mlp.act)
    if type(mlp) is not Mlp:
        body["mlp_layer"] = type(mlp)
    new = RelativeVisionTransformer(**body, device=weight.device, dtype=weight.dtype)
    new._model_args = {**body, **new._model_args}
    return new


def _norm_layer(norm: Any) -> Any:
    kind: Any = type(norm)
    if kind in (nn.LayerNorm, LayerNorm):
        return {"eps": norm.eps}
    return partial(kind, eps=norm.eps) if hasattr(norm, "eps") else kind


def _head_args(model: Any) -> dict[str, Any]:
    """Pooling and norms of a model whose last norm is ``norm`` (before pooling) or ``fc_norm`` (after)."""
    norms = [not isinstance(layer, nn.Identity) for layer in (model.norm, model.fc_norm)]
    return {
        "global_pool": model.global_pool,
        "final_norm": any(norms),
        "fc_norm": norms[1],
        "drop_rate": model.head_drop.p,
    }


def _table_state(module: Any, grid_size: tuple[int, int], name: str) -> dict[str, Tensor]:
    """The position parameters of a module with a ``relative_position_bias_table``."""
    table_name = f"{name}.relative_position_bias_table"
    if tuple(module.window_size) != grid_size:
        (h, w), (own_h, own_w) = grid_size, module.window_size
        expected = f"one of a {h}x{w} grid, it is of {own_h}x{own_w}"
        raise refuse(table_name, module.relative_position_bias_table, expected)
    table, prefix = flat_table(module.relative_position_bias_table, grid_size, table_name)
    return {"bias.table": table} if prefix is None else {"bias.table": table, "prefix": prefix}


def _at(block: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"blocks.{block}.attn.position.{name}": tensor for name, tensor in state.items()}


def _relpos(model: Any) -> tuple[RelativeVisionTransformer, dict[str, Tensor]]:
    shared, grid_size = model.shared_rel_pos, model.patch_embed.grid_size
    modules = [shared] if shared is not None else [block.attn.rel_pos for block in model.blocks]
    first = modules[0]
    rel_pos: dict[str, Any]
    if isinstance(first, RelPosBias):
        rel_pos = {"preset": "swin", "prefix": "learned" if first.prefix_tokens else "none"}
    elif isinstance(first, RelPosMlp) and tuple(first.pretrained_window_size) == (0, 0):
        rel_pos = {"preset": "cpb", "mlp_coords": first.mode, "mlp_hidden": first.mlp.fc1.out_features}
        rel_pos["resize"] = "interpolate" if first.mode == "swin" else "clamp"  # what timm's does at another size
    else:
        raise ValueError(f"rel_pos: {type(first).__name__} cannot be served, expected RelPosBias or RelPosMlp")
    res_post = isinstance(model.blocks[0], ResPostRelPosBlock)
    new = _build(
        model,
        rel_pos={**rel_pos, "share_layers": shared is not None},
        block_fn="ResPostBlock" if res_post else "Block",
        **_head_args(model),
    )
    state = {k: v for k, v in model.state_dict().items() if "rel_pos." not in k}
    for i, module in enumerate(modules):
        name = "shared_rel_pos" if shared is not None else f"blocks.{i}.attn.rel_pos"
        if isinstance(first, RelPosBias):
            state |= _at(i, _table_state(module, grid_size, name))
        else:
            state |= _at(i, {f"bias.{k}": v for k, v in module.state_dict().items()})
    return new, state


def _beit(model: Any) -> tuple[RelativeVisionTransformer, dict[str, Tensor]]:
    grid_size, shared = model.patch_embed.grid_size, model.rel_pos_bias
    blocks = list(model.blocks)
    own = blocks[0].attn.relative_position_bias_table is not None
    rel_pos: Any = {"preset": "beit", "share_layers": not own} if own or shared is not None else "none"
    new = _build(
        model,
        rel_pos=rel_pos,
        qkv_bias=blocks[0].attn.q_bias is not None,
        init_values=None if blocks[0].gamma_1 is None else 1.0,
        pos_drop_rate=model.pos_drop.p,
        **_head_args(model),
    )
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("q_bias"):
            stem, q = name.removesuffix("q_bias"), tensor
            state[f"{stem}qkv.bias"] = torch.cat([q, torch.zeros_like(q), model.state_dict()[f"{stem}v_bias"]])
        elif not name.endswith(("v_bias", "relative_position_bias_table")):
            state[name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")] = tensor
    common = {} if shared is None else _table_state(shared, grid_size, "rel_pos_bias")
    for i, block in enumerate(blocks if own else []):
        tables = _table_state(block.attn, grid_size, f"blocks.{i}.attn")
        state |= _at(i, {k: v + common[k] if common else v for k, v in tables.items()})  # both are added
    return new, state if own else state | _at(0, common)


class _GridNeck(nn.Sequential):
    """SAM's convolutional neck as a final norm: tokens (B, h*w, D) to a map and back, (B, h*w, neck width)."""

    def __init__(self, *layers: nn.Module, patch_embed: PatchEmbed) -> None:
        super().__init__(*layers)
        self._patch_embed = (patch_embed,)  # in a tuple, so that its weights are not registered here again

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT.unflatten(2, self._patch_embed[0].grid_size)).flatten(2).mT


def _sam(model: Any) -> tuple[RelativeVisionTransformer, dict[str, Tensor]]:
    h, w = model.patch_embed.grid_size
    blocks, head, neck = list(model.blocks), model.head, model.neck
    windowed = [f"blocks.{i}" for i, b in enumerate(blocks) if b.window_size and (b.window_size,) * 2 != (h, w)]
    if windowed:
        raise ValueError(
            f"{', '.join(windowed)}: attend in windows on a {h}x{w} grid, which attention over the whole grid cannot "
            "serve; expected window_size=0, or one window as large as the grid"
        )
    if model.rope_global is not None:
        raise ValueError("rope_global: timm's rotary embedding of SAM cannot be served; expected use_rope=False")
    pool = head.global_pool.pool_type
    if not isinstance(head, ClassifierHead) or pool not in ("avg", "max", "avgmax"):
        raise ValueError(
            f"head: {type(head).__name__} with pooling {pool!r} cannot be served, expected a linear head after "
            "avg, max or avgmax"
        )
    relative = blocks[0].attn.use_rel_pos
    new = _build(
        model,
        rel_pos={"preset": "sam", "share_heads": True} if relative else "none",
        pre_norm=not isinstance(model.norm_pre, nn.Identity),
        pos_drop_rate=model.pos_drop.p,
        drop_rate=head.drop.p,
        global_pool=pool,
        final_norm={"eps": neck.eps} if isinstance(neck, LayerNorm2d) else not isinstance(neck, nn.Identity),
        fc_norm=False,
    )
    if isinstance(neck, nn.Sequential):
        new.norm, new.head = _GridNeck(*copy.deepcopy(neck), patch_embed=new.patch_embed), copy.deepcopy(head.fc)
        new.num_features = new.head_hidden_size = new.embed_dim = model.num_features  # reset_classifier reads them
        new._model_args = {**new._model_args, "neck": _GridNeck}  # no argument builds it: timm refuses to save, by name
    state = {}
    for name, tensor in model.state_dict().items():
        if ".attn.rel_pos_" not in name:
            name = re.sub(r"^neck\.", "norm.", name.replace("head.fc.", "head."))
            state[name] = tensor.flatten(1, 2) if name == "pos_embed" else tensor
    for i, block in enumerate(blocks if relative else []):
        at, attn = f"blocks.{i}.attn", block.attn
        rows, cols = (sam_axis(t, n, name=f"{at}.rel_pos")[0] for t, n in ((attn.rel_pos_h, h), (attn.rel_pos_w, w)))
        state |= _at(i, {"query.table_h": rows, "query.table_w": cols})
    return new, state


_CONVERTERS: dict[type[nn.Module], Callable[..., tuple[RelativeVisionTransformer, dict[str, Tensor]]]] = {
    VisionTransformerRelPos: _relpos,
    Beit: _beit,
    VisionTransformerSAM: _sam,
}
