"""Exercises the plugin's entry points in one fresh process and prints what it saw.  python plugin_probe.py MODEL_DIR"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any

import glm5_ascend.serve.plugin as plugin


def before_vllm() -> dict[str, Any]:
    seen: dict[str, Any] = {"heavy_after_import": sorted({"torch", "vllm", "transformers"} & set(sys.modules))}
    os.environ["GLM5_CPU_PLATFORM"] = "0"
    seen["opted_out"] = plugin.register_platform()
    del os.environ["GLM5_CPU_PLATFORM"]
    seen["platform"] = plugin.register_platform()

    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: object() if name == "vllm_ascend" else find_spec(name, *rest)
    seen["with_vllm_ascend"] = plugin.register_platform()
    importlib.util.find_spec = find_spec
    return seen


def registered() -> dict[str, Any]:
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    for _ in range(3):
        plugin.register()
    models = ("GlmMoeDsaForCausalLM", "DeepseekV32MTPModel")
    return {
        "resolved": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "is_cpu": current_platform.is_cpu(),
        "wrapper": op_registry_oot["MultiHeadLatentAttentionWrapper"].__module__,
        "quantization": get_quantization_config("ascend").__module__,
        "models": {name: ModelRegistry.models[name].module_name for name in models},
    }


def config_error(model: str, **engine: Any) -> str:
    """The message of the error that making an engine config raises."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(model=model, max_model_len=512, **engine).create_engine_config()
    except Exception as error:
        return str(error)
    return ""


def refused(model: str) -> dict[str, Any]:
    return {
        "rope_on": config_error(model, compilation_config={"custom_ops": ["+rotary_embedding"]}),
        "two_ranks": config_error(model, tensor_parallel_size=2),
        "fp8_cache": config_error(model, kv_cache_dtype="fp8"),
        "no_description": config_error(model, quantization="ascend"),
        "no_boolean": config_error(model, additional_config={"enable_sparse_li_c8": "yes"}),
    }


def executors(model: str) -> dict[str, Any]:
    """Executor of the worker with and without bound threads, and with the user's choice."""
    from vllm.engine.arg_utils import EngineArgs

    def executor(bound: str, **engine: Any) -> Any:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bound
        config = EngineArgs(model=model, max_model_len=512, **engine).create_engine_config()
        return config.parallel_config.distributed_executor_backend

    return {
        "not_bound": executor("nobind"),
        "bound": executor("auto"),
        "asked": executor("nobind", distributed_executor_backend="mp"),
    }


if __name__ == "__main__":
    print(
        "PROBE "
        + json.dumps({**before_vllm(), **registered(), **refused(sys.argv[1]), "executors": executors(sys.argv[1])})
    )
