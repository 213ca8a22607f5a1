"""Ranks of a profile, each rehearsed in a process of the environment that holds vllm-ascend."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.shards import DTYPE_NAMES
from glm5_ascend.deploy.options import RehearseOptions
from glm5_ascend.deploy.planning.ranks import planned_ranks
from glm5_ascend.deploy.profiles.command import ServerPlace, command
from glm5_ascend.deploy.profiles.load import Profile, Role, load
from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment, find_environment
from glm5_ascend.deploy.rehearsal.result import PlannedRank, RankReport, Rehearsal, RehearsedRank
from glm5_ascend.engine_lines import STABLE, VLLM, EngineLine
from glm5_ascend.errors import CheckFailedError, CheckpointError, ConfigError
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.model.config_file import load_config
from glm5_ascend.serve.flag_table import flag_table
from glm5_ascend.serve.flags import normal_form, parsed_flags

_HERE = "127.0.0.1"
Report = Callable[[str], None]
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


@dataclass(frozen=True)
class RankLayout:
    """Parallel sizes of one role."""

    tensor: int
    pipeline: int
    data: int

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def ends(self) -> list[int]:
        """The first rank, the first of the last pipeline stage, and the last."""
        return sorted({0, self.tensor * (self.pipeline - 1), self.world - 1})


def layout(role: Role, extra: Sequence[str], line: EngineLine = STABLE) -> RankLayout:
    """Parallel sizes of a role; flags in `extra` override it."""
    table = flag_table(line.flags)
    args = role.args | parsed_flags(normal_form(extra, table), table)

    def size(name: str) -> int:
        value = args.get(f"{name}-parallel-size", 1)
        if type(value) is not int or not 0 < value < 10_000:
            raise ConfigError(f"--{name}-parallel-size {value}: not a number of ranks", "give a whole number")
        return value

    return RankLayout(size("tensor"), size("pipeline"), size("data"))


def select_ranks(text: str, sizes: RankLayout) -> list[int]:
    """Ranks from `all`, `ends`, or numbers with commas.

    Raises:
        ConfigError: no such rank.
    """
    if text in ("all", "ends"):
        return list(range(sizes.world)) if text == "all" else sizes.ends
    words = text.split(",")
    if not all(word.isdecimal() and int(word) < sizes.world for word in words):
        raise ConfigError(f"--ranks {text}: the role has ranks 0 to {sizes.world - 1}", "all, ends, or 0,5,15")
    return sorted({int(word) for word in words})


def uneven_experts(role: Role, sizes: RankLayout, names: Iterable[str]) -> str:
    """A message if expert parallel ranks do not divide the experts of a checkpoint, else an empty string.

    vllm-ascend allocates the quotient on each rank and sends more experts to some ranks (rule P50). Its own error names
    neither number.
    """
    experts = 1 + max((int(match[1]) for name in names if (match := _EXPERT.search(name))), default=-1)
    ranks = sizes.tensor * sizes.data
    if not experts or not role.args.get("enable-expert-parallel") or experts % ranks == 0:
        return ""
    return f"{ranks} expert parallel ranks do not divide {experts} experts"


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
    headers = {name: (DTYPE_NAMES[entry.dtype], list(entry.shape)) for name, entry in entries.items()}
    uneven = uneven_experts(role, sizes, headers)
    for rank in select_ranks(options.ranks, sizes):
        say(f"{profile.name}, {role.name}: rank {rank} of {sizes.world}")
        dp_rank, rank_in_dp = divmod(rank, sizes.tensor * sizes.pipeline)
        node, local = divmod(dp_rank, role.local_ranks)
        server = ServerPlace(min(node, role.nodes - 1), local if role.per_rank else 0, _HERE, _HERE, "lo")
        built = command(profile, role, server, str(directory), extra)
        stage = planned[rank // sizes.tensor % sizes.pipeline] if planned else None
        job = {
            "argv": built.argv, "env": built.env, "rank": rank, "world": sizes.world, "dp_rank": dp_rank,
            "rank_in_dp": rank_in_dp, "usable_bytes": stage.usable_bytes if stage else None,
            "headers": headers,
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            asked, answer = Path(folder, "job.json"), Path(folder, "report.json")
            asked.write_text(json.dumps(job))
            try:
                environment.run("glm5_rehearsal.rank", asked, answer)
                report = RankReport.model_validate(parse_json(answer.read_bytes()))
            except CheckFailedError as error:
                report = RankReport(problems=[error.message])
        report.problems[:0] = [uneven] * bool(uneven)
        yield RehearsedRank(role.name, rank, sizes.world, report, stage)
