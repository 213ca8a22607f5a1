"""What a quantization costs: `from glm5_ascend.fidelity import evaluate, analyze`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5_ascend.fidelity.api import analyze as analyze
    from glm5_ascend.fidelity.api import evaluate as evaluate

__all__ = ["analyze", "evaluate"]


def __getattr__(name: str) -> object:
    if name in __all__:  # late: it loads torch
        from glm5_ascend.fidelity import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
