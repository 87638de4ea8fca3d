"""Tables of original implementations in the convention of this project: offset Δ = query minus key.

Each function returns what the parameter of the same shape holds: ``table`` (H, 2Kh+1, 2Kw+1[, d]), ``table_h`` or
``table_w`` (H, 2K+1[, d]), ``prefix`` (H, 3). Those for text models give the table of one axis; for a sequence leave
the other axis at zero.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def refuse(name: str, table: Tensor, expected: str) -> ValueError:
    """The error for a tensor of another shape than expected."""
    return ValueError(f"{name}: has shape {tuple(table.shape)}, expected {expected}")


def _centred(rows: Tensor, lowest: int) -> Tensor:
    """Rows of ascending offsets from ``lowest`` on, as a table of K on both sides; offsets without a row get zeros."""
    size = max(-lowest, lowest + len(rows) - 1)
    table = rows.new_zeros(2 * size + 1, *rows.shape[1:])
    table[size + lowest : size + lowest + len(rows)] = rows
    return table


def flat_table(table: Tensor, grid_size: tuple[int, int], name: str = "table") -> tuple[Tensor, Tensor | None]:
    """The flat scalar table of Swin, BEiT and timm's ``RelPosBias``.

    Source: ``timm.layers.RelPosBias``, ``timm.models.beit``, ``timm.models.swin_transformer``; query minus key.

    Args:
        table: ((2h-1)(2w-1), H), with three more rows where there is a class token.
        grid_size: (h, w); a flat table does not tell it.
        name: What an error calls it.

    Returns:
        ``table`` (H, 2h-1, 2w-1), and ``prefix`` (H, 3) (prefix->patch, patch->prefix, prefix->prefix) or None.

    Raises:
        ValueError: If the number of rows is not that of the grid.
    """
    rows, cols = (2 * n - 1 for n in grid_size)
    if table.ndim != 2 or len(table) - rows * cols not in (0, 3):
        h, w = grid_size
        raise refuse(name, table, f"({rows * cols}, heads) for a {h}x{w} grid, or 3 more rows with a class token")
    offsets, prefix = table[: rows * cols], table[rows * cols :]
    return offsets.T.reshape(-1, rows, cols), prefix.T if len(prefix) else None


def tf_table(table: Tensor) -> Tensor:
    """The scalar table of TensorFlow's MaxViT and timm's ``RelPosBiasTf``: (H, 2h-1, 2w-1), there key minus query.

    Raises:
        ValueError: If a side is even.
    """
    if table.ndim != 3 or not table.shape[1] % 2 or not table.shape[2] % 2:
        raise refuse("table", table, "(heads, 2h-1, 2w-1)")
    return table.flip(1, 2)


def levit_table(table: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """LeViT's ``attention_biases`` (H, h*w) over (|Δh|, |Δw|), for ``directed=False``: (H, h, w).

    Source: ``timm.models.levit``.

    Raises:
        ValueError: If the grid has another number of entries.
    """
    if table.ndim != 2 or table.shape[1] != grid_size[0] * grid_size[1]:
        raise refuse("attention_biases", table, f"(heads, {grid_size[0] * grid_size[1]}) for a {grid_size} grid")
    return table.reshape(-1, *grid_size)


def sam_axis(
    rel_pos: Tensor, q_size: int, k_size: int | None = None, name: str = "rel_pos"
) -> tuple[Tensor, Tensor, Tensor]:
    """One axis of SAM's and MViTv2's decomposed table, shared by the heads (``share_heads``), for unscaled queries.

    Source: ``get_rel_pos`` of segment-anything, ``cal_rel_pos_spatial`` of MViTv2. Grids of unlike sides are laid over
    each other there; here in steps so fine that all coordinates are whole, with a row of the table per step.

    Args:
        rel_pos: (2n-1, d), n the larger side; another length is stretched linearly as the source does.
        q_size: Side of the query grid.
        k_size: Side of the key grid, None for the same.
        name: What an error calls it.

    Returns:
        The table (1, 2K+1, d), the query coordinates (q_size,) and the key coordinates (k_size,), K = n-1 and
        coordinates 0, 1, ... for equal sides.

    Raises:
        ValueError: If the table is not of two dimensions with an odd number of rows.
    """
    if rel_pos.ndim != 2 or not len(rel_pos) % 2:
        raise refuse(name, rel_pos, "(2n-1, head width), n the larger side of the grids")
    k_size = q_size if k_size is None else k_size
    entries = 2 * max(q_size, k_size) - 1
    if len(rel_pos) != entries:
        wide = rel_pos.to(torch.promote_types(rel_pos.dtype, torch.float32))
        rel_pos = F.interpolate(wide.T[None], size=entries, mode="linear")[0].T.to(rel_pos.dtype)
    divisor = math.gcd(q_size, k_size)
    q_step, k_step, per_row = k_size // divisor, q_size // divisor, min(q_size, k_size) // divisor
    lowest, highest = -(k_size - 1) * k_step, (q_size - 1) * q_step
    rows = rel_pos[torch.arange(highest - lowest + 1, device=rel_pos.device) // per_row]
    return _centred(rows, lowest)[None], torch.arange(q_size) * q_step, torch.arange(k_size) * k_step


def irpe_table(table: Tensor, term: str = "query", *, joint: bool = True) -> tuple[Tensor, Tensor | None]:
    """A table of iRPE, for piecewise buckets: product (joint) or one axis of cross (separable).

    Source: microsoft/Cream, ``irpe.py``. There ``rpe_k`` is multiplied with queries (our term ``query``) and ``rpe_q``
    with keys, reading the bucket of -Δ (our term ``key``, flipped here).

    Args:
        table: (H, n) in mode bias; contextual (H, d, n), for the values (H, n, d). n = B or B*B buckets, B odd, and one
            more where there is a class token.
        term: ``query``, ``key`` or ``value``; a scalar table of ``rpe_q`` is a ``key`` one.
        joint: Product, else cross.

    Returns:
        (H, B, B[, d]) or (H, B[, d]), and the bucket of all pairs with the class token, (H[, d]), or None.

    Raises:
        ValueError: If the number of buckets is neither.
    """
    if term not in ("query", "key", "value"):
        raise ValueError(f"term: {term!r} is unknown, expected query, key or value")
    rows = table.mT if table.ndim == 3 and term != "value" else table
    count = rows.shape[1] if table.ndim in (2, 3) else 0
    side = math.isqrt(count) if joint else count - (count + 1) % 2
    buckets = side**2 if joint else side
    if count - buckets not in (0, 1) or side % 2 == 0:
        raise refuse("table", table, f"an odd {'square' if joint else 'number'} of buckets, or one more")
    prefix = rows[:, buckets] if count > buckets else None
    rows = rows[:, :buckets].unflatten(1, (side, side)) if joint else rows[:, :buckets]
    return (rows.flip(1, 2) if joint else rows.flip(1)) if term == "key" else rows, prefix


def txl_table(r: Tensor, r_weight: Tensor, num_heads: int) -> Tensor:
    """Transformer-XL's R of one axis, from its sinusoids through ``r_net``; negative offsets, causal there, are zero.

    Source: kimiyoung/transformer-xl, ``RelPartialLearnableMultiHeadAttn``.

    Args:
        r: (L, D) in descending distance, the last row of distance 0.
        r_weight: (H*d, D), the weight of ``r_net``.
        num_heads: H.

    Returns:
        (H, 2L-1, d).
    """
    return _centred((r @ r_weight.T).flip(0).unflatten(1, (num_heads, -1)), 0).transpose(0, 1)


def txl_learned_tables(r_emb: Tensor, r_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Transformer-XL's learned embeddings of one axis, for ``txl_learned``; negative offsets, causal there, are zero.

    Source: kimiyoung/transformer-xl, ``RelLearnableMultiHeadAttn``. Its scalar term is scaled with the sum, ours is
    not, so the factor 1/sqrt(d) goes into the table.

    Args:
        r_emb: (K, H, d), the last row of distance 0.
        r_bias: (K, H).

    Returns:
        The query table (H, 2K-1, d) and the bias table (H, 2K-1).

    Raises:
        ValueError: If the two do not belong together.
    """
    if r_emb.ndim != 3 or r_bias.shape != r_emb.shape[:2]:
        raise refuse("r_bias", r_bias, f"(distances, heads) of r_emb {tuple(r_emb.shape)}")
    vectors, scalars = (_centred(rows.flip(0), 0).transpose(0, 1) for rows in (r_emb, r_bias))
    return vectors, scalars * r_emb.shape[-1] ** -0.5


