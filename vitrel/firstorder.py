"""Gradients of the forms whose backward pass is written out: right once, refused twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FirstOrder(torch.autograd.Function):
    """``(form, gradients, *inputs) -> gradients()``, refused when differentiated again with respect to any input.

    torch's ``once_differentiable`` cuts the graph instead, so that a gradient of given inputs is wrong without a word.
    """

    @staticmethod
    def forward(ctx: Any, form: str, gradients: Callable[[], tuple[Tensor | None, ...]], *inputs: Any) -> Any:
        ctx.form = form
        return gradients()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"backend: {ctx.form!r} cannot be differentiated twice; build the model with backend='reference' for that"
        )
