"""Serving: vLLM's command line and environment for GLM-5, our plugin inside it, and a client for its API.

    from glm5_ascend.serve import serve

is the command `serve` without a profile. It is found late: vLLM's processes import this package before torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5_ascend.serve.launch import serve

__all__ = ["serve"]


def __getattr__(name: str) -> Any:
    if name != "serve":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("glm5_ascend.serve.launch").serve
