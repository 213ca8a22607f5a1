"""Ranks of a profile, each rehearsed in a process of the environment that holds vllm-ascend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.shards import DTYPE_NAMES
from glm5_ascend.deploy.profiles.command import ServerPlace, command
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment
from glm5_ascend.deploy.rehearsal.result import FoundFailure, FoundRank, PlannedRank, RehearsedRank, read_rank
from glm5_ascend.engine_lines import VLLM
from glm5_ascend.errors import CheckFailedError, ConfigError
from glm5_ascend.serve.flags import ServerCommand

#: The name under which the files of `inside` are a package there: nothing else of ours is found beside them.
PACKAGE = "glm5_rehearsal"
INSIDE = Path(__file__).parent / "inside"
#: Seconds; a rank takes about one minute on one core.
LIMIT = 900
_HERE = "127.0.0.1"
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


@dataclass(frozen=True)
class RankLayout:
    """Sizes of one role's world."""

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


def layout(role: Role, extra: list[str]) -> RankLayout:
    """Of a role; what stands in `extra` counts first."""

    def size(name: str) -> int:
        flag = f"--{name}-parallel-size"
        for i, word in enumerate(extra):
            if word == flag or word.startswith(f"{flag}="):
                given = word.partition("=")[2] or (extra[i + 1] if i + 1 < len(extra) else "")
                if not given.isdecimal() or not 0 < int(given) < 10_000:
                    raise ConfigError(f"{flag} {given}: not a number of ranks", "give a whole number")
                return int(given)
        return int(role.args.get(f"{name}-parallel-size", 1))

    return RankLayout(size("tensor"), size("pipeline"), size("data"))


def chosen_ranks(said: str, sizes: RankLayout) -> list[int]:
    """`all`, `ends`, or numbers with commas.

    Raises:
        ConfigError: no such rank.
    """
    if said in ("all", "ends"):
        return list(range(sizes.world)) if said == "all" else sizes.ends
    words = said.split(",")
    if not all(word.isdecimal() and int(word) < sizes.world for word in words):
        raise ConfigError(f"--ranks {said}: the role has ranks 0 to {sizes.world - 1}", "all, ends, or 0,5,15")
    return sorted({int(word) for word in words})


def require_vllm_ascend(profile: Profile) -> None:
    """Raises `ConfigError` for a profile of another engine or of a CPU, before anything is asked for."""
    if profile.engine != VLLM or profile.platform != "npu":
        started = "SGLang" if profile.engine != VLLM else "vLLM on a CPU"
        raise ConfigError(
            f"profile {profile.name} starts {started}: rehearse has the code of vllm-ascend alone",
            "name a profile of vllm-ascend (glm5-ascend deploy list)",
        )


