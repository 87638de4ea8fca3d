"""The attentions of timm's Eva family with relative position: other projections, and the model's rotary embedding."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from vitrel import attend
from vitrel.attention import RelativeAttention2d
from vitrel.backends import Case
from vitrel.grid import Where
from vitrel.kernel import add_kernel
from vitrel.masks import masked_softmax
from vitrel.position import Position
from vitrel.terms import TERMS


class RelativeAttentionRope(RelativeAttention2d, AttentionRope):  # type: ignore[misc]  # timm: a Final in each
    """timm's ``AttentionRope`` with relative position terms; made from one by ``from_attention``.

    The model's rotary embedding turns the queries and keys of the content term alone. The position terms and u read
    them unturned, so that a term means the same with and without it: a table entry is a function of the offset, and a
    turned query would make it one of the query's own place too.
    """

    plain_class: ClassVar[type[nn.Module]] = AttentionRope
    turned = False
    """Whether its model hands it a rotary embedding."""

    def forward(  # type: ignore[override]  # timm's blocks pass these by name
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend.

        Args:
            x: (B, L, D).
            rope: timm's embedding ``[sin | cos]`` of the patches, broadcastable to (B, H, patches, 2d); None to turn
                nothing.
            attn_mask: As ``RelativeAttention2d``.
            is_causal: As ``RelativeAttention2d``.

        Returns:
            (B, L, D).
        """
        if rope is None:
            return super().forward(x, attn_mask, is_causal)
        where, _, position = self._where(attn_mask)
        q, k, v = self._qkv(x, where)
        attn_mask = self._mask(x, k, attn_mask, is_causal)
        scale, turned = position.scales["content"], (self._turn(q, rope), self._turn(k, rope))
        bias = self._bias(q, k, position, where)
        if self.fused_attn and self.backend != "reference" and "value" not in position.terms:
            dropout_p = self.attn_drop.p if self.training else 0.0
            out = attend.biased_attention(*turned, v, bias, scale, attn_mask, dropout_p)
        else:
            scores = scale * turned[0] @ turned[1].mT
            weights = self.attn_drop(masked_softmax(scores if bias is None else scores + bias, attn_mask))
            out = attend.weigh(weights, v, position, where, where)
        out = add_kernel(out, v, position, where, where, attn_mask)
        return self._project(out, x)

    def to_attention(self) -> nn.Module:
        plain = super().to_attention()
        plain.__dict__.pop("turned", None)
        return plain

    def choose(self, case: Case) -> str:
        """As ``RelativeAttention2d``; the model's own rotary embedding has the position terms as one additive bias."""
        return "dense" if self.turned and self.backend == "auto" else super().choose(case)

    def why(self, backend: str, case: Case) -> str:
        """As ``RelativeAttention2d``."""
        if self.turned and self.backend == "auto":
            return "the model's own rotary embedding turns the content term alone: one additive bias"
        return super().why(backend, case)

    def scores(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """Scores before mask and softmax by the readable reference, (B, H, L, L)."""
        return torch.stack(list(self.terms(x, rope).values())).sum(0)

    def terms(self, x: Tensor, rope: Tensor | None = None) -> dict[str, Tensor]:
        """As ``RelativeAttention2d.terms``; ``rotary`` is what ``rope`` changes of the content term."""
        where, _, position = self._where(None)
        q, k, _ = self._qkv(x, where)
        terms = attend.reference_terms(q, k, position, where, where)
        if rope is not None:
            content = position.scales["content"] * self._turn(q, rope) @ self._turn(k, rope).mT
            terms["rotary"] = content - terms["content"]
        return terms

    def _bias(self, q: Tensor, k: Tensor, position: Position, where: Where) -> Tensor | None:
        """The sum of all terms but content, (B or 1, H, L, L); None if there are none."""
        if self.backend == "reference":
            terms = attend.reference_terms(q, k, position, where, where)
            return torch.stack([term for name, term in terms.items() if name != "content"]).sum(0)
        bias = attend.dense_bias(q, k, position, where, where)
        if "u" not in position.terms:
            return bias
        u = position.scales["u"] * TERMS["u"].formula(q, k, position.vectors["u"], q)
        return u.to(q.dtype).expand(-1, -1, q.shape[2], -1) if bias is None else bias + u.to(q.dtype)

    def _turn(self, x: Tensor, rope: Tensor) -> Tensor:
        prefix, patches = x.tensor_split([self.num_prefix_tokens], 2)
        return torch.cat([prefix, apply_rot_embed_cat(patches, rope, half=self.rotate_half).to(x.dtype)], 2)

    @property
    def _inputs(self) -> nn.Linear:
        return self.q_proj if self.qkv is None else self.qkv

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is not None:
            return self._fused(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        heads = [
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        ]
        return tuple(h.repeat_interleave(self.num_heads // h.shape[1], 1) for h in heads)  # grouped keys and values

    def _fused(self, x: Tensor) -> Tensor:
        return self.qkv(x)


class RelativeEvaAttention(RelativeAttentionRope, EvaAttention):  # type: ignore[misc]  # timm: a Final in each
    """timm's ``EvaAttention`` with relative position terms: as ``RelativeAttentionRope``, keys without a bias."""

    plain_class = EvaAttention

    def _fused(self, x: Tensor) -> Tensor:
        if self.q_bias is None:
            return self.qkv(x)
        bias = torch.cat([self.q_bias, cast(Tensor, self.k_bias), cast(Tensor, self.v_bias)])
        return self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
