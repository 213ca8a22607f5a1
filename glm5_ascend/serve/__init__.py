"""Serving: vLLM's command line and environment for GLM-5, our plugin inside it, and a client for its API.

    from glm5_ascend.serve import serve, watch

are the commands `serve`, without a profile, and `watch`. They are imported late: vLLM's processes import this package
before torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5_ascend.serve.launch import serve
    from glm5_ascend.serve.watching.api import watch

__all__ = ["serve", "watch"]
_HOMES = {"serve": "launch", "watch": "watching.api"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
