"""The attentions of timm's Eva family, made relative, against their formulas token by token."""

import copy

import pytest
import torch
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention

from vitrel.attention import RelativeAttention2d
from vitrel.eva import RelativeAttentionRope, RelativeEvaAttention
from vitrel.grid import Grid, Points


def randomize(attn, start="", std=0.2):
    """Random numbers in the parameters whose names start so, so that nothing hides behind a zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(attn.named_parameters()):
            if name.startswith(start):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return attn


def loops(attn, x, rope, where, half):
    """What a relativized rotary attention computes, token by token, from timm's own parts and the tables."""
    d, n = attn.head_dim, attn.num_prefix_tokens
    with_bias = getattr(attn, "q_bias", None) is not None
    if attn.qkv is not None:
        flat = attn.qkv(x) + (torch.cat([attn.q_bias, attn.k_bias, attn.v_bias]) if with_bias else 0)
        q, k, v = flat.chunk(3, -1)
    else:
        q, k, v = attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
    q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in (q, k, v))
    q, k = attn.q_norm(q), attn.k_norm(k)
    k, v = (t.repeat_interleave(attn.num_heads // t.shape[1], 1) for t in (k, v))
    turned = []
    for t in (q, k):
        rotated = t[:, :, n:] if rope is None else apply_rot_embed_cat(t[:, :, n:], rope, half=half)
        turned.append(torch.cat([t[:, :, :n], rotated], 2))
    position, s = attn.position_terms(), d**-0.5
    scores = s * turned[0] @ turned[1].mT
    scores += s * torch.einsum("hd,bhjd->bhj", position.vectors["u"], k)[:, :, None]
    values, direct = v[:, :, None].repeat(1, 1, q.shape[2], 1, 1), torch.zeros_like(q)
    coords = where.coords()
    for b in range(x.shape[0]):
        points = coords[b % coords.shape[0]].tolist()
        for i, (yi, xi) in enumerate(points):
            for j, (yj, xj) in enumerate(points):
                sides = zip((yi - yj, xi - xj), position.axes, strict=True)
                h, w = (max(-axis.size, min(axis.size, offset)) + axis.size for offset, axis in sides)
                read = {
                    name: tables[0][:, h] + tables[1][:, w]
                    for name, tables in position.tables.items()
                    if name != "kernel"
                }
                pair = read["bias"] + s * ((q[b, :, n + i] + position.vectors["v"]) * read["query"]).sum(-1)
                scores[b, :, n + i, n + j] += pair + s * (k[b, :, n + j] * read["key"]).sum(-1)
                values[b, :, n + i, n + j] += read["value"]
                if (yi - yj + position.axes[0].size, xi - xj + position.axes[1].size) == (h, w):  # within the table
                    direct[b, :, n + i] += s * position.tables["kernel"][0][:, h, w, None] * v[b, :, n + j]
    out = torch.einsum("bhij,bhijd->bhid", scores.softmax(-1), values) + direct
    out = out.transpose(1, 2).flatten(2)
    out = attn.norm(out) * (attn.gate(x).sigmoid() if attn.gate is not None else 1)
    return scores, attn.proj(out)


ROTARY = {
    "eva": EvaAttention(24, 2, num_prefix_tokens=2, norm_layer=torch.nn.LayerNorm),
    "eva, bias apart": EvaAttention(24, 2, num_prefix_tokens=2, qkv_bias_separate=True, scale_norm=False),
    "eva, separate, gated": EvaAttention(
        24, 2, qkv_fused=False, num_prefix_tokens=2, gated=True, qk_norm=True, norm_layer=torch.nn.LayerNorm
    ),
    "eva, no bias": EvaAttention(24, 2, qkv_bias=False, num_prefix_tokens=2, scale_norm=False, rotate_half=True),
    "rope": AttentionRope(24, 2, num_prefix_tokens=2),
    "rope, wide heads": AttentionRope(24, 2, attn_head_dim=16, num_prefix_tokens=2),
    "rope, grouped": AttentionRope(24, 2, qkv_fused=False, num_kv_heads=1, num_prefix_tokens=2, rotate_half=True),
}


@pytest.mark.parametrize("backend", ["dense", "reference"])
@pytest.mark.parametrize("place", ["grid", "points"])
@pytest.mark.parametrize("name", ROTARY)
@torch.no_grad()
def test_rotary_attentions_equal_the_formulas(name, place, backend):
    plain = randomize(copy.deepcopy(ROTARY[name])).double()
    kind = RelativeEvaAttention if isinstance(plain, EvaAttention) else RelativeAttentionRope
    attn = kind.from_attention(
        plain, grid_size=(2, 3), rel_pos="txl+bias+key+value+kernel", num_prefix_tokens=2, backend=backend
    )
    randomize(attn, "position.", std=0.7)
    x = torch.randn(2, 8, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    where, mask = Grid(2, 3), None
    if place == "points":
        where = Points(torch.randint(0, 4, (2, 6, 2), generator=torch.Generator().manual_seed(6)))
        mask = torch.zeros(2, 1, 1, 8, dtype=torch.float64)
        mask.places = where
    generator = torch.Generator().manual_seed(7)
    for rope in (None, torch.randn(6, 2 * attn.head_dim, dtype=torch.float64, generator=generator)):
        scores, expected = loops(attn, x, rope, where, attn.rotate_half)
        torch.testing.assert_close(attn(x, rope=rope, attn_mask=mask), expected, rtol=0, atol=1e-12)
        if place == "grid":
            torch.testing.assert_close(attn.scores(x, rope), scores, rtol=0, atol=1e-12)
            assert list(attn.terms(x, rope))[-1] == ("rotary" if rope is not None else "v")
    attn.fused_attn = False
    torch.testing.assert_close(attn(x, rope=rope, attn_mask=mask), expected, rtol=0, atol=1e-12)
    attn.turned = True
    back = attn.to_attention()
    assert type(back) is type(plain)
    assert vars(back).keys() == vars(plain).keys()


@pytest.mark.parametrize("value", ["", "+value", "+kernel"])
@pytest.mark.parametrize("rope", [False, True])
def test_masks_reach_a_rotary_attention(rope, value):
    """A hidden key has weight 0, causality hides the keys behind, and a row without a key gives 0, with gradients."""
    plain = randomize(AttentionRope(24, 2, num_prefix_tokens=1, proj_bias=False)).double()
    attn = RelativeAttentionRope.from_attention(
        plain, grid_size=(2, 3), rel_pos=f"txl+bias{value}", num_prefix_tokens=1
    )
    randomize(attn, "position.")
    x = torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    embed = torch.randn(6, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(6)) if rope else None
    seen = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(7)) < 0.6
    seen[1, 0, 3] = False
    out = attn(x, rope=embed, attn_mask=seen)
    additive = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    torch.testing.assert_close(attn(x, rope=embed, attn_mask=additive), out)
    assert not out[1, 3].any()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in attn.parameters())
    changed = x.clone()
    changed[:, 4:] += 1
    causal = attn(x, rope=embed, is_causal=True), attn(changed, rope=embed, is_causal=True)
    torch.testing.assert_close(causal[0][:, :4], causal[1][:, :4])
    assert not torch.allclose(causal[0][:, 4:], causal[1][:, 4:])


@pytest.mark.parametrize("kind", [RelativeAttention2d, RelativeAttentionRope, RelativeEvaAttention])
def test_another_attention_is_refused_by_name(kind):
    class Mine(Attention):
        pass

    with pytest.raises(TypeError, match=f"^from_attention: expected a {kind.plain_class.__name__}, got Mine$"):
        kind.from_attention(Mine(8, 2), grid_size=(2, 3))
