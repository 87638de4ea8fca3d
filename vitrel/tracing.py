"""Whether a call runs as it is written, or is traced or transformed."""

from __future__ import annotations

import torch


def traced() -> bool:
    """Whether torch.compile, torch.export, torch.jit.trace or torch.func is at work."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
