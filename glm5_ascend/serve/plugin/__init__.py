"""The two entry points: stock vLLM serves GLM-5 (`glm_moe_dsa`) on a CPU, and vllm-ascend is checked and corrected.

vLLM calls `register_platform` once per process while it looks for a platform, and `register` in the API server, the
engine core and every worker. Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging

from glm5_ascend.serve.environment import on_ascend

PLATFORM_CLASS = "glm5_ascend.serve.plugin.platform.Glm5CpuPlatform"

logger = logging.getLogger("vllm.glm5_ascend")  # below "vllm", so that vLLM's handler and level apply


def register_platform() -> str | None:
    """Entry point `vllm.platform_plugins`: class path of our CPU platform, or None."""
    if on_ascend():  # vllm-ascend brings its own
        return None
    from vllm.platforms import cpu_platform_plugin

    return PLATFORM_CLASS if cpu_platform_plugin() is not None else None


def register() -> None:
    """Entry point `vllm.general_plugins`, safe to call twice.

    On a CPU: layers, models and the quantization method `ascend`. With vllm-ascend: see `ascend`.
    """
    if on_ascend():
        from glm5_ascend.serve.plugin import ascend

        ascend.register()
        return
    from vllm.platforms import current_platform

    qualname = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    if qualname != PLATFORM_CLASS:
        if current_platform.is_cpu():
            logger.warning(
                "glm5-ascend stays inactive: vLLM chose %s (is VLLM_TARGET_DEVICE=cpu set? unset it)", qualname
            )
        return
    from glm5_ascend.serve.plugin import mla, models, quantization, tools

    for module in (mla, models, quantization, tools):
        module.register()
