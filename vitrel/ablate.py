"""Position terms switched off in a trained model: exact, and on whatever form of attention the model takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitrel.position import Position, PositionTerms


def keep_terms(position: Position, terms: Collection[str]) -> Position:
    """A position with some of its terms alone; content is always there.

    ``v`` reads the table of the query term. Without that term it is a bias, s v.R(Δ), and is kept as one.

    Args:
        position: The position of a layer.
        terms: Names of terms, ``prefix`` for the learned scalars of prefix tokens among them.
    """
    on = [t for t in position.terms if t in terms]
    scales = {t: position.scales[t] for t in ("content", *on)}
    tables = {t: table for t, table in position.tables.items() if t in on}
    vectors = {t: vector for t, vector in position.vectors.items() if t in on}
    if "v" in on and "query" not in on:
        scale, vector = scales.pop("v"), vectors.pop("v")
        parts = tuple(scale * torch.einsum("h...d,hd->h...", table, vector) for table in position.tables["query"])
        if "bias" in on:
            parts = tuple(a + b for a, b in zip(tables["bias"], parts, strict=True))
        tables["bias"], scales["bias"] = parts, 1.0
    prefix: Tensor | None = position.prefix if "prefix" in terms else None
    return replace(position, scales=scales, tables=tables, vectors=vectors, prefix=prefix, kept=None)


def switchable(model: nn.Module) -> list[str]:
    """Names of the position terms of a model's layers, in order; ``prefix`` for learned scalars of prefix tokens."""
    names: dict[str, None] = {}
    for module in model.modules():
        if isinstance(module, PositionTerms):
            names.update(dict.fromkeys(_terms(module)))
    return list(names)


@contextmanager
def switched_off(model: nn.Module, *terms: str) -> Iterator[None]:
    """Within it the model attends without these position terms; afterwards it is as it was.

    Args:
        model: Any model with ``RelativeAttention2d`` layers, not compiled.
        *terms: Names of terms, as ``switchable`` lists them; none for all of them.

    Raises:
        ValueError: If no layer has a term of that name.
    """
    there = switchable(model)
    if unknown := [t for t in terms if t not in there]:
        known = f"expected one of {', '.join(there)}" if there else "it has no position terms"
        raise ValueError(f"no term {unknown[0]!r} in this model, {known}")
    off = terms or tuple(there)

    def without(module: nn.Module, inputs: object, position: Position) -> Position:
        assert isinstance(module, PositionTerms)
        return keep_terms(position, [t for t in _terms(module) if t not in off])

    handles = [m.register_forward_hook(without) for m in model.modules() if isinstance(m, PositionTerms)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _terms(module: PositionTerms) -> tuple[str, ...]:
    return (*module.rel_pos.terms, *(("prefix",) if module.rel_pos.prefix == "learned" else ()))
