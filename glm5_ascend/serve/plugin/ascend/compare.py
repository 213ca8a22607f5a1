"""`GLM5_COMPARE=1`: what the fused ops answer, beside the CPU reference on the same inputs, layer by layer.

Logged per layer and call: for the indexer the share of chosen positions that the reference did not choose (ties may
differ), for attention the relative error of its output, for MLAPO the largest one of what it gives and writes. bf16
rounding gives some 0.005, int8 rounding in fp16 (MLAPO) some 0.02; 1 means another function. int8 caches (C8) are read
as they are. Not compared: the routed experts, whose call hides which layer and which of its tokens it serves.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from glm5_ascend.serve.plugin.ascend import mlapo
from glm5_ascend.serve.plugin.ascend.calls import (
    ATTENTION,
    INDEXER,
    PREPROCESS,
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
    """`operator`: vllm-ascend's DeviceOperator. Its answers are passed on as they are."""
    differences = {INDEXER: indexer_difference, ATTENTION: attention_difference, PREPROCESS: preprocess_difference}
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
            said = difference(named(method, arguments, keywords), answer)
            logger.warning("glm5-ascend compare: %s, call %d: %s: %s", layer, seen[layer], name, said)
        return answer

    return compared


def indexer_difference(call: dict[str, Any], answer: torch.Tensor) -> str:
    int8 = bool(call.get("enable_sparse_li_c8"))
    if int8 and (call["q_li"].dtype != torch.int8 or call["q_li_scale"] is None):
        return f"not compared: keys of {call['q_li'].dtype}"
    reference = registry.load("lightning_indexer_quant" if int8 else "lightning_indexer", "reference")
    taken = quantized_indexer_arguments(call) if int8 else indexer_arguments(call)
    want = reference(*(on_cpu(each) for each in taken))
    given = answer.flatten(1).cpu()[: len(want)]
    wrong = chosen = 0
    for ours, theirs in zip(want.tolist(), given.tolist(), strict=True):
        right = {position for position in ours if position >= 0}
        chosen += len(right)
        wrong += len(right - set(theirs))
    return f"{wrong} of {chosen} chosen positions differ ({wrong / max(chosen, 1):.4f})"


def attention_difference(call: dict[str, Any], answer: Any) -> str:
    packed, kind = packed_latents(call), call["kv_cache"][0].dtype
    if not packed and kind.itemsize == 1:
        return f"not compared: a cache of {kind}"  # fp8, of other machines
    reference = registry.load("sparse_flash_attention_quant" if packed else "sparse_flash_attention", "reference")
    want, _ = reference(*(on_cpu(each) for each in attention_arguments(call)), True)
    given = answer[0] if isinstance(answer, tuple) else answer
    return f"relative error {relative(given[: len(want)], want):.5f}"


def preprocess_difference(call: dict[str, Any], answer: Any) -> str:
    taken = mlapo.arguments(call)
    wanted = dict(zip(("ql_nope", "q_pe", "q_c"), registry.load("mla_preprocess", "reference")(*taken), strict=True))
    real = call["slot_mapping"].cpu() >= 0  # padding is written nowhere
    wanted |= {"latents": taken[9][0][real], "keys": taken[10][0][real]}
    errors = {name: relative(given, wanted[name]) for name, given in mlapo.answered(call, answer).items()}
    each = ", ".join(f"{name} {error:.5f}" for name, error in errors.items())
    return f"relative error {max(errors.values()):.5f} ({each})"


def relative(given: torch.Tensor, want: torch.Tensor) -> float:
    want, given = want.float(), given.float().cpu()
    return float((given - want).norm() / want.norm().clamp_min(1e-30))


def on_cpu(value: Any) -> Any:
    if isinstance(value, PagedBatch):
        return PagedBatch(*(field.cpu() for field in value))
    return value.cpu() if isinstance(value, torch.Tensor) else value
