"""What is computed for the offsets of one grid, and stretched over those of another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrel.resize import RESIZE


class Stretched(nn.Module):
    """Remembers the size for which it was made, in its state dict too, and the rule by which it follows another.

    Args:
        size: Rows and columns, in the unit of the class; those of a grid or the largest offsets.
        resize: A key of ``vitrel.resize.RESIZE``.
    """

    reference: Tensor

    def __init__(self, size: tuple[int, int], resize: str, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.made_for, self.resize = size, resize  # as numbers, so that a step need not read them from the device
        self.register_buffer("reference", torch.tensor(size, dtype=torch.int64, device=device))

    @property
    def stretches(self) -> bool:
        return self.resize in ("interpolate", "geometric")

    def places(self, size: int, made_for: int, stretched_to: int, device: torch.device) -> Tensor:
        """Where offsets up to ``size`` lie among those up to ``made_for``, which now reach to ``stretched_to``."""
        offset = torch.arange(-size, size + 1, device="cpu" if self.stretches else device)
        return RESIZE[self.resize](offset.double(), made_for, stretched_to).to(device) if self.stretches else offset

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.reference.copy_(torch.tensor(self.made_for, device="cpu"))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):  # type: ignore[no-untyped-def]
        stored = state_dict.get(prefix + "reference")
        if stored is None:  # weights from elsewhere, or parameters alone
            device = "cpu" if self.reference.is_meta else self.reference.device
            state_dict[prefix + "reference"] = torch.tensor(self.made_for, device=device)
        elif tuple(stored.shape) == (2,) and not stored.is_meta:
            rows, cols = stored.tolist()
            self.made_for = (int(rows), int(cols))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
