"""`glm5-ascend quantize SRC OUT`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from glm5_ascend.cli.command import Output, command
from glm5_ascend.errors import json_frame
from glm5_ascend.quantize.options import QuantizeOptions

if TYPE_CHECKING:
    from glm5_ascend.errors import Glm5Error
    from glm5_ascend.quantize.api import QuantizeReport


@command(
    "quantize", "quantize GLM-5 glm5-w4a8", "quantize GLM-5 glm5-w4a8 --recipe w4a8-best --dry-run",
    "quantize GLM-5 glm5-w8a8 --recipe w8a8 --max-ram 64GiB", json=True, quiet="Print only the output path.",
)  # fmt: skip
def run(options: QuantizeOptions, output: Output) -> int:
    """Quantize GLM-5 to the format that vllm-ascend loads. Run the same command again to resume an interrupted run."""
    from glm5_ascend.cli.progress import ProgressBar
    from glm5_ascend.cli.quantize_output import show_plan
    from glm5_ascend.quantize.api import run_quantization

    with ProgressBar(output.quiet) as progress:
        report = run_quantization(options, progress, None if output.quiet else show_plan)
    return _print_report(report, Path(options.source), output.json, output.quiet)


def _print_report(report: QuantizeReport, source: Path, as_json: bool, quiet: bool) -> int:
    from glm5_ascend.cli.quantize_output import show_moved_aside, show_prediction, show_result

    if report.prediction is not None and not quiet:
        show_prediction(report.prediction)
    if report.problem is not None and not as_json:
        raise report.problem
    if report.result is not None and not quiet:
        show_result(report.result)
    if report.result is None and report.out is not None:
        if not quiet:
            show_moved_aside(report.out, report.moved_aside)
        return _verify_output(report, source, as_json, quiet)
    if as_json:
        print(json.dumps(_as_json(report, report.problem)))
    elif quiet and report.out is not None:
        print(report.out)
    return report.problem.exit_code if report.problem else 0


def _verify_output(report: QuantizeReport, source: Path, as_json: bool, quiet: bool) -> int:
    from glm5_ascend.verify import verify

    assert report.out is not None
    verdict = verify(report.out, against=source)
    code = 0 if verdict.ok else 1
    if as_json:
        frame = {"ok": verdict.ok, "exit_code": code, "verify": verdict.to_dict()}
        print(json.dumps(_as_json(report, None) | frame))
    else:
        for line in verdict.lines(quiet):
            print(line)
    return code


def _as_json(report: QuantizeReport, problem: Glm5Error | None) -> dict[str, object]:
    frame = json_frame("quantize", problem.exit_code if problem else 0)
    if problem is not None:
        frame["error"] = {"message": problem.message, "fix": problem.tip}
    return frame | report.to_dict()
