"""Checks before `serve` starts a server: broken checkpoints and known bad combinations are refused."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.deploy.diagnosis.preflight import preflight
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rules.load import ERROR
from glm5_ascend.engine_lines import SGLANG
from glm5_ascend.errors import CheckFailedError, ConfigError, MissingEnvironmentError
from glm5_ascend.serve.activation import on_ascend
from glm5_ascend.serve.environment import require_cpu_environment
from glm5_ascend.serve.launch import refuse_flags


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
    (result,) = preflight(profile, checkpoint, role.name, list(vllm_args))
    for broken in result.broken:
        print(f"{broken.level} {broken.id}: {broken.message} ({broken.source})\n  fix: {broken.fix}", file=sys.stderr)
    errors = [broken.id for broken in result.broken if broken.level == ERROR]
    if errors and not only_warn:
        raise CheckFailedError(
            f"profile {profile.name}: known bad combination ({', '.join(errors)})",
            "see the lines above, or --skip-verify to serve it anyway",
        )


def refuse_other_weights(profile: Profile, checkpoint: CheckpointSummary) -> None:
    """Raises `ConfigError` if the profile is for other weight types."""
    for part, has in (("experts", checkpoint.experts), ("attention", checkpoint.attention)):
        expected = profile.weights[part]
        if expected not in ("any", has):
            raise ConfigError(
                f"profile {profile.name} is for {part} in {expected}, {checkpoint.directory} has {has}",
                f"quantize with --recipe {profile.weights['recipe']}, or choose another profile",
            )


def refuse_other_platform(profile: Profile, vllm_args: Sequence[str]) -> None:
    """Raises `MissingEnvironmentError` or `ConfigError` if this machine cannot run the profile."""
    if profile.platform == "cpu":
        if on_ascend():
            raise MissingEnvironmentError("profile cpu: vllm-ascend is installed here", "choose a profile for Atlas")
        require_cpu_environment()
        refuse_flags(vllm_args)
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
