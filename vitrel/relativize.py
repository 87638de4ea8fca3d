"""Relative position for a timm model that is there already, with its weights: ``relativize``, and ``plain`` back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from timm.data import resolve_model_data_config
from timm.layers import PatchDropout, PatchDropoutWithIndices
from timm.models import Eva, NaFlexVit, VisionTransformer
from timm.models.beit import Beit
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from vitrel.attention import RelativeAttention2d
from vitrel.eva import RelativeAttentionRope, RelativeEvaAttention
from vitrel.family import GridModel, NaFlexModel, RelativeModel, patch_grid
from vitrel.relpos import RelPos

Model = TypeVar("Model", bound=nn.Module)

NAME = "vitrel_relativized"
"""The name under which timm builds a relativized model anew, see ``relativized``."""

NO_ABSOLUTE = {"pos_embed": "none"}  # in the words of VisionTransformer and NaFlexVit

_FAMILY: dict[type[nn.Module], type[RelativeModel]] = {
    VisionTransformer: GridModel,
    Eva: GridModel,
    NaFlexVit: NaFlexModel,
}
_ATTENTIONS = {kind.plain_class: kind for kind in (RelativeAttention2d, RelativeAttentionRope, RelativeEvaAttention)}
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
_FUSED_BLOCK = "makes queries, keys, values and the input of its MLP by one projection, without an attention of its own"
_REFUSED = {
    "ParallelScalingBlock": _FUSED_BLOCK,
    "DiffParallelScalingBlock": _FUSED_BLOCK,
    "DiffAttention": "subtracts one softmax from another, where relative position has no agreed place",
}


def relativize(
    model: Model,
    rel_pos: RelPos | str | Mapping[str, Any] | None,
    *,
    keep_absolute: bool = True,
    blocks: Iterable[int] | None = None,
    grid_size: tuple[int, int] | None = None,
    backend: str = "auto",
    **changes: Any,
) -> Model:
    """Give a timm vision transformer relative position attention, in place.

    Serves ``VisionTransformer`` (with class, distillation and register tokens, LayerScale, query and key norms,
    ``ResPostBlock``, ``ParallelThingsBlock``; DeiT, DINOv2, CLIP, SigLIP, ...), ``Eva`` (EVA-02, DINOv3, the RoPE
    variants, whose rotary embedding stays) and ``NaFlexVit`` (padded batches of images with grids of their own).
    Weights and their names stay; what is added is named ``blocks.N.attn.position...``. With ``init="zeros"`` the model
    computes what it did before, unless the scheme changes more than tables do (``scale="deberta"``, ``source="mlp"``,
    a rotary term). All of timm's methods go on to work, and ``model.position_parameters()`` names what was added.

    Args:
        model: What is to be changed.
        rel_pos: A ``RelPos``, a name such as ``"txl"``, or a mapping of its fields.
        keep_absolute: Keep the absolute position embedding; False drops it, its rows for prefix tokens included.
        blocks: Indices of the blocks to change, negative ones from the end; None for all.
        grid_size: (h, w) in patches that tables are made for, for a ``NaFlexVit`` alone; None for that of its input
            size. The grid of other models is given.
        backend: As for ``RelativeAttention2d``; a model with a rotary embedding takes ``dense`` or ``reference`` alone.
        **changes: Further fields of ``RelPos``, such as ``init="zeros"``.

    Returns:
        ``model``, of a class that adds to its own.

    Raises:
        TypeError: If the model is of another family, or a keyword is unknown. Nothing is changed then.
        ValueError: For an unknown scheme, or a part of the model that cannot have it. Nothing is changed then.
    """
    kind, spec = family(model), _spec(rel_pos, changes)
    base = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    blocks = list(blocks) if isinstance(blocks, Iterable) else blocks
    chosen, grid = _chosen(model, blocks), _grid(model, grid_size)
    _check_tokens(model, kind, spec)
    new = _relative(model, [attn for _, _, attn in chosen], spec, grid, backend)
    for (parent, name, _), attn in zip(chosen, new, strict=True):
        setattr(parent, name, attn)
    if not keep_absolute:
        _drop_absolute(model)
    args = model.__dict__.pop("_model_args", {})
    model.__class__ = _relative_class(type(model))
    if base:  # made under a name, by which it can be made again
        asked = {"base": base, "rel_pos": spec, "keep_absolute": keep_absolute}
        if blocks is not None:
            asked["blocks"] = sorted({int(i) % len(model.blocks) for i in blocks})  # type: ignore[arg-type]  # timm's
        if grid_size is not None:
            asked["grid_size"] = list(grid_size)
        model._model_args = {**args, **asked, "backend": backend}  # type: ignore[assignment]  # no module
        _rename(model, NAME)
    return model


def plain(model: Model) -> Model:
    """Undo ``relativize`` in place: the position terms go, all other weights stay.

    An absolute embedding that was dropped does not come back.

    Raises:
        TypeError: If the model was not made by ``relativize``.
    """
    kind = vars(type(model)).get("plain_class")
    if kind is None or not isinstance(model, RelativeModel):
        reason = "build it with rel_pos='none'" if isinstance(model, RelativeModel) else "it has nothing to undo"
        raise TypeError(f"plain: {type(model).__name__} was not made by vitrel.relativize; {reason}")
    for parent in list(model.modules()):
        for name, attn in list(parent.named_children()):
            if isinstance(attn, RelativeAttention2d):
                setattr(parent, name, attn.to_attention())
    model.__class__ = kind
    model.__dict__.pop("_seen_grids", None)
    args = model.__dict__.pop("_recorded_args", None)
    if args is not None:
        asked = ("base", "rel_pos", "keep_absolute", "blocks", "grid_size", "backend")
        without = {} if args["keep_absolute"] else {"use_abs_pos_emb": False} if isinstance(model, Eva) else NO_ABSOLUTE
        model._model_args = {**{k: v for k, v in args.items() if k not in asked}, **without}
        _rename(model, args["base"])
    return model


def _rename(model: Any, architecture: str) -> None:
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "architecture": architecture}


def family(model: nn.Module) -> type[RelativeModel]:
    """What a model that can be made relative gets mixed in.

    Raises:
        TypeError: If it is of another family.
        ValueError: If it has relative position already.
    """
    name = type(model).__name__
    if isinstance(model, RelativeModel):
        mend = (
            "call vitrel.plain(model) first" if hasattr(type(model), "plain_class") else "build it with another rel_pos"
        )
        raise ValueError(f"relativize: {name} has relative position already; {mend}")
    for kind, mixed_in in _FAMILY.items():
        if isinstance(model, kind):
            return mixed_in
    raise TypeError(
        f"relativize: cannot serve {name}, {_reason(model)}; expected a timm VisionTransformer, Eva or NaFlexVit"
    )


def _reason(model: nn.Module) -> str:
    """Why a model of another family is refused."""
    if not isinstance(model, nn.Module):
        return "which is no model"
    if isinstance(model, (VisionTransformerRelPos, Beit, VisionTransformerSAM)):
        return "which has relative position of its own (vitrel.from_timm takes it over)"
    if any(isinstance(child, tuple(_FAMILY)) for child in model.children()):
        return "which wraps a model: relativize that one, and wrap it afterwards"
    kinds = sorted({type(module).__name__ for module in model.modules()})
    attentions = [kind for kind in kinds if "attn" in kind.lower() or "attention" in kind.lower()]
    if not attentions:
        return "which has no attention between patches"
    return f"whose {', '.join(attentions)} is not attention over one grid of all patches"


def _spec(rel_pos: RelPos | str | Mapping[str, Any] | None, changes: dict[str, Any]) -> RelPos:
    known = [f.name for f in fields(RelPos)]
    for name in changes:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, "keep_absolute", "blocks", "grid_size", "backend"], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f", expected a field of RelPos: {', '.join(known)}"
            raise TypeError(f"relativize: unknown keyword {name!r}{hint}")
    if isinstance(rel_pos, str):
        return RelPos.preset(rel_pos, **changes)
    if isinstance(rel_pos, Mapping):
        return RelPos.of({**rel_pos, **changes})
    return replace(RelPos.of(rel_pos), **changes)


def _chosen(model: Any, blocks: Iterable[int] | None) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name in it, attention) of the chosen blocks, in order."""
    depth = len(model.blocks)
    indices = list(range(depth) if blocks is None else blocks) if isinstance(blocks, Iterable | None) else [blocks]
    countable = all(hasattr(i, "__index__") and not isinstance(i, bool) for i in indices)
    if not isinstance(blocks, Iterable | None) or not countable:
        raise TypeError(f"blocks: expected indices such as [0, 1] or range(6), got {blocks!r}")
    if not indices or not all(-depth <= i < depth for i in indices):
        raise ValueError(f"blocks: expected at least one index from 0 to {depth - 1}, got {indices}")
    found = []
    for i in sorted({i % depth for i in indices}):
        block = model.blocks[i]
        here = [
            (parent, name, child)
            for parent in block.modules()
            for name, child in parent.named_children()
            if type(child) in _ATTENTIONS
        ]
        if not here:
            part, where = (block.attn, f"blocks.{i}.attn") if hasattr(block, "attn") else (block, f"blocks.{i}")
            kind = type(part).__name__
            served = ", ".join(attention.__name__ for attention in _ATTENTIONS)
            reason = _REFUSED.get(kind, f"is none of the attentions that are served ({served}), and holds none")
            raise ValueError(f"{where}: {kind} {reason}; leave this block out by blocks=, or take another model")
        found += here
    return found


