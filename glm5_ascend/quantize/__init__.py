"""From source checkpoint to quantized checkpoint: `from glm5_ascend.quantize import quantize`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5_ascend.quantize.api import quantize as quantize

__all__ = ["quantize"]


def __getattr__(name: str) -> object:
    if name in __all__:  # late: it loads torch
        from glm5_ascend.quantize import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
