"""`glm5-ascend rehearse CHECKPOINT --profile NAME`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from glm5_ascend.cli.command import Output, command
from glm5_ascend.deploy.options import RehearseOptions

if TYPE_CHECKING:
    from glm5_ascend.deploy.rehearsal.result import Rehearsal, RehearsedRank


HEAD = ("role", "rank", "parameters GB", "planner", "alive GB", "cache B/token", "planner", "cached tokens", "verdict")


@command("rehearse", "rehearse --prepare env", "rehearse glm5-w4a8 --profile a3-pd --ranks all", json=True)
def run(options: RehearseOptions, output: Output) -> int:
    """Build, load and weigh a deployment's ranks with vllm-ascend's own code: no NPU, no weights, a minute each.

    GLM5_REHEARSAL names the environment that --prepare made. What follows `--` goes to vLLM, after the profile's flags.
    """
    if options.prepare is not None:
        from glm5_ascend.deploy.rehearsal.environment import prepare

        environment = prepare(Path(options.prepare), _say, options.line)
        print(f"{environment.folder}: ready; export GLM5_REHEARSAL={environment.folder}")
        return 0
    from glm5_ascend.deploy.rehearsal.run import rehearse

    rehearsal = rehearse(options, _say)
    if output.json:
        print(json.dumps(rehearsal.to_dict()))
    else:
        _show(rehearsal)
    return rehearsal.exit_code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def row(rank: RehearsedRank) -> list[str]:
    """Cells of a rank; "-" for an unknown value."""
    measured, off = rank.report, rank.differences
    cache = "-" if measured.cache is None else f"{measured.cache.bytes_per_token:,.0f}"
    tokens = "-" if rank.cached_tokens is None else f"{rank.cached_tokens:,}"
    return [
        rank.role, f"{rank.rank} of {rank.world}", _gb(measured.parameter_bytes), _percent(off.get("parameters")),
        _gb(measured.resident_bytes), cache, _percent(off.get("cache")), tokens,
        f"problems: {len(measured.problems)}" if measured.problems else "ok",
    ]  # fmt: skip


def _show(rehearsal: Rehearsal) -> None:
    from glm5_ascend.report.terminal import STYLES, text_console
    from glm5_ascend.report.terminal import show as table

    console = text_console()
    table([HEAD, *map(row, rehearsal.ranks)], console, right=(2, 3, 4, 5, 6, 7))
    for line in notes(rehearsal):
        console.print(line, soft_wrap=True)
    style = STYLES["ok" if rehearsal.exit_code == 0 else "problem"]
    console.print(rehearsal.verdict, style=style, soft_wrap=True)


def notes(rehearsal: Rehearsal) -> Iterator[str]:
    """Lines on problems with their ranks, and on the planner's error."""
    from glm5_ascend.deploy.rehearsal.result import TOLERANCE

    problems: dict[str, list[str]] = {}
    for rank in rehearsal.ranks:
        for problem in rank.report.problems:
            problems.setdefault(problem, []).append(f"{rank.role} {rank.rank}")
    for problem, ranks in problems.items():
        yield f"problem: {problem} ({', '.join(ranks)})"
    for name in ("parameters", "cache"):
        off = max((abs(rank.differences.get(name, 0.0)) for rank in rehearsal.ranks), default=0.0)
        if off > TOLERANCE:
            yield f"note: the planner's {name} are off by up to {off:.2f} %"


def _gb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f} %"
