"""`glm5-ascend doctor [DIR] [--profile NAME]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm5_ascend.cli.help import command

if TYPE_CHECKING:
    from rich.text import Text

    from glm5_ascend.deploy.diagnosis.row import DoctorRow


def register(app: typer.Typer) -> None:
    command(
        app, "doctor", doctor,
        "doctor",
        "doctor glm5-w4a8 --profile a3-single-w4a8 -- --max-num-seqs 8",
        extra_args=True,
    )  # fmt: skip


def doctor(
    context: typer.Context,
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="Checkpoint to check as well.")] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Deploy profile to check against all known bad combinations.")
    ] = None,
    role: Annotated[str | None, typer.Option(metavar="NAME", help="Only this role of the profile.")] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="First and last ranks, too, by vllm-ascend's own code; see `rehearse`.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as one JSON object on stdout.")] = False,
) -> int:
    """Check this machine, a checkpoint, a profile: versions, what serves here, and what mends the rest.

    What follows `--` is judged as flags of the profile's engine that win over its own.
    """
    from glm5_ascend.deploy import doctor as diagnose

    found = diagnose(directory, list(context.args), profile=profile, role=role, rehearse=rehearse)
    if as_json:
        print(json.dumps(found.to_dict()))
        return found.exit_code
    from rich.console import Console

    from glm5_ascend.report.terminal import STYLES, show

    console = Console(highlight=False)
    show(([row.item, cell(row)] for row in found.rows), console)
    style = STYLES["ok" if found.exit_code == 0 else "problem"]
    console.print(found.verdict, style=style, markup=False, soft_wrap=True)
    return found.exit_code


def cell(row: DoctorRow) -> Text:
    """Value, and what is known beside it; for what is not right, the line that mends it and the rule's source."""
    from rich.text import Text

    from glm5_ascend.report.terminal import STYLES

    style = STYLES[row.status]
    if row.status not in ("problem", "warning"):
        return Text(row.value, style).append(f"  ({row.note})" if row.note else "", "dim" if style else "")
    text = Text("" if row.item == row.status else f"{row.status}: ", style).append(row.value, style)
    text.append(f"\nfix: {row.note}" if row.note else "", "")
    return text.append(f"\nsource: {row.source}" if row.source else "", "dim")
