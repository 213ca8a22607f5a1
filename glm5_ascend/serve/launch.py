"""`glm5-ascend serve`: checks the directory and the environment, and starts vLLM's OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.engine_lines import EngineLine
from glm5_ascend.errors import ConfigError, shortened
from glm5_ascend.model.config_file import load_config
from glm5_ascend.serve import cores
from glm5_ascend.serve.activation import on_ascend
from glm5_ascend.serve.environment import require_cpu_environment
from glm5_ascend.serve.flags import KEY_VARIABLE, ServerCommand, given_flags, normal_form, value_of
from glm5_ascend.serve.installed import installed_table, line_here, table_note
from glm5_ascend.serve.memory import check_memory, default_limits
from glm5_ascend.serve.servable import check_directory
from glm5_ascend.serve.tensor_parallel import ranks_of, refuse_ranks

#: Module that runs `vllm serve`.
SERVER_MODULE = "glm5_ascend.serve.vllm_command"
CHAT_PAGE = "glm5_ascend.serve.middleware.ChatPage"
KEY_GUARD = "glm5_ascend.serve.middleware.RequireApiKey"
#: Flags of every server of vLLM: middleware that a user's `--middleware` adds to.
GUARDS = ("--middleware", KEY_GUARD, "--middleware", "glm5_ascend.serve.middleware.ThinkingSwitch")

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LONGEST_DEFAULT_CONTEXT = 8192

#: Defaults of environment variables.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
#: JSON answers without white space: a small model can fill an answer with it.
COMPACT_JSON = {"backend": "xgrammar", "disable_any_whitespace": True}


def serve(
    directory: str | Path,
    vllm_args: Sequence[str] = (),
    *,
    host: str | None = None,
    port: int | None = None,
    open_server: bool = False,
    dry_run: bool = False,
) -> ServerCommand:
    """Replace this process by vLLM's OpenAI-compatible server. Returns only for a dry run: the command.

    `glm5-ascend serve` without a profile (with a profile: `deploy.serve_profile`). The command first runs the quick
    check of `verify` on a quantized checkpoint; here call `verify(directory, deep=False)` for it.

    Args:
        directory: a checkpoint, quantized or not.
        vllm_args: flags of vLLM; they override our defaults.
        host: address to listen on, default 127.0.0.1. port: default 8000.
        open_server: answer anyone: without an API key on an address that others reach.

    Raises:
        ConfigError: config.json that vLLM would misread, a flag that fails later, a port that is taken, a server that
            would answer anyone.
        CheckpointError: no weights, or a description that cannot be read.
        MissingEnvironmentError: a problem of this machine.
    """
    checkpoint = check_directory(Path(directory))
    return launch(checkpoint, vllm_args, host=host, port=port, open_server=open_server, dry_run=dry_run)


def become(command: ServerCommand) -> NoReturn:
    """Replace this process by the server."""
    print(command.shown, flush=True)
    os.execvpe(command.argv[0], command.argv, {**os.environ, **command.env})


def launch(
    checkpoint: CheckpointSummary,
    vllm_args: Sequence[str],
    *,
    host: str | None,
    port: int | None,
    open_server: bool = False,
    dry_run: bool,
    start: Callable[[ServerCommand], object] = become,
) -> ServerCommand:
    """`serve` for a checkpoint that `check_directory` has read; calls `start` with the command."""
    if not on_ascend():
        load_config(checkpoint.directory).require("vLLM on a CPU")
    line = line_here()
    vllm_args = normal_form(vllm_args, installed_table(line))
    say_who_checks(line, vllm_args)
    if not on_ascend():
        refuse_ranks(checkpoint.config, vllm_args)
    command = build_command(checkpoint, vllm_args, host=host or DEFAULT_HOST, port=port or DEFAULT_PORT)
    port_of(command.argv)
    refuse_open_server(command, open_server, only_warn=dry_run)
    if dry_run:
        return command
    if not on_ascend():
        require_cpu_environment()
        cores.refuse_ranks_without_core(ranks_of(vllm_args))
        check_memory(checkpoint, command)
    require_free_port(value_of(command.argv, "--host"), port_of(command.argv))
    start(command)
    return command


def say_who_checks(line: EngineLine, flags: Sequence[str]) -> None:
    """Print the sentence of `table_note` to stderr if the user gave flags."""
    if flags and (sentence := table_note(line)):
        print(f"note: {sentence}", file=sys.stderr)


def refuse_open_server(command: ServerCommand, open_server: bool, *, only_warn: bool) -> None:
    """Raise `ConfigError` for a server without an API key on an address that others reach, unless it is asked for.

    Args:
        only_warn: print the line to stderr instead, for a dry run.
    """
    host = value_of(command.argv, "--host") or "0.0.0.0"
    has_key = os.environ.get(KEY_VARIABLE) or command.env.get(KEY_VARIABLE) or value_of(command.argv, "--api-key")
    if open_server or has_key or host in LOOPBACK or "--headless" in command.argv:
        return
    problem, fix = f"the server on {host} would answer anyone", f"set {KEY_VARIABLE}, give --open, or --host 127.0.0.1"
    if not only_warn:
        raise ConfigError(problem, fix)
    print(f"a start refuses this: {problem}\n  fix: {fix}", file=sys.stderr)


def build_command(
    checkpoint: CheckpointSummary, extra: Sequence[str], *, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT
) -> ServerCommand:
    """Environment variables and command line of a server.

    A flag in `extra` replaces our default for it, in any of vLLM's spellings (`--max_model_len`, `--flag=value`).
    """
    directory, config = checkpoint.directory, checkpoint.config
    defaults: list[tuple[str, str | None]] = [
        ("--served-model-name", "glm-5"),
        ("--host", host),
        ("--port", str(port)),
        ("--reasoning-parser", "glm45"),
        ("--tool-call-parser", "glm47"),
        ("--enable-auto-tool-choice", None),
        ("--chat-template-content-format", "string"),
        ("--middleware", CHAT_PAGE),
    ]
    if (directory / DESCRIPTION_NAME).exists():
        defaults.append(("--quantization", "ascend"))
    if on_ascend():
        longest = min(config.get("max_position_embeddings", 4096), LONGEST_DEFAULT_CONTEXT)
        defaults.append(("--max-model-len", str(longest)))
    else:
        defaults.append(("--structured-outputs-config", json.dumps(COMPACT_JSON)))
        defaults += default_limits(checkpoint, extra).items()
    user_flags = given_flags(extra)
    argv = [sys.executable, "-m", SERVER_MODULE, "serve", str(directory)]
    for flag, value in defaults:
        if flag not in user_flags:
            argv += [flag] if value is None else [flag, value]
    variables = ENVIRONMENT if on_ascend() else {**ENVIRONMENT, **cores.variables(ranks_of(extra))}
    env = {name: value for name, value in variables.items() if name not in os.environ}
    return ServerCommand(env, [*argv, *GUARDS, *extra]).without_key()


def port_of(argv: Sequence[str]) -> int:
    """Port of a command line. Raises `ConfigError` for an invalid one."""
    text = value_of(argv, "--port")
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:6]) < 65536 or len(text) > 5:
        raise ConfigError(f"--port {shortened(text)}: not a port", "give a number from 1 to 65535")
    return int(text)


def require_free_port(host: str, port: int) -> None:
    """Raise `ConfigError` for a port in use, which vLLM notices only after it has loaded the model."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except (OSError, ValueError) as error:  # ValueError: an invalid host name
        raise ConfigError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
            "choose another one with --port",
        ) from None
