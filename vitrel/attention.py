"""Multi-head self-attention on a patch grid with relative position: ``RelativeAttention2d``, and ``explain``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, register_notrace_module
from torch import Tensor, nn

from vitrel import attend
from vitrel.grid import Grid
from vitrel.position import PositionTerms
from vitrel.relpos import TERMS, RelPos

_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # torch 2.6 has the second alone


@register_notrace_module  # torch.fx sees one node: what runs depends on the number of tokens, which a trace has not
class RelativeAttention2d(Attention):
    """timm's ``Attention`` with relative position terms between the patches of a grid.

    Args:
        dim: Model width D.
        num_heads: H.
        grid_size: (h, w) in patches.
        rel_pos: A ``RelPos``, a name such as ``"txl"`` or ``"txl+bias"``, or a mapping of its fields.
        num_prefix_tokens: Tokens before the patches (class token, registers); no term but content and u reaches them.
        backend: ``auto``, ``dense`` or ``reference``.
        **kwargs: Further arguments of timm's ``Attention``.

    Raises:
        ValueError: For an unknown scheme or backend.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        grid_size: tuple[int, int],
        rel_pos: Any = "bias",
        num_prefix_tokens: int = 0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        spec = RelPos.of(rel_pos)
        if not isinstance(grid_size, (tuple, list)) or len(grid_size) != 2 or min(grid_size) < 1:
            raise ValueError(f"grid_size: expected (h, w) in patches, each at least 1, got {grid_size!r}")
        if num_prefix_tokens < 0:
            raise ValueError(f"num_prefix_tokens: expected at least 0, got {num_prefix_tokens}")
        self.grid_size = (int(grid_size[0]), int(grid_size[1]))
        self.num_prefix_tokens = num_prefix_tokens
        self.backend, self.backend_reason = attend.choose(backend, spec.terms)
        self._spec = spec
        self.position: PositionTerms | None = self._new_position(dim, device, dtype)
        # In a tuple, so that a position held by another layer is not registered (and saved) here again.
        self._shared: tuple[PositionTerms, ...] = ()

    def _new_position(self, dim: int, device: torch.device | str | None, dtype: torch.dtype | None) -> PositionTerms:
        return PositionTerms(self._spec, dim, self.num_heads, self.head_dim, self.grid_size, device=device, dtype=dtype)

    @classmethod
    def from_attention(
        cls,
        attn: Attention,
        *,
        grid_size: tuple[int, int],
        rel_pos: Any = "bias",
        num_prefix_tokens: int = 0,
        backend: str = "auto",
        shared: PositionTerms | None = None,
    ) -> RelativeAttention2d:
        """A relative attention that takes over the layers (not copies) of a timm ``Attention``.

        Args:
            shared: Position parameters that another layer holds, to be read by this one too.
        """
        weight = attn.qkv.weight
        new = cls(
            attn.qkv.in_features,
            attn.num_heads,
            attn_head_dim=attn.head_dim,
            grid_size=grid_size,
            rel_pos=rel_pos,
            num_prefix_tokens=num_prefix_tokens,
            backend=backend,
            device="meta",
        )
        if shared is None:
            new.position = new._new_position(attn.qkv.in_features, weight.device, weight.dtype)
        else:
            new.position, new._shared = None, (shared,)
        for name, child in attn.named_children():
            setattr(new, name, child)
        new.fused_attn = attn.fused_attn  # type: ignore[misc]  # timm marks it Final for scripting
        return new.train(attn.training)

    @property
    def rel_pos(self) -> RelPos:
        return self._spec

    @property
    def position_terms(self) -> PositionTerms:
        """The position parameters, this layer's own or those of the layer that holds them for all."""
        return self.position if self.position is not None else self._shared[0]

    def set_grid_size(self, grid_size: tuple[int, int]) -> None:
        """Take another grid (h, w) in patches, and give the tables its size by the rule ``rel_pos.resize``."""
        self.grid_size = (int(grid_size[0]), int(grid_size[1]))
        self.position_terms.set_grid_size(self.grid_size)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend.

        Args:
            x: (B, L, D), L = num_prefix_tokens + h * w.
            attn_mask: Boolean (True = attend) or additive, broadcastable to (B, H, L, L).
            is_causal: Hide keys behind the query in token order, besides those that ``attn_mask`` hides.

        Returns:
            (B, L, D).

        Raises:
            ValueError: If L is not that of the grid, or the mask does not fit.
        """
        q, k, v = self._qkv(x)
        attn_mask = self._check_mask(attn_mask, x)
        if is_causal:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            if attn_mask is None or attn_mask.dtype == torch.bool:
                attn_mask = causal if attn_mask is None else attn_mask & causal
            else:
                attn_mask = attn_mask.masked_fill(~causal, -torch.inf)
        grid, position = Grid(*self.grid_size), self.position_terms(self.grid_size)
        if self.fused_attn:
            dropout_p = self.attn_drop.p if self.training else 0.0
            out = attend.BACKENDS[self.backend](q, k, v, position, grid, grid, attn_mask, dropout_p)
        else:
            scores = attend.dense_scores(q, k, position, grid, grid)
            weights = self.attn_drop(attend.masked_softmax(scores, attn_mask))
            out = attend.weigh(weights, v, position, grid, grid)
        out = out.transpose(1, 2)
        if _is_exporting():  # the exported kernel may lay out its result in another way than the traced one
            out = out.clone(memory_format=torch.contiguous_format)
        out = self.norm(out.reshape(*x.shape[:2], self.attn_dim))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _check_mask(self, attn_mask: Tensor | None, x: Tensor) -> Tensor | None:
        if attn_mask is None:
            return None
        full = (x.shape[0], self.num_heads, x.shape[1], x.shape[1])
        fits = attn_mask.ndim <= 4 and all(m in (1, n) for m, n in zip(attn_mask.shape[::-1], full[::-1], strict=False))
        if not fits or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
            raise ValueError(
                f"attn_mask: expected a boolean or floating point mask that broadcasts to (B, H, L, L) = {full}, got "
                f"{attn_mask.dtype} of shape {tuple(attn_mask.shape)}; a key mask (B, L) is mask[:, None, None]"
            )
        return attn_mask

    def scores(self, x: Tensor) -> Tensor:
        """Scores before mask and softmax by the readable reference, (B, H, L, L)."""
        q, k, _ = self._qkv(x)
        grid = Grid(*self.grid_size)
        return attend.reference_scores(q, k, self.position_terms(self.grid_size), grid, grid)

    def terms(self, x: Tensor) -> dict[str, Tensor]:
        """Each term's summand of ``scores(x)``: term name to (B, H, L, L), ``content`` first.

        ``rotary`` is what turning changes of the content term. ``value`` acts on the output and has no summand.
        """
        q, k, _ = self._qkv(x)
        grid = Grid(*self.grid_size)
        return attend.reference_terms(q, k, self.position_terms(self.grid_size), grid, grid)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, w = self.grid_size
        if x.ndim != 3:
            raise ValueError(f"x: expected shape (B, L, D), got {tuple(x.shape)}")
        if x.shape[1] != self.num_prefix_tokens + h * w:
            raise ValueError(
                f"x has {x.shape[1]} tokens, expected {self.num_prefix_tokens} prefix tokens and {h}x{w} patches "
                f"({self.num_prefix_tokens + h * w}); set grid_size and num_prefix_tokens to what x holds"
            )
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.q_norm(q), self.k_norm(k), v


@dataclass(frozen=True)
class BlockReport:
    """What one attention layer does: its block's name, terms, backend, reason, and extra bytes per image."""

    block: str
    terms: str
    grid: str
    backend: str
    why: str
    extra_bytes: int


