"""The engine's configuration from a command line, and the process groups of one rank, in NPUWorker's order."""

from __future__ import annotations

import contextlib
import io
from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from .flags import cli_args
from .machine import without_other_ranks


@cache
def parser() -> Any:
    """The parser of `vllm serve`, which takes seconds to make."""
    return cli_args().make_arg_parser(FlexibleArgumentParser())


def engine_config(argv: list[str]) -> VllmConfig:
    """Parse as `vllm serve` does and build the engine's configuration, which runs the platform's checks.

    The front end's parsers of tools and thinking are left out: they need a tokenizer.
    """
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            parsed = parser().parse_args(argv[2:])
    except SystemExit:
        raise ValueError(stderr.getvalue().strip().splitlines()[-1]) from None
    parsed.model = parsed.model_tag
    cli_args().validate_parsed_serve_args(parsed)
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    arguments.skip_tokenizer_init = True
    arguments.reasoning_parser = ""
    return arguments.create_engine_config()


def set_rank(config: VllmConfig, job: dict[str, Any]) -> None:
    """Set the job's rank in `config`, as the engine's processes do."""
    parallel = config.parallel_config
    parallel.data_parallel_rank = parallel.data_parallel_index = job["dp_rank"]
    parallel.rank = job["rank_in_dp"]


def start_worker(config: VllmConfig, rank: int = 0, world: int = 1) -> None:
    """Initialize as NPUWorker does before it loads a model, with torch's fake process groups instead of HCCL's."""
    from vllm_ascend import utils
    from vllm_ascend.ascend_config import get_ascend_config, init_ascend_config
    from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel
    from vllm_ascend.utils import adapt_patch, register_ascend_customop

    adapt_patch()
    register_ascend_customop(config)
    init_ascend_config(config)
    without_other_ranks(rank, world)
    parallel = config.parallel_config
    init_distributed_environment(parallel.world_size, parallel.rank, "env://", 0, "fake")
    ensure_model_parallel_initialized(
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size,
    )  # fmt: skip
    init_ascend_model_parallel(parallel)
    if hasattr(utils, "set_weight_prefetch_method"):  # as NPUModelRunner does; newer lines have none
        utils.set_weight_prefetch_method(get_ascend_config().weight_prefetch_config)
    torch.set_default_dtype(torch.bfloat16)
    start_runner(config)


def start_runner(config: VllmConfig) -> None:
    """Set the global state that NPUModelRunner's constructor sets for layers and forward passes, in its order."""
    from vllm_ascend import utils
    from vllm_ascend.ascend_forward_context import set_mc2_mask, set_mc2_tokens_capacity
    from vllm_ascend.ops.rotary_embedding import set_cos_and_sin

    drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    requests = config.scheduler_config.max_num_seqs
    set_cos_and_sin(config, requests, drafts + 1, torch.bfloat16, "cpu")
    set_mc2_tokens_capacity(config, requests, drafts + 1)
    set_mc2_mask(config, "cpu")
    if hasattr(utils, "set_potential_max_tokens"):  # read while a decode role of PD is built
        utils.set_potential_max_tokens(config)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    import vllm

    return {"vllm": vllm.__version__, "vllm-ascend": version("vllm-ascend"), "torch": torch.__version__}


def models_of(config: VllmConfig) -> dict[str, Any]:
    """Configurations of the models of this rank: the target, and on the last pipeline stage the draft."""
    from vllm.distributed import get_pp_group

    configs = {"target": config.model_config}
    if config.speculative_config is not None and get_pp_group().is_last_rank:
        configs["draft"] = config.speculative_config.draft_model_config
    return configs
