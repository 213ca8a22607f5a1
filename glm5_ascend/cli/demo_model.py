"""`glm5-ascend demo-model DIR`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.cli.help import command


def register(app: typer.Typer) -> None:
    command(
        app, "demo-model", demo_model,
        "demo-model demo",
        "demo-model demo-outliers --outliers 30",
    )  # fmt: skip


def demo_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty directory.")],
    outliers: Annotated[
        float, typer.Option(min=1, help="Plant activation outliers of this factor; the function stays the same.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Write out the small trained GLM-5 that ships with this package."""
    from glm5_ascend.demo_model.resources import data_folder, write_demo_model

    if outliers == 1.0:
        write_demo_model(directory)
    else:
        from glm5_ascend.demo_model.outliers import plant

        plant(data_folder(), directory, factor=outliers)
    if as_json:
        print(json.dumps({"schema_version": 1, "command": "demo-model", "ok": True, "out": str(directory)}))
    else:
        print(directory)
    return 0
