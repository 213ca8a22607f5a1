"""`glm5-ascend demo-model DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("demo-model")(demo_model)


def demo_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty directory.")],
    outliers: Annotated[
        float, typer.Option(min=1, help="Plant activation outliers of this factor; the function stays the same.")
    ] = 1.0,
) -> int:
    """Write out the small trained GLM-5 that ships with this package."""
    from glm5_ascend.demo_model.resources import data_folder, write_demo_model

    if outliers == 1.0:
        write_demo_model(directory)
    else:
        from glm5_ascend.demo_model.outliers import plant

        plant(data_folder(), directory, factor=outliers)
    print(directory)
    return 0
