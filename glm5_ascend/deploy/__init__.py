"""Deployments: profiles, rules for them, servers and files made of them, and the diagnosis of a machine.

    from glm5_ascend.deploy import doctor, render, serve

The commands `doctor`, `deploy render` and `serve` call these functions. They are imported late: this package loads no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5_ascend.deploy.diagnosis.doctor import doctor
    from glm5_ascend.deploy.rendering.files import render
    from glm5_ascend.deploy.server import serve

__all__ = ["doctor", "render", "serve"]
_HOMES = {"doctor": "diagnosis.doctor", "render": "rendering.files", "serve": "server"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
