"""`glm5-ascend eval DIR --against SRC`."""

from __future__ import annotations

import os

from glm5_ascend.cli.command import Output, command
from glm5_ascend.fidelity.options import EvaluateOptions


@command(
    "eval", "eval glm5-w4a8 --against GLM-5 --html report.html",
    "eval glm5-w4a8 --against GLM-5 --windows 20 --window 128",
    "eval --url http://127.0.0.1:8000 --against GLM-5 --windows 8", json=True,
)  # fmt: skip
def run(options: EvaluateOptions, output: Output) -> int:
    """Measure the loss of a quantization: KL, top-1, flips, NLL and routing against the source."""
    from glm5_ascend.cli.progress import ProgressBar
    from glm5_ascend.fidelity.api import run_evaluation

    with ProgressBar() as progress:
        report = run_evaluation(options, progress, os.environ.get("OPENAI_API_KEY", ""))
    output.write(report.to_dict(), report.lines())
    return 0
