"""`glm5-ascend rehearse CHECKPOINT --profile NAME`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm5_ascend.cli.help import SHOWN, command
from glm5_ascend.engine_lines import STABLE, VLLM_ASCEND_LINES, EngineLine
from glm5_ascend.errors import CheckpointError, ConfigError

NUMBERS = [line.number for line in VLLM_ASCEND_LINES]
if TYPE_CHECKING:
    from glm5_ascend.deploy.profiles.load import Profile, Role
    from glm5_ascend.deploy.rehearsal.result import PlannedRank, Rehearsal


def register(app: typer.Typer) -> None:
    command(
        app, "rehearse", rehearse,
        "rehearse --prepare env",
        "rehearse glm5-w4a8 --profile a3-pd --environment env",
        extra_args=True,
    )  # fmt: skip


def rehearse(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None, typer.Argument(metavar="[CHECKPOINT]", help="Quantized checkpoint; its headers are enough.")
    ] = None,
    profile: Annotated[str | None, typer.Option(metavar="NAME", help="Deploy profile.")] = None,
    role: Annotated[str | None, typer.Option(metavar="NAME", help="Only this role of the profile.")] = None,
    ranks: Annotated[
        str, typer.Option(metavar="RANKS", help="all, ends (first, last, one per pipeline stage), or 0,5,15.")
    ] = "ends",
    environment: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What --prepare made; else what GLM5_REHEARSAL names.")
    ] = None,
    prepare: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Install vllm-ascend for this from PyPI: 4 GB. No checkpoint.")
    ] = None,
    line: Annotated[
        str, typer.Option(metavar="LINE", help=f"With --prepare: {', '.join(NUMBERS)} or newest.")
    ] = STABLE.number,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What --json said before: which operators differ.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Report as one JSON object on stdout.", rich_help_panel=SHOWN)
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Report as a page, too.", rich_help_panel=SHOWN)
    ] = None,
) -> int:
    """Build, load, weigh and walk a deployment's ranks with vllm-ascend's own code: no NPU, no weights, a minute each.

    What follows `--` goes to vLLM, after the profile's flags. Operators are called for shapes, none computes.
    """
    if prepare is not None:
        from glm5_ascend.deploy.rehearsal.environment import prepare as install

        made = install(prepare, _say, line)
        print(f"{made.folder}: ready; export GLM5_REHEARSAL={made.folder}")
        return 0
    if checkpoint is None or profile is None:
        raise ConfigError("rehearse needs a checkpoint and --profile", "or --prepare DIR, once")
    from glm5_ascend.report.page import check_path

    if html is not None:
        check_path(html)
    from glm5_ascend.deploy.rehearsal.against import differences, read_other

    other = None if against is None else read_other(against)
    found = _rehearsed(checkpoint, profile, role, ranks, environment, list(context.args))
    if other is not None:
        found = replace(found, against=tuple(differences(found.ranks, other)))
    if html is not None:
        from glm5_ascend.cli.rehearse_shown import page
        from glm5_ascend.report.page import write

        write(html, page(found))
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        from glm5_ascend.cli.rehearse_shown import show

        show(found)
    return found.exit_code


def _rehearsed(
    checkpoint: Path, profile: str, role: str | None, ranks: str, environment: Path | None, extra: list[str]
) -> Rehearsal:
    from glm5_ascend.deploy.profiles.load import load
    from glm5_ascend.deploy.rehearsal.environment import named
    from glm5_ascend.deploy.rehearsal.result import Rehearsal
    from glm5_ascend.deploy.rehearsal.run import Stage, rehearse_role, require_vllm_ascend
    from glm5_ascend.model.config_file import check_architecture, read_config

    chosen = load(profile)
    require_vllm_ascend(chosen)
    check_architecture(read_config(checkpoint), checkpoint / "config.json")
    place = named(environment)
    roles = list(chosen.roles.values()) if role is None else [chosen.role(role)]
    done = []
    for one in roles:
        planned = _planned_or_none(checkpoint, chosen, one, place.line) if not extra else ()
        done += rehearse_role(Stage(place, chosen, one, checkpoint, extra, planned), ranks, _say)
    return Rehearsal(profile, str(checkpoint), tuple(done))


def _planned_or_none(checkpoint: Path, profile: Profile, role: Role, line: EngineLine) -> tuple[PlannedRank, ...]:
    """A checkpoint that the planner refuses is rehearsed all the same: what the real loader says is the answer."""
    from glm5_ascend.deploy.planning.ranks import planned_ranks

    try:
        return planned_ranks(checkpoint, profile, role, line)
    except (CheckpointError, ConfigError) as error:
        _say(f"note: no planner's numbers: {error}")
        return ()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
