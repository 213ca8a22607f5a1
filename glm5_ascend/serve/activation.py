"""Tells vLLM's entry points, `serve` and `doctor` whether our plugin is active.

vLLM's processes import this before they have chosen a platform: it imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

GENERAL_PLUGINS = "vllm.general_plugins"
ENTRY_POINTS = {"vllm.platform_plugins": "glm5_cpu", GENERAL_PLUGINS: "glm5_ascend"}
#: 0, false, no or off disables our CPU platform. It does not affect the plugin for vllm-ascend.
CPU_SWITCH = "GLM5_CPU_PLATFORM"


def on_ascend() -> bool:
    """True if vllm-ascend is installed, which has its own platform."""
    return _spec() is not None


def ascend_folder() -> Path | None:
    """Directory of the installed vllm-ascend; None without it."""
    folders = list(getattr(_spec(), "submodule_search_locations", None) or ())
    return Path(folders[0]) if folders else None


def _spec() -> object | None:
    return importlib.util.find_spec("vllm_ascend")


def cpu_platform_is_off(environ: Mapping[str, str]) -> bool:
    return environ.get(CPU_SWITCH, "1").strip().lower() in ("0", "false", "no", "off")


def plugin_is_active(environ: Mapping[str, str] = os.environ, *, ascend: bool | None = None) -> bool:
    """True if vLLM, started with `environ`, runs with our plugin.

    Its entry point must be installed and allowed by VLLM_PLUGINS, and on a CPU not disabled by GLM5_CPU_PLATFORM.

    Args:
        ascend: the machine has vllm-ascend; None: look at this machine.
    """
    name = ENTRY_POINTS[GENERAL_PLUGINS]
    installed = {entry.name for entry in importlib.metadata.entry_points(group=GENERAL_PLUGINS)}
    allowed = {plugin.strip() for plugin in environ.get("VLLM_PLUGINS", name).split(",")}
    if name not in installed & allowed:
        return False
    return (on_ascend() if ascend is None else ascend) or not cpu_platform_is_off(environ)
