"""Plan a deployment on paper: memory, layout and speed with error bands: `from glm5_ascend.plan import plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5_ascend.plan.api import plan as plan

__all__ = ["plan"]


def __getattr__(name: str) -> object:
    if name in __all__:  # late: imports pydantic and numpy
        from glm5_ascend.plan import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
