"""`glm5-ascend doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from glm5_ascend.errors import EXIT_ENVIRONMENT, EXIT_OK


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Rows as one JSON object on stdout.")] = False,
) -> int:
    """Check this machine: versions, what would serve here, and the line that mends what is broken."""
    from glm5_ascend.doctor import run_doctor

    rows = run_doctor()
    code = EXIT_ENVIRONMENT if any(row.status == "problem" for row in rows) else EXIT_OK
    if as_json:
        value = {"schema_version": 1, "command": "doctor", "ok": code == EXIT_OK, "exit_code": code}
        print(json.dumps(value | {"rows": [asdict(row) for row in rows]}))
        return code
    width = max(len(row.item) for row in rows)
    for row in rows:
        if row.status == "problem":
            print(f"{row.item:{width}}  {row.value}" + (f"\n{'':{width}}  fix: {row.note}" if row.note else ""))
        else:
            print(f"{row.item:{width}}  {row.value}" + (f"  ({row.note})" if row.note else ""))
    return code
