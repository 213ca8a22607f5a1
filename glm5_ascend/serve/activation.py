"""Whether our plugin is at work: one answer for vLLM's entry points, for `serve` and for `doctor`.

Light: vLLM's processes import this before they have chosen a platform.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

GENERAL_PLUGINS = "vllm.general_plugins"
ENTRY_POINTS = {"vllm.platform_plugins": "glm5_cpu", GENERAL_PLUGINS: "glm5_ascend"}
#: Set to 0, false, no or off, it switches our CPU platform off. It says nothing about our part beside vllm-ascend.
CPU_SWITCH = "GLM5_CPU_PLATFORM"


def on_ascend() -> bool:
    """vllm-ascend is installed: it brings its own platform, our CPU platform stays out of the way."""
    return _spec() is not None


def ascend_folder() -> Path | None:
    """Where the installed vllm-ascend lies."""
    places = list(getattr(_spec(), "submodule_search_locations", None) or ())
    return Path(places[0]) if places else None


def _spec() -> object | None:
    return importlib.util.find_spec("vllm_ascend")


def cpu_platform_is_off(environ: Mapping[str, str]) -> bool:
    """Whether the user has switched our CPU platform off."""
    return environ.get(CPU_SWITCH, "1").strip().lower() in ("0", "false", "no", "off")


def plugin_is_active(environ: Mapping[str, str] = os.environ, *, ascend: bool | None = None) -> bool:
    """Whether vLLM, started with `environ`, runs with our plugin.

    vLLM must load it: its entry point is installed and VLLM_PLUGINS does not leave it out. On a CPU the user may switch
    it off as well.

    Args:
        ascend: the machine has vllm-ascend; None: as this one.
    """
    name = ENTRY_POINTS[GENERAL_PLUGINS]
    installed = {entry.name for entry in importlib.metadata.entry_points(group=GENERAL_PLUGINS)}
    allowed = {each.strip() for each in environ.get("VLLM_PLUGINS", name).split(",")}
    if name not in installed & allowed:
        return False
    return (on_ascend() if ascend is None else ascend) or not cpu_platform_is_off(environ)
