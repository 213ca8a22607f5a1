"""The function `rehearse`, which the command calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from glm5_ascend.deploy.options import RehearseOptions
from glm5_ascend.deploy.planning.ranks import planned_ranks
from glm5_ascend.deploy.profiles.load import Profile, Role, load
from glm5_ascend.deploy.rehearsal.against import differences, read_other
from glm5_ascend.deploy.rehearsal.environment import find_environment
from glm5_ascend.deploy.rehearsal.result import PlannedRank, Rehearsal
from glm5_ascend.deploy.rehearsal.run import RehearsedRole, rehearse_role, require_vllm_ascend
from glm5_ascend.engine_lines import EngineLine
from glm5_ascend.errors import CheckpointError, ConfigError
from glm5_ascend.model.config_file import check_architecture, read_config

Say = Callable[[str], None]


def rehearse(options: RehearseOptions, say: Say) -> Rehearsal:
    """Build, load, weigh and run the ranks of a profile with vllm-ascend's own code.

    Args:
        say: prints a line of progress.
    Raises:
        ConfigError: no checkpoint, an unknown profile or role. MissingEnvironmentError: GLM5_REHEARSAL names none.
    """
    if options.checkpoint is None or options.profile is None:
        raise ConfigError("rehearse needs a checkpoint and --profile", "or --prepare DIR, once")
    checkpoint, profile = Path(options.checkpoint), load(options.profile)
    other = None if options.against is None else read_other(Path(options.against))
    require_vllm_ascend(profile)
    check_architecture(read_config(checkpoint), checkpoint / "config.json")
    environment, extra = find_environment(None), list(options.vllm_args)
    roles = list(profile.roles.values()) if options.role is None else [profile.role(options.role)]
    ranks = []
    for role in roles:
        planned = () if extra else _planned(checkpoint, profile, role, environment.line, say)
        ranks += rehearse_role(
            RehearsedRole(environment, profile, role, checkpoint, extra, planned), options.ranks, say
        )
    rehearsal = Rehearsal(profile.name, str(checkpoint), tuple(ranks))
    return rehearsal if other is None else replace(rehearsal, against=tuple(differences(rehearsal.ranks, other)))


def _planned(checkpoint: Path, profile: Profile, role: Role, line: EngineLine, say: Say) -> tuple[PlannedRank, ...]:
    """The planner's numbers; a checkpoint that the planner refuses is rehearsed without them."""
    try:
        return planned_ranks(checkpoint, profile, role, line)
    except (CheckpointError, ConfigError) as error:
        say(f"note: no planner's numbers: {error}")
        return ()
