"""Vision transformers with 2-D relative position attention, as ordinary timm models.

Importing ``vitrel`` registers its models with timm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitrel import relativized as _relativized  # noqa: F401  registers the models with timm
from vitrel import zoo as _zoo  # noqa: F401
from vitrel.ablate import switched_off
from vitrel.attention import RelativeAttention2d
from vitrel.convert import from_timm
from vitrel.explanation import explain
from vitrel.family import position_parameters
from vitrel.maps import bias_maps, coverage, term_maps
from vitrel.measures import head_numbers
from vitrel.relativize import plain, relativize
from vitrel.relpos import RelPos
from vitrel.strips import StripReader

if TYPE_CHECKING:
    from vitrel.plots import plot_attention, plot_bias_maps, plot_term_maps

__all__ = [
    "RelPos",
    "RelativeAttention2d",
    "StripReader",
    "bias_maps",
    "coverage",
    "explain",
    "from_timm",
    "head_numbers",
    "plain",
    "plot_attention",
    "plot_bias_maps",
    "plot_term_maps",
    "position_parameters",
    "relativize",
    "switched_off",
    "term_maps",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name.startswith("plot_") and name in __all__:  # matplotlib is loaded when a picture is asked for, not before
        from vitrel import plots

        return getattr(plots, name)
    raise AttributeError(f"module 'vitrel' has no attribute {name!r}")
