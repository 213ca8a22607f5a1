"""Configure command lines by vllm-ascend's code, with the engine of `rehearse`.

    python -m vllm_ascend_on_cpu.profiles COMMANDS OUT

COMMANDS: JSON {name: {"env": {...}, "argv": ["vllm", "serve", MODEL, ...]}}. OUT gets the configuration or the error of
each, the names of all environment variables that the two packages define, and the words of vllm-ascend's sources that
read additional_config.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from glm5_rehearsal import machine  # isort: skip  # before vLLM

machine.prepare()

import vllm.envs  # noqa: E402
import vllm_ascend.envs  # noqa: E402
from glm5_rehearsal import engine  # noqa: E402


def configured(argv: list[str]) -> dict[str, Any]:
    """The engine's configuration, with the platform's checks."""
    config = engine.engine_config(argv)
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.utils import enable_sp

    ascend, parallel = get_ascend_config(), config.parallel_config
    return {
        "quantization": config.model_config.quantization, "block_size": config.cache_config.block_size,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "tensor_parallel": parallel.tensor_parallel_size, "data_parallel": parallel.data_parallel_size,
        "expert_parallel": parallel.enable_expert_parallel,
        "graph": config.compilation_config.cudagraph_mode.name,
        "draft_tokens": config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
        "flashcomm": enable_sp(config), "mlapo": bool(ascend.enable_mlapo),
        "connector": config.kv_transfer_config.kv_connector if config.kv_transfer_config else None,
    }  # fmt: skip


def in_child(env: dict[str, str], argv: list[str]) -> dict[str, Any]:
    """Configure in a new process, because both packages cache the first configuration."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.environ.update(env)
        try:
            answer: dict[str, Any] = {"became": configured(argv)}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
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


if __name__ == "__main__":
    commands, out = map(Path, sys.argv[1:])
    engine.parser()
    answers = {name: in_child(**command) for name, command in json.loads(commands.read_text()).items()}
    variables = sorted({*vllm.envs.environment_variables, *vllm_ascend.envs.env_variables})
    out.write_text(json.dumps({"commands": answers, "variables": variables, "words": words_of_sources()}, indent=1))
