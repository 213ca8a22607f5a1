"""`glm5-ascend quantize SRC OUT`."""

from __future__ import annotations

import json

from glm5_ascend.cli.command import Output, command
from glm5_ascend.errors import json_frame
from glm5_ascend.quantize.options import QuantizeOptions


@command(
    "quantize", "quantize GLM-5 glm5-w4a8", "quantize GLM-5 glm5-w4a8 --recipe w4a8-best --dry-run",
    "quantize GLM-5 glm5-w8a8 --recipe w8a8 --max-ram 64GiB", json=True, quiet="Print only the output path.",
)  # fmt: skip
def run(options: QuantizeOptions, output: Output) -> int:
    """Quantize GLM-5 to the format that vllm-ascend loads. Run the same command again to resume an interrupted run."""
    from glm5_ascend.cli.progress import ProgressBar
    from glm5_ascend.cli.quantize_output import show_plan, show_prediction, show_result
    from glm5_ascend.quantize.api import run_quantization

    with ProgressBar(output.quiet) as progress:
        report = run_quantization(options, progress, None if output.quiet else show_plan)
    problem = report.problem
    if report.prediction is not None and not output.quiet:
        show_prediction(report.prediction)
    if report.result is not None and not output.quiet:
        show_result(report.job, report.result)
    if output.json:
        frame = json_frame("quantize", problem.exit_code if problem else 0)
        if problem is not None:
            frame["error"] = {"message": problem.message, "fix": problem.tip}
        print(json.dumps(frame | report.to_dict()))
    elif problem is not None:
        raise problem
    elif output.quiet and report.result is not None:
        print(report.job.out)
    return problem.exit_code if problem else 0
