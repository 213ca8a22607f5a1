"""`GLM5_COMPARE=1`: what the fused ops answer, beside the CPU reference on the same inputs, layer by layer.

Logged per layer and call: for the indexer the share of chosen positions that the reference did not choose (ties may
differ), for attention the relative error of its output. bf16 rounding gives some 0.005; 1 means another function.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from glm5_ascend.serve.plugin.ascend.calls import (
    ATTENTION,
    INDEXER,
    attention_arguments,
    indexer_arguments,
    layer_of,
    named,
    quantized,
)  # fmt: skip
from glm5_kernels import registry

logger = logging.getLogger("vllm.glm5_ascend")


def wrap(operator: Any, steps: int) -> None:
    """`operator`: vllm-ascend's DeviceOperator. Its answers are passed on as they are."""
    for name, difference in ((INDEXER, indexer_difference), (ATTENTION, attention_difference)):
        setattr(operator, name, staticmethod(_compared(name, getattr(operator, name), difference, steps)))


def _compared(name: str, method: Any, difference: Any, steps: int) -> Any:
    seen: Counter[str] = Counter()

    def compared(*arguments: Any, **keywords: Any) -> Any:
        answer = method(*arguments, **keywords)
        call = named(method, arguments, keywords)
        layer = layer_of(call)
        if seen[layer] < steps:
            seen[layer] += 1
            said = "not compared: int8 caches" if quantized(call) else difference(call, answer)
            logger.warning("glm5-ascend compare: %s, call %d: %s: %s", layer, seen[layer], name, said)
        return answer

    return compared


def indexer_difference(call: dict[str, Any], answer: torch.Tensor) -> str:
    reference = registry.load("lightning_indexer", "reference")
    want = reference(*(on_cpu(each) for each in indexer_arguments(call)))
    given = answer.flatten(1).cpu()[: len(want)]
    wrong = chosen = 0
    for ours, theirs in zip(want.tolist(), given.tolist(), strict=True):
        right = {position for position in ours if position >= 0}
        chosen += len(right)
        wrong += len(right - set(theirs))
    return f"{wrong} of {chosen} chosen positions differ ({wrong / max(chosen, 1):.4f})"


def attention_difference(call: dict[str, Any], answer: Any) -> str:
    reference = registry.load("sparse_flash_attention", "reference")
    want, _ = reference(*(on_cpu(each) for each in attention_arguments(call)), True)
    given = answer[0] if isinstance(answer, tuple) else answer
    want, given = want.float(), given.float().cpu()[: len(want)]
    error = float((given - want).norm() / want.norm().clamp_min(1e-30))
    return f"relative error {error:.5f}"


def on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
