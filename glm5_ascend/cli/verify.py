"""`glm5-ascend verify DIR`."""

from __future__ import annotations

import typer

from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.verify.options import VerifyOptions


def register(app: typer.Typer) -> None:
    add_command(
        app, "verify", run,
        "verify glm5-w4a8 --against GLM-5",
        "verify glm5-w4a8 --engine sglang",
        "verify glm5-w4a8 --json",
        json="Report as one JSON object on stdout.",
    )  # fmt: skip


def run(options: VerifyOptions, output: Output) -> int:
    """Read a quantized checkpoint as the engine's loader would, and report what the loader would not."""
    from glm5_ascend.verify import verify

    report = verify(options)
    output.write(report.to_dict(), report.lines())
    return 0 if report.ok else 1
