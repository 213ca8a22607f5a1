"""What is changed of vllm-ascend's sparse attention, and when.

- Without Triton-Ascend its indexer rotates halves, GLM-5's rotates neighbours: wrong tokens beyond 2048. We give it the
  right rotation (`rotation`), or refuse where it is not found. Remove when vllm-ascend has PR 8982 on both lines.
- `GLM5_KERNELS=reference` or `triton` puts our kernels in the place of the official ones (`kernels`).
- `GLM5_COMPARE=1` computes each fused op a second time by the CPU reference and logs the difference (`compare`).
"""

from __future__ import annotations

import logging
import os
from typing import Any

from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.activation import ascend_folder
from glm5_ascend.serve.plugin.ascend import compare, kernels, rotation
from glm5_ascend.serve.plugin.ascend.calls import INDEXER
from glm5_kernels.registry import VARIABLE

logger = logging.getLogger("vllm.glm5_ascend")
COMPARE, STEPS = "GLM5_COMPARE", "GLM5_COMPARE_STEPS"
#: Values of GLM5_KERNELS that mean vllm-ascend's own.
OFFICIAL = ("", "auto", "npu")
OURS = ("reference", "triton")
_done = False


def prepare() -> None:
    """Once per process. Raises `ConfigError` for settings that cannot be honoured."""
    global _done
    if _done:
        return
    chosen = os.environ.get(VARIABLE, "").strip().lower()
    if chosen not in (*OFFICIAL, *OURS):
        raise ConfigError(f"{VARIABLE}={chosen}: not for an NPU", f"unset it, or one of {', '.join(OURS)}")
    comparing = os.environ.get(COMPARE, "").strip().lower() in ("1", "true", "yes", "on")
    if comparing:
        require_eager(f"{COMPARE}=1")
    if chosen == "reference":
        require_eager(f"{VARIABLE}=reference")
    from vllm_ascend.device.device_op import DeviceOperator

    mend_rotation(DeviceOperator)
    if chosen in OURS:
        kernels.replace(DeviceOperator, chosen)
        logger.warning("glm5-ascend: %s=%s, attention runs on our kernels", VARIABLE, chosen)
    if comparing:
        steps = int(os.environ.get(STEPS, "8"))
        compare.wrap(DeviceOperator, steps)
        logger.warning("glm5-ascend: %s=1, the first %d calls per layer are compared: slow", COMPARE, steps)
    _done = True


def require_eager(setting: str) -> None:
    """A graph replays kernels without Python: nothing would be compared, and host copies cannot be captured."""
    from vllm.config import get_current_vllm_config

    model: Any = get_current_vllm_config().model_config
    if model is not None and not model.enforce_eager:
        raise ConfigError(f"{setting} cannot look into graphs", "add --enforce-eager")


def mend_rotation(operator: Any) -> None:
    """`operator`: vllm-ascend's DeviceOperator. Nothing where Triton-Ascend rotates."""
    from vllm.triton_utils import HAS_TRITON

    folder = ascend_folder()
    if HAS_TRITON or folder is None:
        return
    mended = rotation.mend_all(folder)
    rotation.require_calls(operator, INDEXER)
    logger.warning(
        "glm5-ascend: Triton-Ascend is missing; vllm-ascend's indexer would rotate GLM-5's keys wrongly beyond 2048 "
        "tokens, our slower rotation takes its place (in %s)", ", ".join(mended),
    )  # fmt: skip
