"""`GLM5_COMPARE=1`: compares the fused indexer and attention with the CPU reference on the same inputs, by layer.

Logged per layer and call: for the indexer the share of the reference's positions that it did not choose (ties may
differ), for attention the relative error of its output. bf16 rounding gives about 0.005; 1 means another function. int8
caches (C8) are read as they are. `glm5-ascend parity` compares the other ops, MLAPO and the routed experts included.
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
    packed_latents,
    quantized_indexer_arguments,
)  # fmt: skip
from glm5_kernels import registry
from glm5_kernels.ops import PagedBatch

logger = logging.getLogger("vllm.glm5_ascend")


def wrap(operator: Any, steps: int) -> None:
    """Compare the calls of vllm-ascend's DeviceOperator, whose results do not change. `steps`: calls per layer."""
    differences = {INDEXER: indexer_difference, ATTENTION: attention_difference}
    for name, difference in differences.items():
        if hasattr(operator, name):
            setattr(operator, name, staticmethod(_compared(name, getattr(operator, name), difference, steps)))
        else:
            logger.warning("glm5-ascend compare: this vllm-ascend has no %s, it is not compared", name)


def _compared(name: str, method: Any, difference: Any, steps: int) -> Any:
    seen: Counter[str] = Counter()

    def compared(*arguments: Any, **keywords: Any) -> Any:
        answer = method(*arguments, **keywords)
        layer = layer_of(method, arguments, keywords)
        if seen[layer] < steps:
            seen[layer] += 1
            message = difference(named(method, arguments, keywords), answer)
            logger.warning("glm5-ascend compare: %s, call %d: %s: %s", layer, seen[layer], name, message)
        return answer

    return compared


def indexer_difference(call: dict[str, Any], answer: torch.Tensor) -> str:
    int8 = bool(call.get("enable_sparse_li_c8"))
    if int8 and (call["q_li"].dtype != torch.int8 or call["q_li_scale"] is None):
        return f"not compared: keys of {call['q_li'].dtype}"
    reference = registry.load("lightning_indexer_quant" if int8 else "lightning_indexer", "reference")
    arguments = quantized_indexer_arguments(call) if int8 else indexer_arguments(call)
    expected = reference(*(on_cpu(argument) for argument in arguments))
    actual = answer.flatten(1).cpu()[: len(expected)]
    missing = total = 0
    for ours, theirs in zip(expected.tolist(), actual.tolist(), strict=True):
        positions = {position for position in ours if position >= 0}
        total += len(positions)
        missing += len(positions - set(theirs))
    return f"{missing} of {total} chosen positions differ ({missing / max(total, 1):.4f})"


def attention_difference(call: dict[str, Any], answer: Any) -> str:
    packed, dtype = packed_latents(call), call["kv_cache"][0].dtype
    if not packed and dtype.itemsize == 1:
        return f"not compared: a cache of {dtype}"  # fp8
    reference = registry.load("sparse_flash_attention_quant" if packed else "sparse_flash_attention", "reference")
    expected, _ = reference(*(on_cpu(argument) for argument in attention_arguments(call)), True)
    actual = answer[0] if isinstance(answer, tuple) else answer
    return f"relative error {relative(actual[: len(expected)], expected):.5f}"


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.float().cpu(), expected.float()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def on_cpu(value: Any) -> Any:
    if isinstance(value, PagedBatch):
        return PagedBatch(*(field.cpu() for field in value))
    return value.cpu() if isinstance(value, torch.Tensor) else value
