"""Load a checkpoint as `vllm serve --quantization ascend` does, and write what the parameters hold afterwards.

    python -m vllm_ascend_on_cpu.load CHECKPOINT OUT

OUT gets report.json and, for the target model and its MTP draft, a .safetensors file with every parameter after
`process_weights_after_loading`, in the layouts of vllm-ascend. One rank, built by the engine of `rehearse`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glm5_rehearsal import machine  # isort: skip  # before vLLM

machine.prepare()

import torch  # noqa: E402
from glm5_rehearsal import engine  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402

#: Some buffers have a row per token.
TOKENS = "256"
FLAGS = [
    "--quantization", "ascend", "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", TOKENS,
    "--max-num-batched-tokens", TOKENS, "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}',
]  # fmt: skip


@contextmanager
def worker(checkpoint: str) -> Iterator[VllmConfig]:
    """The engine's configuration, in the only rank of a worker that has started."""
    config = engine.engine_config(["vllm", "serve", checkpoint, *FLAGS])
    with set_current_vllm_config(config):
        engine.start_worker(config)
        yield config


def load(config: VllmConfig, model_config: ModelConfig) -> torch.nn.Module:
    """The loaded and processed model. What the loader does not write keeps a value that no file holds."""
    loader = get_model_loader(config.load_config)
    original = loader.load_weights

    def load_weights(model: torch.nn.Module, model_config: ModelConfig) -> None:
        for name, parameter in model.named_parameters():
            zero = name.endswith(("norm.bias", "norm1.bias", "norm2.bias")) and not name.endswith("indexer.k_norm.bias")
            if not zero:  # those are in no file
                parameter.data.fill_(float("nan") if parameter.dtype.is_floating_point else -99)
        original(model, model_config)

    loader.load_weights = load_weights
    return loader.load_model(vllm_config=config, model_config=model_config)


def contents(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tensors that the schemes made from them, and weights of the attention, by name."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, module in model.named_modules():
        owners = {name: module} if hasattr(module, "quant_method") else {}
        if is_attention(module):
            owners[f"{name}.impl"] = module.impl
        for owner, value in owners.items():
            tensors |= {f"{owner}.{key}": item for key, item in vars(value).items() if isinstance(item, torch.Tensor)}
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def is_attention(module: torch.nn.Module) -> bool:
    """True for a layer with a cache; since 0.30 the indexer's wrapper has an `impl`, too."""
    return hasattr(module, "impl") and hasattr(module, "kv_cache")


def preprocess_of(implementation: Any) -> str:
    """Preprocessing of an attention's input: native, mlapo or prolog_v3."""
    if hasattr(implementation, "preprocess_type"):  # 0.30
        return str(implementation.preprocess_type.name).lower()
    switches = {"mlapo": "enable_mlapo", "prolog_v3": "enable_sfa_prolog_v3"}
    return next((name for name, switch in switches.items() if getattr(implementation, switch)), "native")


def report(model: torch.nn.Module) -> dict[str, Any]:
    """The scheme of each linear and stack of experts, and how each attention prepares its input."""
    schemes, preprocess = {}, {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            schemes[name] = type(getattr(method, "quant_method", method)).__name__
        if is_attention(module):
            preprocess[name] = preprocess_of(module.impl)
    return {"model": type(model).__name__, "schemes": schemes, "preprocess": preprocess}


if __name__ == "__main__":
    checkpoint, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True)
    reports: dict[str, Any] = {}
    with worker(checkpoint) as config:
        for name, model_config in engine.models_of(config).items():
            model = load(config, model_config)
            reports[name] = report(model) | {"quant_config": type(config.quant_config).__name__}
            save_file(contents(model), out / f"{name}.safetensors")
    (out / "report.json").write_text(json.dumps(reports, indent=1))
