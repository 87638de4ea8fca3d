"""Whole models of timm from files, converted; see test_oracles."""

from functools import partial

import pytest
import timm.models.mvitv2 as timm_mvitv2
import timm.models.vision_transformer_sam as timm_sam
import torch
from oracles import close, oracle, sam_position
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

from vitrel import RelPos, from_timm
from vitrel.attend import reference_terms
from vitrel.vit import RelativeVisionTransformer


def load(model, data, dtype):
    model.load_state_dict({k.removeprefix("sd/"): t for k, t in data.items() if k.startswith("sd/")})
    return model.to(dtype).eval()


def body(meta):
    return {
        "img_size": tuple(meta["img"]),
        "patch_size": meta["patch"],
        "embed_dim": meta["dim"],
        "depth": meta["depth"],
        "num_heads": meta["H"],
        "mlp_ratio": meta["mlp_ratio"],
        "num_classes": meta["num_classes"],
    }


def vit_relpos(meta):
    return VisionTransformerRelPos(
        **body(meta),
        rel_pos_type=meta["rel_pos_type"],
        rel_pos_dim=24,
        shared_rel_pos=meta["shared_rel_pos"],
        class_token=bool(meta["prefix"]),
        global_pool=meta["pool"],
        fc_norm=meta["fc_norm"],
        init_values=1e-5 if meta["layer_scale"] else None,
    )


def beit(meta):
    return Beit(
        **body(meta),
        use_rel_pos_bias=meta["per_layer"],
        use_shared_rel_pos_bias=meta["shared"],
        use_abs_pos_emb=meta["abs_pos"],
        global_pool=meta["pool"],
        init_values=1e-5 if meta["layer_scale"] else None,
    )


def samvit(meta):
    return timm_sam.VisionTransformerSAM(
        **body(meta),
        use_rel_pos=True,
        window_size=meta["window"],
        global_attn_indexes=tuple(meta["global_attn_indexes"]),
        neck_chans=meta["neck"],
        norm_layer=partial(torch.nn.LayerNorm, eps=meta["ln_eps"]),
    )


@torch.no_grad()
def assert_model(model, data, atol=1e-11):
    """Output of every block and logits; the relative constant of float32 models is 2e-5."""
    seen = []
    hooks = [block.register_forward_hook(lambda module, args, out: seen.append(out)) for block in model.blocks]
    logits = model(data["image"].double())
    for i, out in enumerate(seen):
        close(out, data[f"block_{i}"].reshape(out.shape), atol=atol)
    close(logits, data["logits"], atol=atol)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("name", "build", "atol"),
    [
        ("model__timm_vit_relpos_bias", vit_relpos, 1e-11),
        ("model__timm_vit_relpos_bias_cls", vit_relpos, 1e-11),
        ("model__timm_vit_relpos_bias_shared", vit_relpos, 1e-11),
        ("model__timm_vit_relpos_mlp_cr", vit_relpos, 5e-6),
        ("model__timm_vit_relpos_mlp_swin_cls", vit_relpos, 5e-6),
        ("model__timm_beit", beit, 1e-11),
        ("model__timm_beit_shared_abs", beit, 1e-11),
        ("model__timm_samvit", samvit, 1e-11),
    ],
)
def test_converted_model(name, build, atol):
    meta, data = oracle(name)
    assert_model(from_timm(load(build(meta), data, torch.float64)), data, atol)
    single = from_timm(load(build(meta), data, torch.float32))
    with torch.no_grad():
        close(single(data["image"]), data["logits_fp32"], atol=2e-5)


@pytest.mark.parametrize("rel_pos", ["none", "bias", "swin", "beit", "shaw", "txl", "deberta", "irpe_qkv"])
def test_plain_model_with_tables_of_zeros(rel_pos):
    meta, data = oracle("model__timm_vit_plain")
    if rel_pos == "deberta":
        rel_pos = {"preset": rel_pos, "scale": "sum"}  # its scale of the content counts the terms
    spec = RelPos.of({**RelPos.of(rel_pos).as_dict(), "init": "zeros"})
    kwargs = {"class_token": True, "global_pool": meta["pool"], "pos_embed": "learn"}
    model = RelativeVisionTransformer(**body(meta), **kwargs, rel_pos=spec)
    plain = load(VisionTransformer(**body(meta), global_pool=meta["pool"]), data, torch.float32)
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) == model.position_parameters()
    assert_model(model.double().eval(), data)


def test_windowed_sam_with_its_position_replaced(monkeypatch):
    meta, data = oracle("model__timm_samvit_window")

    def bias(q, rel_pos_h, rel_pos_w, q_size, k_size):
        tables = {"rel_pos_h": rel_pos_h, "rel_pos_w": rel_pos_w}
        position, *points = sam_position(tables, q_size, k_size, 1, q.shape[-1])
        return reference_terms(q[:, None], q[:, None], position, *points)["query"][:, 0]

    monkeypatch.setattr(timm_sam, "get_decomposed_rel_pos_bias", bias)
    assert_model(load(samvit(meta), data, torch.float64), data)


@pytest.mark.parametrize("name", ["model__timm_mvitv2", "model__timm_mvitv2_cls"])
def test_mvitv2_with_its_position_replaced(name, monkeypatch):
    meta, data = oracle(name)
    calls = []

    def scores(attn, q, has_cls_token, q_size, k_size, rel_pos_h, rel_pos_w):
        calls.append((q_size, k_size))
        tables = {"rel_pos_h": rel_pos_h, "rel_pos_w": rel_pos_w}
        position, *points = sam_position(tables, q_size, k_size, q.shape[1], q.shape[-1])
        k = q.new_zeros(*q.shape[:2], attn.shape[-1], q.shape[-1])
        return attn + reference_terms(q, k, position, *points)["query"]

    monkeypatch.setattr(timm_mvitv2, "cal_rel_pos_type", scores)
    cfg = timm_mvitv2.MultiScaleVitCfg(
        depths=tuple(meta["depths"]),
        embed_dim=tuple(meta["dims"]),
        num_heads=tuple(meta["heads"]),
        mlp_ratio=2.0,
        stride_q=tuple(map(tuple, meta["stride_q"])),
        stride_kv=tuple(map(tuple, meta["stride_kv"])),
        use_cls_token=bool(meta["prefix"]),
        expand_attn=meta["expand_attn"],
        residual_pooling=meta["residual_pooling"],
    )
    state = {k.removeprefix("sd/"): t for k, t in data.items() if k.startswith("sd/")}
    hidden = state["stages.0.blocks.0.mlp.fc1.weight"].shape[0]
    cfg.mlp_ratio = hidden / meta["dims"][0]
    model = timm_mvitv2.MultiScaleVit(
        cfg, img_size=tuple(meta["img"]), num_classes=meta["num_classes"], global_pool=meta["pool"]
    )
    load(model, data, torch.float64)
    with torch.no_grad():
        close(model(data["image"].double()), data["logits"], atol=1e-11)
    assert len(calls) == sum(meta["depths"])
