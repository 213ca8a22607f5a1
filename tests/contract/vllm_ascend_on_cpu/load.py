"""Load a checkpoint as `vllm serve --quantization ascend` does, and write what the parameters hold afterwards.

    python -m vllm_ascend_on_cpu.load CHECKPOINT OUT

OUT gets report.json and, for the target model and its MTP draft, a .safetensors file with every parameter after
`process_weights_after_loading`, in the layouts of vllm-ascend. One rank; the order of calls is that of NPUWorker.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_ascend_on_cpu import shim  # isort: skip  # before vLLM

from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader

#: Some buffers have a row per token.
TOKENS = 256
#: File store of the only rank.
STORE = tempfile.TemporaryDirectory()


def engine_config(checkpoint: Path) -> VllmConfig:
    """The engine's configuration; loads vllm-ascend's plugins and platform patches."""
    arguments = EngineArgs(
        model=str(checkpoint),
        quantization="ascend",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=TOKENS,
        max_num_batched_tokens=TOKENS,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    return arguments.create_engine_config()


def start_worker(config: VllmConfig) -> None:
    """Initialize as NPUWorker does before it loads a model, with gloo instead of HCCL, in `set_current_vllm_config`."""
    from vllm_ascend.ascend_config import init_ascend_config
    from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel
    from vllm_ascend.utils import adapt_patch, register_ascend_customop

    adapt_patch()
    register_ascend_customop(config)
    init_ascend_config(config)
    shim.without_hccl()
    init_distributed_environment(1, 0, f"file://{STORE.name}/rank", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    init_ascend_model_parallel(config.parallel_config)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    config = engine_config(arguments.checkpoint)
    models = {"target": config.model_config, "draft": config.speculative_config.draft_model_config}
    reports: dict[str, Any] = {}
    arguments.out.mkdir(parents=True)
    with set_current_vllm_config(config):
        start_worker(config)
        for name, model_config in models.items():
            model = load(config, model_config)
            reports[name] = report(model) | {"quant_config": type(config.quant_config).__name__}
            save_file(contents(model), arguments.out / f"{name}.safetensors")
    (arguments.out / "report.json").write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