def xlnet_table(r: Tensor, r_proj: Tensor, key_length: int) -> Tensor:
    """XLNet's R of one axis: (Lk+Lq, D) in descending offset from Lk on, through (D, H, d) -> (H, 2Lk+1, d).

    Source: ``transformers``, ``XLNetRelativeAttention``.
    """
    rows = torch.einsum("ld,dhe->lhe", r, r_proj).flip(0)
    return _centred(rows, key_length + 1 - len(r)).transpose(0, 1)


def deberta_table(rel_embeddings: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int) -> Tensor:
    """DeBERTa's table of one axis for ``max_distance=span`` (or as many buckets); both of its terms read query - key.

    Source: ``transformers``, ``DisentangledSelfAttention``. Its 2*span rows end at span - 1, which span shares.

    Args:
        rel_embeddings: (2*span, D).
        weight: (H*d, D) of ``pos_key_proj`` (our term ``query``) or ``pos_query_proj`` (``key``).
        bias: (H*d,) of the same.
        num_heads: H.

    Returns:
        (H, 2*span+1, d).
    """
    rows = F.linear(rel_embeddings, weight, bias).unflatten(1, (num_heads, -1))
    return torch.cat([rows, rows[-1:]]).transpose(0, 1)


def t5_table(embedding: Tensor) -> Tensor:
    """T5's bidirectional scalar table of one axis, for ``distance="t5_log"``: (2n, H) -> (H, 2n-1).

    Source: ``transformers``, ``T5Attention``: keys before the query (Δ > 0) in the lower half, row n is never read.

    Raises:
        ValueError: If the number of buckets is odd.
    """
    if embedding.ndim != 2 or len(embedding) % 2:
        raise refuse("embedding", embedding, "(an even number of buckets, heads)")
    half = len(embedding) // 2
    return torch.cat([embedding[half + 1 :].flip(0), embedding[:half]]).T
