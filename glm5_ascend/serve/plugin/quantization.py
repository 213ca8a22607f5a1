"""vLLM's quantization method `ascend`: choose the arithmetic of each layer from quant_model_description.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC, W8A8, W8A8_DYNAMIC
from glm5_ascend.serve.plugin.description import QuantDescription, load_description
from glm5_ascend.serve.plugin.experts import FloatExperts, Int4Experts, Int8Experts
from glm5_ascend.serve.plugin.linear import W8A8DynamicLinear, W8A8StaticLinear

METHOD = "ascend"


class AscendConfig(QuantizationConfig):  # type: ignore[misc]
    """The configuration that vllm-ascend reads: quant_model_description.json, nothing of config.json."""

    def __init__(self) -> None:
        super().__init__()
        self.description: QuantDescription | None = None

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # maybe_update_config reads the file: it knows the model's directory

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AscendConfig:
        return cls()

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        if self.description is None:
            self.description = load_description(Path(model_name))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Quantization method of a linear layer or of routed experts; None (unquantized) for everything else."""
        if self.description is None:
            return None
        if isinstance(layer, LinearBase):
            return self._linear_method(self.description.type_of(prefix), prefix)
        if isinstance(layer, RoutedExperts):
            methods = {W4A8_DYNAMIC: Int4Experts, W8A8_DYNAMIC: Int8Experts, FLOAT: FloatExperts}
            return methods[self.description.type_of(prefix)](layer.moe_config)
        return None

    def _linear_method(self, tensor_type: str, prefix: str) -> Any:
        methods = {W8A8_DYNAMIC: W8A8DynamicLinear, W8A8: W8A8StaticLinear}
        return methods[tensor_type](prefix) if tensor_type != FLOAT else UnquantizedLinearMethod()


class FloatConfig(AscendConfig):
    """A model without a description, whose experts have a limit that vLLM's own on a CPU leave out."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            return FloatExperts(layer.moe_config)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def register() -> None:
    """Register `--quantization ascend` with vLLM. Registering again replaces the class by itself."""
    register_quantization_config(METHOD)(AscendConfig)
