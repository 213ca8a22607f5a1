"""`glm5-ascend doctor [DIR] [--profile NAME]`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_ENVIRONMENT, EXIT_OK

if TYPE_CHECKING:
    from glm5_ascend.deploy.doctor import DoctorRow


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Checkpoint to check as well.")] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Deploy profile to check against all known bad combinations.")
    ] = None,
    role: Annotated[str | None, typer.Option(help="Only this role of the profile.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as one JSON object on stdout.")] = False,
) -> int:
    """Check this machine, a checkpoint, a profile: versions, what serves here, and what mends the rest."""
    from glm5_ascend.deploy.doctor import run_doctor

    rows = run_doctor(directory, profile, role)
    code = exit_code(rows)
    if as_json:
        value = {"schema_version": 1, "command": "doctor", "ok": code == EXIT_OK, "exit_code": code}
        print(json.dumps(value | {"rows": [asdict(row) for row in rows]}))
        return code
    width = max(len(row.item) for row in rows)
    for row in rows:
        for line in shown(row, width):
            print(line)
    return code


def exit_code(rows: list[DoctorRow]) -> int:
    """3 where this machine lacks something, 1 where a profile or a checkpoint is bad, 0 otherwise, warnings or not."""
    bad = [row for row in rows if row.status == "problem"]
    if not bad:
        return EXIT_OK
    return EXIT_CHECK_FAILED if all(row.id or row.item == "checkpoint" for row in bad) else EXIT_ENVIRONMENT


def shown(row: DoctorRow, width: int) -> list[str]:
    if row.status not in ("problem", "warning"):
        return [f"{row.item:{width}}  {row.value}" + (f"  ({row.note})" if row.note else "")]
    mark = "warning: " if row.status == "warning" else ""
    lines = [f"{row.item:{width}}  {mark}{row.value}"]
    lines += [f"{'':{width}}  fix: {row.note}"] if row.note else []
    return lines + ([f"{'':{width}}  source: {row.source}"] if row.source else [])
