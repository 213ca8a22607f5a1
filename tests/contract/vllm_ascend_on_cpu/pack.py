"""Let vllm-ascend itself pack INT4 experts from plain integers, as it does for LLM-Compressor's checkpoints.

    python -m vllm_ascend_on_cpu.pack CHECKPOINT INTEGERS OUT

INTEGERS and OUT are .safetensors files. In: w13_weight [E, 2I, H] and w2_weight [E, H, I] as int8, with fp32 scales
[E, N, 1]. Out: the same experts as the NPU's kernel gets them, with the scale_bias that vllm-ascend derives. Both of
its loaders must end at the same bits, so this says what the nibbles and scale_bias of our files mean. CHECKPOINT, any
that loads, is there for the engine's configuration.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file

from vllm_ascend_on_cpu.load import worker  # isort: skip  # before vLLM

from vllm.config import VllmConfig


def pack(config: VllmConfig, experts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from vllm_ascend.quantization.methods.w4a8 import AscendW4A8DynamicFusedMoEMethod
    from vllm_ascend.utils import COMPRESSED_TENSORS_METHOD

    layer = torch.nn.Module()
    for name, tensor in experts.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    settings = {"ascend_quant_method": COMPRESSED_TENSORS_METHOD, "weight_strategy": "channel"}
    config.quant_config.quant_description.update(settings)
    method = AscendW4A8DynamicFusedMoEMethod()
    method.quant_method = COMPRESSED_TENSORS_METHOD  # 0.30 looks here, at the name of the configuration in use
    method.process_weights_after_loading(layer)
    return {name: parameter.detach().contiguous() for name, parameter in layer.named_parameters()}


if __name__ == "__main__":
    checkpoint, integers, out = sys.argv[1:]
    with worker(checkpoint) as config:
        save_file(pack(config, load_file(integers)), out)
