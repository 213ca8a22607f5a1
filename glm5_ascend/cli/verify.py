"""`glm5-ascend verify DIR`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.cli.help import command
from glm5_ascend.verify.engine_answer import ServingEngine


def register(app: typer.Typer) -> None:
    command(
        app, "verify", verify,
        "verify glm5-w4a8 --against GLM-5",
        "verify glm5-w4a8 --engine sglang",
        "verify glm5-w4a8 --json",
    )  # fmt: skip


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Quantized checkpoint.")],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="SRC",
            help="Its source: dequantize and compare every tensor. Or another output of the same job, or its "
            "provenance file: tell damage from another instruction set.",
        ),
    ] = None,
    engine: Annotated[
        ServingEngine | None, typer.Option(help="Say, too, what this engine would do with it, and why.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print findings only.")] = False,
) -> int:
    """Read a quantized checkpoint as the engine's loader would, and report what the loader would not say."""
    from glm5_ascend.verify import verify as run

    report = run(directory, against=against, engine=engine)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        for line in report.lines(quiet):
            print(line)
    return 0 if report.ok else 1