def _grid(model: Any, grid_size: tuple[int, int] | None) -> tuple[int, int]:
    if not isinstance(model, NaFlexVit):
        if grid_size is not None:
            raise ValueError(
                f"grid_size: that of {type(model).__name__} follows from its image and patch size; leave it out"
            )
        if model.patch_embed.grid_size is None:
            raise ValueError(
                "patch_embed: the model has no image size, which its grid follows from; build it with img_size"
            )
        return patch_grid(model)
    if grid_size is not None:
        if not isinstance(grid_size, (tuple, list)) or len(grid_size) != 2 or min(grid_size) < 1:
            raise ValueError(f"grid_size: expected (h, w) in patches, each at least 1, got {grid_size!r}")
        return grid_size
    if getattr(model, "pretrained_cfg", None) or model.embeds.pos_embed_grid_size is None:
        size = resolve_model_data_config(model)["input_size"][-2:]
        return tuple(int(pixels // patch) for pixels, patch in zip(size, model.embeds.patch_size, strict=True))  # type: ignore[return-value]
    rows, cols = model.embeds.pos_embed_grid_size
    return int(rows), int(cols)


def _check_tokens(model: Any, kind: type[RelativeModel], spec: RelPos) -> None:
    if getattr(model, "rope", None) is not None and {"rotary", "rotary_mixed"} & set(spec.terms):
        raise ValueError(
            f"rel_pos: {type(model).__name__} turns queries and keys by a rotary embedding of its own, and a rotary "
            "term would turn them again; leave it out"
        )
    # NaFlexVit alone tells which patches it left
    if kind is GridModel and isinstance(getattr(model, "patch_drop", None), (PatchDropout, PatchDropoutWithIndices)):
        raise ValueError(
            "patch_drop: relative attention needs every patch of the grid; build it with patch_drop_rate=0"
        )


def _relative(
    model: Any, attentions: list[nn.Module], spec: RelPos, grid_size: tuple[int, int], backend: str
) -> list[RelativeAttention2d]:
    """A relative attention for each of timm's, with its layers."""
    turned = getattr(model, "rope", None) is not None
    if turned and backend not in ("auto", "dense", "reference"):
        raise ValueError(f"backend: {backend!r} cannot take in a rotary embedding, expected auto, dense or reference")
    new: list[RelativeAttention2d] = []
    for attn in attentions:
        relative = _ATTENTIONS[type(attn)].from_attention(
            attn,
            grid_size=grid_size,
            rel_pos=spec,
            num_prefix_tokens=model.num_prefix_tokens,
            backend=backend,
            shared=new[0].position_terms if new and spec.share_layers else None,
        )
        if turned and isinstance(relative, RelativeAttentionRope):
            relative.turned = True
        new.append(relative)
    return new


def _drop_absolute(model: Any) -> None:
    if isinstance(model, NaFlexVit):
        embeds = model.embeds
        embeds.pos_embed, embeds.pos_embed_y, embeds.pos_embed_x, embeds.pos_embed_type = None, None, None, "none"
    else:
        model.pos_embed = None


def _relative_class(kind: type[nn.Module]) -> Any:
    """``kind`` with the methods of its family, made once: the class of an instance is changed, as FSDP2 does."""
    if kind not in _CLASSES:
        mixed_in = next(mixed_in for base, mixed_in in _FAMILY.items() if issubclass(kind, base))
        members = {"plain_class": kind, "__reduce_ex__": _reduce, "__module__": __name__}
        _CLASSES[kind] = type(f"Relativized{kind.__name__}", (mixed_in, kind), members)
    return _CLASSES[kind]


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    # A class made at run time has no name to be pickled by: it is made anew from the one that has.
    return _empty, (self.plain_class,), *nn.Module.__reduce_ex__(self, protocol)[2:]


def _empty(kind: type[nn.Module]) -> Any:
    relative = _relative_class(kind)
    return relative.__new__(relative)
