"""`glm5-ascend demo-model DIR`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.demo_model.resources import DemoModel
from glm5_ascend.options import Argument, StrPath


@dataclass(frozen=True)
class DemoModelOptions:
    """Options of `demo-model`."""

    directory: Annotated[StrPath, Argument("DIR", "New or empty directory.")]
    model: Annotated[DemoModel, Argument("[MODEL]", "glm-5 or glm-5.3-flash.")] = DemoModel.GLM5


def register(app: typer.Typer) -> None:
    add_command(
        app,
        "demo-model",
        run,
        "demo-model demo",
        "demo-model demo-flash glm-5.3-flash",
    )


def run(options: DemoModelOptions, output: Output) -> int:
    """Write the small trained GLM-5, or GLM-5.3-Flash, that is part of this package."""
    from pathlib import Path

    from glm5_ascend.demo_model.resources import write_demo_model

    print(write_demo_model(Path(options.directory), options.model))
    return 0