class Explanation(list[BlockReport]):
    """One ``BlockReport`` per relative attention; prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "no relative attention in this model"
        head = ("block", "terms", "grid", "backend", "extra MB", "why")
        rows = [(r.block, r.terms, r.grid, r.backend, f"{r.extra_bytes / 1e6:.2f}", r.why) for r in self]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
        )

    __repr__ = __str__


def explain(model: nn.Module) -> Explanation:
    """Per relative attention: the terms, the backend taken, why, and the bytes that position adds for one image.

    The bytes are those of the additive bias and, for separable content-dependent terms, of its row and column profiles,
    in the type of the parameters: what the forward pass holds for one image beyond plain fused attention.
    """
    return Explanation(
        BlockReport(
            block=name.removesuffix(".attn"),
            terms="+".join(attn.rel_pos.terms) or "none",
            grid="x".join(map(str, attn.grid_size)),
            backend=attn.backend if attn.fused_attn else "dense",
            why=attn.backend_reason if attn.fused_attn else "fused attention is off (timm.layers.set_fused_attn)",
            extra_bytes=_extra_bytes(attn),
        )
        for name, attn in model.named_modules()
        if isinstance(attn, RelativeAttention2d)
    )


def _extra_bytes(attn: RelativeAttention2d) -> int:
    h, w = attn.grid_size
    patches, tokens, terms = h * w, h * w + attn.num_prefix_tokens, attn.rel_pos.terms
    reads = [t for t in terms if TERMS[t].reads]
    numbers = 0
    if terms and attn.backend == "reference":
        numbers = tokens * tokens * (1 + len(terms)) + (patches * patches * attn.head_dim if reads else 0)
    elif reads or attn.rel_pos.prefix == "learned":
        numbers = tokens * tokens
        contents = [t for t in reads if TERMS[t].needs_input]
        if attn.rel_pos.table == "separable":
            numbers += patches * (h + w)
        elif contents:
            entries = math.prod(axis.entries for axis in attn.position_terms.axes)
            numbers += patches * entries * len(contents)
    return numbers * attn.num_heads * attn.qkv.weight.element_size()
