"""Parse command lines by vLLM's parser and configure them by vllm-ascend's code.

    python -m vllm_ascend_on_cpu.profiles COMMANDS OUT

COMMANDS: JSON {name: {"env": {...}, "argv": ["vllm", "serve", MODEL, ...]}}. OUT gets the
configuration or the error of each, the names of all environment variables that the two packages define, and the words
of vllm-ascend's sources that read additional_config.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from vllm_ascend_on_cpu import shim  # isort: skip  # noqa: F401  # before vLLM

import vllm.envs
import vllm_ascend
import vllm_ascend.envs
from glm5_parser.moved import module_of
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

CLI_ARGS = module_of("make_arg_parser")
#: Built once: it takes seconds.
PARSER = CLI_ARGS.make_arg_parser(FlexibleArgumentParser())


def configured(argv: list[str]) -> dict[str, Any]:
    """Parse as `vllm serve` does, then build the engine's configuration, which runs the platform's checks."""
    parsed = PARSER.parse_args(argv[2:])
    parsed.model = parsed.model_tag
    CLI_ARGS.validate_parsed_serve_args(parsed)
    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.utils import enable_sp

    ascend = get_ascend_config()
    return {
        "model": parsed.model,
        "quantization": config.model_config.quantization,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "data_parallel": config.parallel_config.data_parallel_size,
        "expert_parallel": config.parallel_config.enable_expert_parallel,
        "graph": config.compilation_config.cudagraph_mode.name,
        "draft_tokens": config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
        "flashcomm": enable_sp(config),
        "mlapo": bool(ascend.enable_mlapo),
        "li_c8": bool(ascend.enable_sparse_li_c8),
        "block_size": config.cache_config.block_size,
        "connector": config.kv_transfer_config.kv_connector if config.kv_transfer_config else None,
    }


def in_child(env: dict[str, str], argv: list[str]) -> dict[str, Any]:
    """Configure in a new process, because both packages cache the first configuration."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.environ.update(env)
        try:
            answer: dict[str, Any] = {"became": configured(argv)}
        except BaseException as error:  # the parser exits
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    answer = json.loads(text or '{"error": "the process died"}')
    return answer


def words_of_sources() -> list[str]:
    """Names and texts of one word in vllm-ascend's files that read additional_config."""
    words: set[str] = set()
    for path in Path(vllm_ascend.__file__).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "additional_config" in source or path.name == "ascend_config.py":
            words.update(re.findall(r"[a-z][a-z0-9_]+", source))
    return sorted(words)


def main() -> None:
    commands, out = map(Path, sys.argv[1:])
    answers = {name: in_child(**command) for name, command in json.loads(commands.read_text()).items()}
    variables = sorted({*vllm.envs.environment_variables, *vllm_ascend.envs.env_variables})
    out.write_text(json.dumps({"commands": answers, "variables": variables, "words": words_of_sources()}, indent=1))


if __name__ == "__main__":
    main()