def headers_of(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> type and shape of every tensor of a checkpoint; nothing but headers is read."""
    entries = CheckpointDir(directory).entries
    return {name: (DTYPE_NAMES[entry.dtype], list(entry.shape)) for name, entry in entries.items()}


def uneven_experts(role: Role, sizes: RankLayout, names: Iterable[str]) -> str:
    """What is wrong if expert parallel ranks do not divide the experts of a checkpoint, else nothing.

    vllm-ascend 0.23.0 makes room for the quotient on each rank and gives some of them more (doctor's rule P50), so the
    error that a rank meets names neither number.
    """
    experts = 1 + max((int(found[1]) for name in names if (found := _EXPERT.search(name))), default=-1)
    ranks = sizes.tensor * sizes.data
    if not experts or not role.args.get("enable-expert-parallel") or experts % ranks == 0:
        return ""
    return f"{ranks} expert parallel ranks do not divide {experts} experts"


@dataclass(frozen=True)
class Stage:
    """What all ranks of a role share. planned: the planner's numbers by pipeline stage, if it has some."""

    environment: RehearsalEnvironment
    profile: Profile
    role: Role
    directory: Path
    extra: list[str]
    planned: tuple[PlannedRank, ...] = ()


def rehearse_role(stage: Stage, said: str, say: Callable[[str], None] = lambda line: None) -> list[RehearsedRank]:
    """Rehearse ranks of one role, one after the other.

    Raises:
        ConfigError: the profile is not vllm-ascend's, or has no such rank. CheckpointError: a header that is damaged.
    """
    require_vllm_ascend(stage.profile)
    stage = replace(stage, role=stage.role.for_version(stage.environment.version))
    sizes = layout(stage.role, stage.extra)
    ranks, headers, done = chosen_ranks(said, sizes), headers_of(stage.directory), []
    uneven = uneven_experts(stage.role, sizes, headers)
    for rank in ranks:
        say(f"{stage.profile.name}, {stage.role.name}: rank {rank} of {sizes.world}")
        job = _job(stage, rank, sizes) | {"headers": headers}
        found = _run(stage.environment, job)
        planned = _planned_of(stage, rank, sizes)
        done.append(RehearsedRank(stage.role.name, rank, sizes.world, found, planned, uneven))
    return done


def _job(stage: Stage, rank: int, sizes: RankLayout) -> dict[str, Any]:
    dp_rank, rank_in_dp = divmod(rank, sizes.tensor * sizes.pipeline)
    built, planned = _command(stage, dp_rank), _planned_of(stage, rank, sizes)
    return {
        "argv": built.argv, "env": built.env, "rank": rank, "world": sizes.world, "dp_rank": dp_rank,
        "rank_in_dp": rank_in_dp, "room": planned.room if planned else None,
        "imports": dict(stage.environment.line.rehearsal.imports) if stage.environment.line.rehearsal else {},
    }  # fmt: skip


def _planned_of(stage: Stage, rank: int, sizes: RankLayout) -> PlannedRank | None:
    """Ranks of a tensor-parallel group follow each other, then those of the pipeline stages."""
    return stage.planned[rank // sizes.tensor % sizes.pipeline] if stage.planned else None


def _command(stage: Stage, dp_rank: int) -> ServerCommand:
    """What the profile starts for a data-parallel rank. Addresses stand in for those of the cluster."""
    node, local = divmod(dp_rank, stage.role.local_ranks)
    place = ServerPlace(min(node, stage.role.nodes - 1), local if stage.role.per_rank else 0, _HERE, _HERE, "lo")
    return command(stage.profile, stage.role, place, str(stage.directory.absolute()), stage.extra)


def _run(environment: RehearsalEnvironment, job: dict[str, Any]) -> FoundRank:
    with tempfile.TemporaryDirectory(prefix="glm5-rehearsal-") as made:
        folder = Path(made)
        (folder / PACKAGE).symlink_to(INSIDE)
        (folder / "job.json").write_text(json.dumps(job))
        line = [str(environment.python), "-m", f"{PACKAGE}.rank", str(folder / "job.json"), str(folder / "found.json")]
        variables = os.environ | environment.variables(folder) | {"PYTHONDONTWRITEBYTECODE": "1"}
        try:
            # Not in a checkout of ours: there python would find our own plugins for vLLM, too.
            done = subprocess.run(
                line, capture_output=True, text=True, env=variables, timeout=LIMIT, check=False, cwd=folder
            )
        except subprocess.TimeoutExpired:
            raise CheckFailedError(f"a rank took more than {LIMIT} s", "run it on a faster machine") from None
        if not (folder / "found.json").is_file():
            return _died(done)
        found = read_rank(folder / "found.json")
    if found.failure is not None and "parser refuses" in found.failure.error:
        error = f"{found.failure.error}: {_last_line(done.stderr)}"
        found = found.model_copy(update={"failure": found.failure.model_copy(update={"error": error})})
    return found


def _died(done: subprocess.CompletedProcess[str]) -> FoundRank:
    failure = FoundFailure(stage="process", error=f"ended with {done.returncode}: {_last_line(done.stderr)}")
    return FoundRank(seconds={}, models={}, failure=failure, peak_bytes=0)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "no message"
