"""The two entry points: by them stock vLLM serves GLM-5 (`glm_moe_dsa`) on a CPU, and vllm-ascend is looked after.

vLLM calls `register_platform` once per process while it looks for a platform, and `register` in the API server, the
engine core and every worker. Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.util
import logging
import os

PLATFORM_CLASS = "glm5_ascend.serve.plugin.platform.Glm5CpuPlatform"
OPT_OUT = "GLM5_CPU_PLATFORM"

logger = logging.getLogger("vllm.glm5_ascend")  # below "vllm", so that vLLM's handler and level apply


def register_platform() -> str | None:
    """Entry point `vllm.platform_plugins`: our CPU platform's class path, or None to stay out of the way."""
    if not _wanted():
        return None
    from vllm.platforms import cpu_platform_plugin

    return PLATFORM_CLASS if cpu_platform_plugin() is not None else None


def register() -> None:
    """Entry point `vllm.general_plugins`, safe to call twice.

    On a CPU: layers, models and the quantization method `ascend`. Beside vllm-ascend: see `ascend`.
    """
    if not _opted_out() and _beside_vllm_ascend():
        from glm5_ascend.serve.plugin import ascend

        ascend.register()
        return
    if not _wanted():
        return
    from vllm.platforms import current_platform

    qualname = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    if qualname != PLATFORM_CLASS:
        if current_platform.is_cpu():
            logger.warning(
                "glm5-ascend stays inactive: vLLM chose %s (is VLLM_TARGET_DEVICE=cpu set? unset it)", qualname
            )
        return
    from glm5_ascend.serve.plugin import compat, mla, models, quantization, tools

    for part in (compat, mla, models, quantization, tools):
        part.register()


def _wanted() -> bool:
    """False on an Ascend machine (vllm-ascend brings its own platform) and where the user opted out."""
    return not _opted_out() and not _beside_vllm_ascend()


def _opted_out() -> bool:
    return os.environ.get(OPT_OUT, "1").strip().lower() in ("0", "false", "no", "off")


def _beside_vllm_ascend() -> bool:
    return importlib.util.find_spec("vllm_ascend") is not None
