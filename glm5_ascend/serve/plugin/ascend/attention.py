"""Changes to vllm-ascend's sparse attention.

- Without Triton-Ascend its indexer rotates halves, GLM-5's rotates neighbours: wrong tokens beyond 2048. We replace the
  rotation (`rotation`), and refuse to select positions if ours was not called. Remove when vllm-ascend has PR 8982 on
  both lines.
- `GLM5_KERNELS=reference` or `triton` replaces the official kernels by ours.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch

from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.plugin.ascend import rotation
from glm5_ascend.serve.plugin.ascend.calls import ATTENTION, INDEXER, attention_arguments, indexer_arguments, named
from glm5_kernels import registry

logger = logging.getLogger("vllm.glm5_ascend")
#: Values of GLM5_KERNELS: vllm-ascend's kernels, and ours.
OFFICIAL, OURS = ("", "auto", "npu"), ("reference", "triton")


@functools.cache
def prepare() -> None:
    """Apply the changes, once per process. Raises `ConfigError` for settings that cannot be applied."""
    implementation = os.environ.get(registry.VARIABLE, "").strip().lower()
    if implementation not in (*OFFICIAL, *OURS):
        raise ConfigError(
            f"{registry.VARIABLE}={implementation}: not for an NPU", f"unset it, or one of {', '.join(OURS)}"
        )
    if implementation == "reference":
        require_eager(f"{registry.VARIABLE}=reference")
    from vllm_ascend.device.device_op import DeviceOperator

    replace_rotation(DeviceOperator)
    if implementation in OURS:
        replace_kernels(DeviceOperator, implementation)
        logger.warning("glm5-ascend: %s=%s, attention runs on our kernels", registry.VARIABLE, implementation)


def require_eager(setting: str) -> None:
    """Raise `ConfigError` without --enforce-eager: a graph replays kernels without running Python."""
    from vllm.config import get_current_vllm_config

    model: Any = get_current_vllm_config().model_config
    if model is not None and not model.enforce_eager:
        raise ConfigError(f"{setting} does not work with graphs", "add --enforce-eager")


def replace_rotation(operator: Any) -> None:
    """Replace the indexer's rotation where Triton-Ascend is missing. `operator`: vllm-ascend's DeviceOperator."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return
    modules = rotation.replace_all()
    rotation.require_calls(operator, INDEXER)
    logger.warning(
        "glm5-ascend: Triton-Ascend is missing; vllm-ascend's indexer would rotate GLM-5's keys wrongly beyond 2048 "
        "tokens, our slower rotation replaces it (in %s)", ", ".join(modules),
    )  # fmt: skip


def replace_kernels(operator: Any, implementation: str) -> None:
    """Replace indexer and attention of vllm-ascend's DeviceOperator by ours; calls on int8 caches are refused."""
    indexer, attention = getattr(operator, INDEXER), getattr(operator, ATTENTION)
    our_indexer = registry.load("lightning_indexer", implementation)
    our_attention = registry.load("sparse_flash_attention", implementation)

    def select(*arguments: Any, **keywords: Any) -> torch.Tensor:
        call = named(indexer, arguments, keywords)
        positions: torch.Tensor = our_indexer(*indexer_arguments(call))
        return positions[:, None]

    def sparse_attention(*arguments: Any, **keywords: Any) -> torch.Tensor:
        call = named(attention, arguments, keywords)
        if call.get("return_lse"):
            raise ConfigError("GLM5_KERNELS: decode context parallelism needs the official kernels", "unset it")
        out: torch.Tensor = our_attention(*attention_arguments(call), True)[0]
        return out

    setattr(operator, INDEXER, staticmethod(select))
    setattr(operator, ATTENTION, staticmethod(sparse_attention))
