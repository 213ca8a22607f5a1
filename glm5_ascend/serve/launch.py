"""`glm5-ascend serve`: check the directory and the environment, then become vLLM's OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.errors import CheckpointError, ConfigError
from glm5_ascend.serve.activation import on_ascend
from glm5_ascend.serve.environment import require_cpu_environment
from glm5_ascend.serve.flags import given_flags as given_flags
from glm5_ascend.serve.flags import value_of as value_of
from glm5_ascend.serve.plugin.description import load_description
from glm5_ascend.serve.schedule import topk_pattern

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
LONGEST_DEFAULT_CONTEXT = 8192

#: Set only where the user has not. OMP_NUM_THREADS=1: more threads than free cores make it many times slower.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
#: Where any white space is allowed between the parts of an answer in JSON, a small model can write it to the end.
COMPACT_JSON = {"backend": "xgrammar", "disable_any_whitespace": True}
#: config.json keys that vLLM reads with another default than GLM-5's: without them it computes something else.
REQUIRED_KEYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "indexer_rope_interleave": True}


def serve(
    directory: Path,
    vllm_args: list[str],
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    dry_run: bool = False,
) -> int:
    """Replace this process by the server; returns only for a dry run (0). `vllm_args` win over everything of ours."""
    env, argv = build_command(directory, vllm_args, host=host, port=port)
    if dry_run:
        print(shown(env, argv))
        return 0
    if not on_ascend():
        require_cpu_environment()
        refuse_flags(vllm_args)
    require_free_port(value_of(argv, "--host"), int(value_of(argv, "--port")))
    print(shown(env, argv), flush=True)
    os.execvpe(argv[0], argv, {**os.environ, **env})


def build_command(
    directory: Path, extra: list[str], *, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT
) -> tuple[dict[str, str], list[str]]:
    """The variables to add to the environment, and the command line.

    A flag in `extra` replaces our default for it, in any of vLLM's spellings (`--max_model_len`, `--flag=value`).
    Raises `ConfigError` or `CheckpointError` when the directory cannot be served.
    """
    config = check_directory(directory)
    defaults: list[tuple[str, str | None]] = [
        ("--model", str(directory)),
        ("--served-model-name", "glm-5"),
        ("--host", host),
        ("--port", str(port)),
        ("--max-model-len", str(min(config.get("max_position_embeddings", 4096), LONGEST_DEFAULT_CONTEXT))),
        ("--reasoning-parser", "glm45"),
        ("--tool-call-parser", "glm47"),
        ("--enable-auto-tool-choice", None),
        ("--chat-template-content-format", "string"),
    ]
    if (directory / DESCRIPTION_NAME).exists():
        defaults.append(("--quantization", "ascend"))
    if not on_ascend():
        defaults.append(("--structured-outputs-config", json.dumps(COMPACT_JSON)))
    given = given_flags(extra)
    argv = [sys.executable, "-m", SERVER_MODULE]
    for flag, value in defaults:
        if flag not in given:
            argv += [flag] if value is None else [flag, value]
    wanted = ENVIRONMENT if on_ascend() else {**ENVIRONMENT, **CPU_ENVIRONMENT}
    env = {name: value for name, value in wanted.items() if name not in os.environ}
    return env, argv + extra


def refuse_flags(extra: list[str]) -> None:
    """What the platform would refuse later, with a traceback."""
    if any("+rotary_embedding" in arg for arg in extra):
        raise ConfigError(
            "+rotary_embedding: vLLM's CPU rope kernel rotates GLM-5's queries wrongly", "drop it from the vLLM flags"
        )
    if value_of(extra, "--tensor-parallel-size") not in ("", "1"):
        raise ConfigError("--tensor-parallel-size: GLM-5 on a CPU runs with 1", "drop the flag")


def require_free_port(host: str, port: int) -> None:
    """vLLM notices a taken port only after it has loaded the model."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", "choose another one with --port"
        ) from None


def check_directory(directory: Path) -> dict[str, Any]:
    """config.json of a directory that vLLM can serve; raises with one line otherwise."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "give the directory of a GLM-5 checkpoint") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "restore it from the source checkpoint") from None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type != "glm_moe_dsa":
        raise ConfigError(
            f"{path}: model_type is {model_type!r}, not 'glm_moe_dsa'", "give a GLM-5 (5.1, 5.2) checkpoint"
        )
    if "GlmMoeDsaForCausalLM" not in (config.get("architectures") or ()):
        raise ConfigError(
            f"{path}: architectures is {config.get('architectures')!r}; vLLM would serve embeddings, not text",
            'restore config.json from the source checkpoint, or add {"architectures": ["GlmMoeDsaForCausalLM"]}',
        )
    for key, value in REQUIRED_KEYS.items():
        if config.get(key) != value:
            raise ConfigError(
                f"{path}: {key} is {config.get(key)!r}; vLLM would not compute GLM-5 without {value!r}",
                f"restore config.json from the source checkpoint, or add {json.dumps({key: value})}",
            )
    topk_pattern(config)
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} has no .safetensors file", "the weights are missing: copy them")
    if (directory / DESCRIPTION_NAME).exists():
        if "quantization_config" in config:
            raise ConfigError(
                f"{path} has quantization_config, so vLLM would never read {DESCRIPTION_NAME}",
                "remove quantization_config from config.json",
            )
        load_description(directory).check()
    result: dict[str, Any] = config
    return result


def shown(env: dict[str, str], argv: list[str]) -> str:
    """The command as a line a shell would take."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()), shlex.join(argv)])
