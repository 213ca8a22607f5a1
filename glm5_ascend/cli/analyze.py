"""`glm5-ascend analyze SRC`."""

from __future__ import annotations

import typer

from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.fidelity.options import AnalyzeOptions


def register(app: typer.Typer) -> None:
    add_command(
        app, "analyze", run,
        "analyze GLM-5 --json",
        "analyze GLM-5 --budget 420GB --out my-recipe.yaml",
        "analyze GLM-5.2 --recipe glm-5.2-w4a8 --seq-len 4096 --out r.yaml",
        json="Report as one JSON object on stdout.",
    )  # fmt: skip


def run(options: AnalyzeOptions, output: Output) -> int:
    """Show where a recipe loses accuracy, by layer, module and expert; propose what to keep in more bits."""
    from glm5_ascend.cli.progress import ProgressBar, console
    from glm5_ascend.fidelity.api import run_analysis

    with ProgressBar() as progress:
        report = run_analysis(options, progress)
    for note in report.analysis.notes:
        console.print(f"note: {note}", soft_wrap=True)
    output.write(report.to_dict(), report.lines())
    return 0
