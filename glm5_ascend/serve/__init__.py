"""Serving: vLLM's command line and environment for GLM-5, our plugin inside it, and a client for its API.

    from glm5_ascend.serve import watch

is the command `watch`; `serve` is in `glm5_ascend.deploy`, because it starts a profile. It is imported late: vLLM's
processes import this package before torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5_ascend.serve.watching.api import watch

__all__ = ["watch"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.watching.api").watch
