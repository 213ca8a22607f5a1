"""Our kernels in the place of the official ones, for who asks (`GLM5_KERNELS`)."""

from __future__ import annotations

from typing import Any

import torch

from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.plugin.ascend.calls import (
    ATTENTION,
    INDEXER,
    attention_arguments,
    indexer_arguments,
    named,
    quantized,
)  # fmt: skip
from glm5_kernels import registry


def replace(operator: Any, implementation: str) -> None:
    """`operator`: vllm-ascend's DeviceOperator. Calls on int8 caches are refused, not silently passed on."""
    indexer, attention = getattr(operator, INDEXER), getattr(operator, ATTENTION)
    choose = registry.load("lightning_indexer", implementation)
    attend = registry.load("sparse_flash_attention", implementation)

    def select(*arguments: Any, **keywords: Any) -> torch.Tensor:
        call = named(indexer, arguments, keywords)
        refuse_int8(call)
        found: torch.Tensor = choose(*indexer_arguments(call))
        return found[:, None]

    def sparse_attention(*arguments: Any, **keywords: Any) -> torch.Tensor:
        call = named(attention, arguments, keywords)
        refuse_int8(call)
        if call.get("return_lse"):
            raise ConfigError("GLM5_KERNELS: decode context parallelism runs on the official kernels alone", "unset it")
        out: torch.Tensor = attend(*attention_arguments(call), True)[0]
        return out

    setattr(operator, INDEXER, staticmethod(select))
    setattr(operator, ATTENTION, staticmethod(sparse_attention))


def refuse_int8(call: dict[str, Any]) -> None:
    if quantized(call):
        raise ConfigError("GLM5_KERNELS: int8 caches (C8) run on the official kernels alone", "unset it, or C8 off")
