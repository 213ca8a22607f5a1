"""What is wrong with a quantized checkpoint: `from glm5_ascend.verify import verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5_ascend.verify.run import verify as verify

__all__ = ["verify"]


def __getattr__(name: str) -> object:
    if name in __all__:  # late: it loads torch
        from glm5_ascend.verify import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
