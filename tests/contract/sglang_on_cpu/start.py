"""What comes before a model is loaded: SGLang's arguments, its parallel groups on gloo, its model configuration.

Imported by every script, before anything of SGLang. The order of calls is that of its scheduler process.
"""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace
from typing import Any

from sglang_on_cpu import npu_modules  # isort: skip  # before SGLang

npu_modules.install()

import sglang.srt.distributed.bootstrap as bootstrap  # noqa: E402
import sglang.srt.distributed.parallel_state as parallel_state  # noqa: E402
import sglang.srt.hardware_backend.npu.utils as npu_utils  # noqa: E402
import sglang.srt.models.glm4_moe  # noqa: E402, F401  # here, so that forks need not
import torch  # noqa: E402
from sglang.srt.arg_groups.model_override_base import resolving_view  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.model_loader.loader import DefaultModelLoader  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402, F401  # reads all model classes
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

torch.set_num_threads(1)
logging.disable(logging.INFO)
#: As a launch line with MTP has it.
MTP = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_draft_model_quantization": "unquant",
}
DEVICE = SimpleNamespace(device="cpu", gpu_id=0)


def free_port() -> int:
    with socket.socket() as spec:
        spec.bind(("127.0.0.1", 0))
        return int(spec.getsockname()[1])


def on_gloo() -> None:
    """Parallel groups of this process do without an NPU."""
    npu_utils.init_npu_backend = lambda: None
    bootstrap.get_default_distributed_backend = lambda _: "gloo"
    bootstrap.register_sgl_tp_rank = lambda _: None
    bootstrap._bind_threads_if_cpu = lambda **_: None
    parallel_state.get_torch_distributed_pg_options = lambda *_, **__: None
    torch.distributed.barrier = lambda *_, **__: None  # asks the accelerator's hooks


def engine(checkpoint: str, rank: int = 0, port: int | None = None, **arguments: Any) -> ServerArgs:
    """Arguments resolved as on an Atlas, and this process as one rank of a group."""
    args = ServerArgs(
        model_path=checkpoint, device="npu", dtype="bfloat16", trust_remote_code=False, skip_tokenizer_init=True,
        disable_cuda_graph=True, mem_fraction_static=0.5, **arguments,
    )  # fmt: skip
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    on_gloo()
    bootstrap.init_parallel_runtime(server_args=args, device="npu", dist_port=port or free_port())
    return args


def model_config(args: ServerArgs, draft: bool = False) -> ModelConfig:
    if draft:
        path = resolving_view(args).speculative_draft_model_path
        return ModelConfig.from_server_args(args, model_path=path, is_draft_model=True)
    config = ModelConfig.from_server_args(args)
    bootstrap.init_layer_runtime(model_config=config)
    return config


def loader() -> DefaultModelLoader:
    return DefaultModelLoader(LoadConfig())
