"""`glm5-ascend analyze SRC`."""

from __future__ import annotations

from glm5_ascend.cli.command import Output, command
from glm5_ascend.fidelity.options import AnalyzeOptions


@command(
    "analyze", "analyze GLM-5 --json", "analyze GLM-5 --budget 420GB --out my-recipe.yaml",
    "analyze GLM-5.2 --recipe glm-5.2-w4a8 --seq-len 4096 --out r.yaml", json=True,
)  # fmt: skip
def run(options: AnalyzeOptions, output: Output) -> int:
    """Show where a recipe loses accuracy, by layer and unit; propose what to keep in more bits."""
    from glm5_ascend.cli.progress import ProgressBar, console
    from glm5_ascend.fidelity.api import run_analysis

    with ProgressBar() as progress:
        report = run_analysis(options, progress)
    for note in report.analysis.notes:
        console.print(f"note: {note}", soft_wrap=True)
    output.write(report.to_dict(), report.lines())
    return 0
