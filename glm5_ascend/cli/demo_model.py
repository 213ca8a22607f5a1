"""`glm5-ascend demo-model DIR`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glm5_ascend.cli.command import Output, command
from glm5_ascend.demo_model.resources import DemoModel
from glm5_ascend.options import Argument, StrPath


@dataclass(frozen=True)
class DemoModelOptions:
    """Options of `demo-model`."""

    directory: Annotated[StrPath, Argument("DIR", "New or empty directory.")]
    model: Annotated[
        DemoModel, Argument("[MODEL]", "glm-5, glm-5.3-flash, or smollm2: a real language model of PyPI, 93 MB.")
    ] = DemoModel.GLM5


@command("demo-model", "demo-model demo", "demo-model demo-flash glm-5.3-flash", "demo-model smollm2 smollm2")
def run(options: DemoModelOptions, output: Output) -> int:
    """Write the small trained GLM-5 or GLM-5.3-Flash of this package, or SmolLM2 in GLM-5's form."""
    from pathlib import Path

    from glm5_ascend.demo_model.resources import write_demo_model

    directory = Path(options.directory)
    if options.model is DemoModel.SMOLLM2:
        from glm5_ascend.demo_model.smollm2 import write_smollm2

        print(write_smollm2(directory))
    else:
        print(write_demo_model(directory, options.model))
    return 0
