"""Ranks of a profile, each rehearsed in a process of the environment that holds vllm-ascend."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.shards import dtype_name
from glm5_ascend.deploy.options import RehearseOptions
from glm5_ascend.deploy.planning.ranks import engine_of, planned_ranks
from glm5_ascend.deploy.profiles.command import command
from glm5_ascend.deploy.profiles.load import Profile, Role, load
from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment, find_environment
from glm5_ascend.deploy.rehearsal.result import PlannedRank, Rehearsal, RehearsedRank
from glm5_ascend.engine_lines import STABLE, VLLM, EngineLine
from glm5_ascend.errors import CheckFailedError, CheckpointError, ConfigError
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.model.config_file import load_config
from glm5_ascend.plan.layout import Engine
from glm5_ascend.serve.flag_table import flag_table
from glm5_ascend.serve.flags import normal_form, parsed_flags
from glm5_ascend.serve.options import ServeOptions

_HERE = "127.0.0.1"
Report = Callable[[str], None]


def layout(role: Role, extra: Sequence[str], line: EngineLine = STABLE) -> Engine:
    """A role as the planner's engine; parallel sizes in `extra`, in normal form, override its own."""
    flags = parsed_flags(extra, flag_table(line.flags))
    sizes = {name: size for name, size in flags.items() if name.endswith("-parallel-size")}
    return engine_of(replace(role, args=role.args | sizes), line)


def select_ranks(text: str, sizes: Engine) -> list[int]:
    """Ranks from `all`, `ends` (first, first of the last pipeline stage, last) or numbers; ConfigError: no such one."""
    if text == "all":
        return list(range(sizes.dies))
    if text == "ends":
        return sorted({0, sizes.tp * (sizes.pp - 1), sizes.dies - 1})
    words = text.split(",")
    if not all(word.isdecimal() and int(word) < sizes.dies for word in words):
        raise ConfigError(f"--ranks {text}: the role has ranks 0 to {sizes.dies - 1}", "all, ends, or 0,5,15")
    return sorted({int(word) for word in words})


def rehearse(options: RehearseOptions, report: Report) -> Rehearsal:
    """Build, load, weigh and run the ranks of a profile with vllm-ascend's own code, one after the other.

    Args:
        report: prints a line of progress.
    Raises:
        ConfigError: no checkpoint, an unknown profile, role or rank, or a profile of another engine.
        MissingEnvironmentError: GLM5_REHEARSAL names no environment. CheckpointError: a damaged header.
    """
    if options.checkpoint is None or options.profile is None:
        raise ConfigError("rehearse needs a checkpoint and --profile", "or --prepare DIR, once")
    checkpoint, profile = Path(options.checkpoint), load(options.profile)
    if profile.engine != VLLM or profile.platform != "npu":
        started = "SGLang" if profile.engine != VLLM else "vLLM on a CPU"
        raise ConfigError(
            f"profile {profile.name} starts {started}: rehearse runs vllm-ascend only",
            "choose a profile of vllm-ascend (glm5-ascend deploy list)",
        )
    load_config(checkpoint)
    environment = find_environment()
    ranks: list[RehearsedRank] = []
    for role in profile.roles.values() if options.role is None else [profile.role(options.role)]:
        planned: tuple[PlannedRank, ...] = ()
        if not options.vllm_args:  # else the planner does not know the layout
            try:
                planned = planned_ranks(checkpoint, profile, role, environment.line)
            except (CheckpointError, ConfigError) as error:
                report(f"note: no planner's numbers: {error}")
        ranks += _rehearse_role(environment, profile, role, options, planned, report)
    return Rehearsal(profile.name, str(checkpoint), tuple(ranks))


def _rehearse_role(
    environment: RehearsalEnvironment, profile: Profile, role: Role, options: RehearseOptions,
    planned: tuple[PlannedRank, ...], say: Report,
) -> Iterator[RehearsedRank]:  # fmt: skip
    """Ranks are ordered by tensor parallel group, then by pipeline stage; `planned` has an entry per stage, or none."""
    directory, line = Path(str(options.checkpoint)).absolute(), environment.line
    extra = normal_form(options.vllm_args, flag_table(line.flags))
    role = role.for_line(line)
    sizes, entries = layout(role, extra, line), CheckpointDir(directory).entries
    headers = {name: (dtype_name(entry.dtype), list(entry.shape)) for name, entry in entries.items()}
    for rank in select_ranks(options.ranks, sizes):
        say(f"{profile.name}, {role.name}: rank {rank} of {sizes.dies}")
        dp_rank, rank_in_dp = divmod(rank, sizes.tp * sizes.pp)
        node, local = divmod(dp_rank, role.local_ranks)
        number = local if role.per_rank else 0
        server = ServeOptions(directory, node=min(node, role.nodes - 1), rank=number, head=_HERE, ip=_HERE, nic="lo")
        built = command(profile, role, server, str(directory), extra)
        stage = planned[rank // sizes.tp % sizes.pp] if planned else None
        job = {
            "argv": built.argv, "env": built.env, "rank": rank, "world": sizes.dies, "dp_rank": dp_rank,
            "rank_in_dp": rank_in_dp, "usable_bytes": stage.usable_bytes if stage else None,
            "headers": headers,
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            asked, answer = Path(folder, "job.json"), Path(folder, "report.json")
            asked.write_text(json.dumps(job))
            try:
                environment.run("glm5_rehearsal.rank", asked, answer)
                report = parse_json(answer.read_bytes())
            except CheckFailedError as error:
                report = {"problems": [error.message]}
        about = {"role": role.name, "rank": rank, "world": sizes.dies, "planned": stage}
        yield RehearsedRank.model_validate(about | report)
