"""Multi-head self-attention on a patch grid with relative position: ``RelativeAttention2d``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from timm.layers import Attention, register_notrace_module
from torch import Tensor, nn

from vitrel import attend
from vitrel.backends import BACKENDS, Case, check, choose, why
from vitrel.grid import Grid, Where
from vitrel.kernel import add_kernel
from vitrel.masks import masked_softmax
from vitrel.position import Position, PositionTerms
from vitrel.recomputed import Recomputed
from vitrel.relpos import DEFAULT, RelPos
from vitrel.tracing import traced

_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # torch 2.6 has the second alone


@dataclass(frozen=True)
class Memory:
    """The rows above a strip of a taller image, for one attention.

    Attributes:
        hidden: What this attention was given for the patches of the rows above, (B, strip.top * strip.cols, D).
        strip: The strip's own grid; its ``top`` is the number of rows above.
    """

    hidden: Tensor
    strip: Grid

    @property
    def seen(self) -> Grid:
        """The grid of the keys: the rows above and the strip."""
        return Grid(self.strip.top + self.strip.rows, self.strip.cols)


@register_notrace_module  # torch.fx sees one node: what runs depends on the number of tokens, which a trace has not
class RelativeAttention2d(Attention):
    """timm's ``Attention`` with relative position terms between the patches of a grid.

    Args:
        dim: Model width D.
        num_heads: H.
        grid_size: (h, w) in patches.
        rel_pos: A ``RelPos``, a name such as ``"txl"`` or ``"txl+bias"``, or a mapping of its fields.
        num_prefix_tokens: Tokens before the patches (class token, registers); no term but content and u reaches them.
        backend: ``auto`` (by measured crossovers), ``dense``, ``written``, ``folded``, ``blocked`` or ``reference``.
        **kwargs: Further arguments of timm's ``Attention``.

    Raises:
        ValueError: For an unknown scheme or backend, or a backend that cannot serve the scheme.
    """

    plain_class: ClassVar[type[nn.Module]] = Attention
    """What it is without position, and what ``from_attention`` takes."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        grid_size: tuple[int, int],
        rel_pos: Any = DEFAULT,
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
        self._relate(spec, (int(grid_size[0]), int(grid_size[1])), num_prefix_tokens, backend)
        self.position: PositionTerms | None = PositionTerms(
            spec, dim, self.num_heads, self.head_dim, self.grid_size, device=device, dtype=dtype
        )

    def _relate(self, spec: RelPos, grid_size: tuple[int, int], num_prefix_tokens: int, backend: str) -> None:
        check(backend, spec)
        self.grid_size, self.num_prefix_tokens = grid_size, num_prefix_tokens
        self.backend, self._spec = backend, spec
        self.places: Where | None = None  # where the patches of this batch lie, if not on the grid of the tables
        self.running_grid: tuple[int, int] | None = None  # (h, w) of this batch, if not that of the tables
        self.recomputed: Recomputed | None = None  # under gradient checkpointing, for grids that change
        self.memory: Memory | None = None  # set while a strip of a taller image is read
        # In a tuple, so that a position held by another layer is not registered (and saved) here again.
        self._shared: tuple[PositionTerms, ...] = ()

    @classmethod
    def from_attention(
        cls,
        attn: nn.Module,
        *,
        grid_size: tuple[int, int],
        rel_pos: Any = DEFAULT,
        num_prefix_tokens: int = 0,
        backend: str = "auto",
        shared: PositionTerms | None = None,
    ) -> RelativeAttention2d:
        """A relative attention with the layers (not copies) of a timm attention, which stays as it is.

        Args:
            attn: Of the class ``plain_class``.
            shared: Position parameters that another layer holds, to be read by this one too.

        Raises:
            TypeError: If ``attn`` is of another class, whose forward pass may differ.
        """
        if type(attn) is not cls.plain_class:
            raise TypeError(f"from_attention: expected a {cls.plain_class.__name__}, got {type(attn).__name__}")
        new = _same_layers(attn, cls)
        assert isinstance(new, RelativeAttention2d)
        new._relate(RelPos.of(rel_pos), (int(grid_size[0]), int(grid_size[1])), num_prefix_tokens, backend)
        if shared is not None:
            new.position, new._shared = None, (shared,)
            return new
        weight, dim = new.proj.weight, new._inputs.in_features
        new.position = PositionTerms(
            new._spec, dim, new.num_heads, new.head_dim, new.grid_size, device=weight.device, dtype=weight.dtype
        ).train(new.training)
        return new

    def to_attention(self) -> nn.Module:
        """The timm attention with the same layers (not copies) and without position."""
        plain = _same_layers(self, self.plain_class)
        # num_prefix_tokens stays: timm's rotary attentions have it themselves
        own = ("position", "grid_size", "_spec", "backend", "places", "running_grid", "recomputed", "memory", "_shared")
        for name in own:
            delattr(plain, name)
        return plain

    @property
    def _inputs(self) -> nn.Linear:
        return self.qkv

    @property
    def rel_pos(self) -> RelPos:
        return self._spec

    @property
    def position_terms(self) -> PositionTerms:
        """The position parameters, this layer's own or those of the layer that holds them for all."""
        return self.position if self.position is not None else self._shared[0]

    def set_grid_size(self, grid_size: tuple[int, int]) -> None:
        """Take another grid (h, w) in patches, and give the tables its size by the rule ``rel_pos.resize``."""
        self.grid_size, self.running_grid = (int(grid_size[0]), int(grid_size[1])), None
        self.position_terms.set_grid_size(self.grid_size)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend.

        Args:
            x: (B, L, D), L = num_prefix_tokens + h * w.
            attn_mask: Boolean (True = attend) or additive, broadcastable to (B, H, L, L); with a memory of M patches
                to (B, H, L, num_prefix_tokens + M + h * w).
            is_causal: Hide keys behind the query in token order, besides those that ``attn_mask`` hides.

        Returns:
            (B, L, D).

        Raises:
            ValueError: If L is not that of the grid, the mask does not fit, or the backend asked for cannot serve the
                call.
        """
        q_where, k_where, position = self._where(attn_mask)
        q, k, v = self._qkv(x, q_where)
        attn_mask = self._mask(x, k, attn_mask, is_causal)
        if self.fused_attn:
            dropout_p = self.attn_drop.p if self.training else 0.0
            case = Case(
                self._spec,
                k.shape[2],
                x.device.type,
                grad=torch.is_grad_enabled(),
                full_grids=isinstance(q_where, Grid),
                traced=traced(),
                dropout=dropout_p > 0,
                mask_grad=attn_mask is not None and attn_mask.requires_grad,
                half=v.element_size() == 2,
            )
            out = BACKENDS[self.choose(case)](q, k, v, position, q_where, k_where, attn_mask, dropout_p)
        else:
            scores = attend.dense_scores(q, k, position, q_where, k_where)
            weights = self.attn_drop(masked_softmax(scores, attn_mask))
            out = attend.weigh(weights, v, position, q_where, k_where)
            out = add_kernel(out, v, position, q_where, k_where, attn_mask)
        return self._project(out, x)

    def choose(self, case: Case) -> str:
        """The backend that a call takes."""
        return choose(self.backend, case)

    def why(self, backend: str, case: Case) -> str:
        """Why a call takes this backend."""
        return why(backend, case) if self.backend == "auto" else "asked for"

    def _where(self, attn_mask: Tensor | None) -> tuple[Where, Where, Position]:
        """Where queries and keys lie, and the position to read."""
        if self.memory is not None:
            seen = self.memory.seen
            return self.memory.strip, seen, self.position_terms(reads=(seen.rows, seen.cols))
        # Coordinates come with the mask: under checkpointing a block runs again later, and gets its own mask again.
        places = getattr(attn_mask, "places", self.places)
        if places is not None:
            return places, places, self.position_terms()
        size = self.running_grid or self.grid_size
        if self.recomputed is not None:
            self.recomputed.check(size)
        grid = Grid(*size)
        return grid, grid, self.position_terms(self.running_grid, reads=size)

    def _project(self, out: Tensor, x: Tensor) -> Tensor:
        """The output layers: heads (B, H, L, d) to (B, L, D), gated by the input x."""
        out = out.transpose(1, 2)
        if _is_exporting():  # the exported kernel may lay out its result in another way than the traced one
            out = out.clone(memory_format=torch.contiguous_format)
        out = self.norm(out.flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _mask(self, x: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
        attn_mask = self._check_mask(attn_mask, x, k)
        if not is_causal:
            return attn_mask
        if k.shape[2] != x.shape[1]:
            raise ValueError("is_causal: the rows of a memory have no place in token order; leave it out")
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if attn_mask is None or attn_mask.dtype == torch.bool:
            return causal if attn_mask is None else attn_mask & causal
        return attn_mask.masked_fill(~causal, -torch.inf)

    def _check_mask(self, attn_mask: Tensor | None, x: Tensor, k: Tensor) -> Tensor | None:
        if attn_mask is None:
            return None
        if attn_mask.ndim < 2:  # the forms index queries and keys
            attn_mask = attn_mask.expand(torch.broadcast_shapes(attn_mask.shape, (1, 1)))
        full = (x.shape[0], self.num_heads, x.shape[1], k.shape[2])
        fits = attn_mask.ndim <= 4 and all(m in (1, n) for m, n in zip(attn_mask.shape[::-1], full[::-1], strict=False))
        if not fits or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
            raise ValueError(
                f"attn_mask: expected a boolean or floating point mask that broadcasts to (B, H, L, L) = {full}, got "
                f"{attn_mask.dtype} of shape {tuple(attn_mask.shape)}; a key mask (B, L) is mask[:, None, None]"
            )
        return attn_mask

    def scores(self, x: Tensor) -> Tensor:
        """Scores before mask and softmax by the readable reference, (B, H, L, L)."""
        return torch.stack(list(self.terms(x).values())).sum(0)

    def terms(self, x: Tensor) -> dict[str, Tensor]:
        """Each term's summand of ``scores(x)``: term name to (B, H, L, L), ``content`` first.

        ``rotary`` is what turning changes of the content term. Terms of the output (``value``, ``kernel``) have none.
        """
        q_where, k_where, position = self._where(None)
        q, k, _ = self._qkv(x, q_where)
        return attend.reference_terms(q, k, position, q_where, k_where)

    def _qkv(self, x: Tensor, where: Where) -> tuple[Tensor, Tensor, Tensor]:
        if x.ndim != 3:
            raise ValueError(f"x: expected shape (B, L, D), got {tuple(x.shape)}")
        if x.shape[1] != self.num_prefix_tokens + where.patches:
            size = f"{where.rows}x{where.cols}" if isinstance(where, Grid) else where.patches
            raise ValueError(
                f"x has {x.shape[1]} tokens, expected {self.num_prefix_tokens} prefix tokens and {size} patches "
                f"({self.num_prefix_tokens + where.patches}); set grid_size and num_prefix_tokens to what x holds"
            )
        if self.memory is None:
            q, k, v = self._heads(x)
        else:
            prefix, patches = x.tensor_split([self.num_prefix_tokens], 1)
            q, k, v = self._heads(torch.cat([prefix, self.memory.hidden.to(x), patches], 1))
            above = self.memory.hidden.shape[1]
            q = torch.cat([q[:, :, : prefix.shape[1]], q[:, :, prefix.shape[1] + above :]], 2) if above else q
        return self.q_norm(q), self.k_norm(k), v

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values before their norms, each (B, H, L, d)."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)


def _same_layers(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A module of another class with the attributes, parameters and layers (not copies) of ``module``."""
    new = kind.__new__(kind)
    new.__dict__.update({k: v.copy() if isinstance(v, (dict, set)) else v for k, v in module.__dict__.items()})
    return new
