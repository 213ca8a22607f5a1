"""`glm5-ascend demo-model DIR`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import typer

from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.demo_model.resources import DemoModel
from glm5_ascend.errors import ConfigError
from glm5_ascend.options import Argument, Option, StrPath


@dataclass(frozen=True)
class DemoModelOptions:
    """Options of `demo-model`."""

    directory: Annotated[StrPath, Argument("DIR", "New or empty directory.")]
    model: Annotated[DemoModel, Argument("[MODEL]", "glm-5 or glm-5.3-flash.")] = DemoModel.GLM5
    _: KW_ONLY
    outliers: Annotated[
        float, Option("Factor of planted activation outliers in glm-5; its function stays the same.", min=1)
    ] = 1.0


def register(app: typer.Typer) -> None:
    add_command(
        app,
        "demo-model",
        run,
        "demo-model demo",
        "demo-model demo-flash glm-5.3-flash",
        "demo-model demo-outliers --outliers 32",
    )


def run(options: DemoModelOptions, output: Output) -> int:
    """Write the small trained GLM-5, or GLM-5.3-Flash, that is part of this package."""
    from pathlib import Path

    from glm5_ascend.demo_model.resources import data_folder, write_demo_model

    directory = Path(options.directory)
    if options.outliers == 1.0:
        write_demo_model(directory, options.model)
    elif options.model is DemoModel.FLASH:
        raise ConfigError("--outliers is for glm-5 only", "leave it out")
    else:
        from glm5_ascend.demo_model.outliers import plant

        plant(data_folder(), directory, factor=options.outliers)
    print(directory)
    return 0
