"""The function `quantize`, which the command calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from glm5_ascend.errors import Glm5Error, OutputError, StoppedError
from glm5_ascend.options import with_options
from glm5_ascend.quantize.estimate.memory import RunPrediction
from glm5_ascend.quantize.job import PreparedJob, check_space, open_job, predict
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.pipeline import QuantizeResult
from glm5_ascend.quantize.pipeline import quantize as run
from glm5_ascend.quantize.progress import Progress, silent


@dataclass
class QuantizeReport:
    """Plan and result of a quantization.

    Attributes:
        prediction: of a dry run. result: of a run.
        problem: why the run would fail; set by a dry run only, a run raises it.
    """

    job: PreparedJob
    prediction: RunPrediction | None = None
    result: QuantizeResult | None = None
    problem: Glm5Error | None = None

    def to_dict(self) -> dict[str, Any]:
        """Data of `--json`, without its frame."""
        job, plan = self.job, self.job.plan
        value: dict[str, Any] = {
            "dry_run": self.result is None, "recipe": plan.recipe.metadata.config_id, "output_bytes": plan.output_bytes,
            "plan": [dict(zip(("modules", "type", "count", "bytes"), row, strict=True)) for row in plan.summary()],
            "notes": job.notes, "warnings": job.warnings,
        }  # fmt: skip
        if self.prediction is not None:
            value["prediction"] = asdict(self.prediction)
        if self.result is not None:
            value |= {
                "out": str(job.out), "seconds": round(self.result.seconds, 2),
                "peak_rss_bytes": self.result.peak_rss_bytes, "source_bytes": job.source.files.nbytes,
                "calibration_tokens": job.calibration_tokens,
                "layers": [layer.to_dict() for layer in self.result.layers],
            }  # fmt: skip
        return value


@with_options(QuantizeOptions)
def quantize(options: QuantizeOptions) -> QuantizeReport:
    """Quantize the checkpoint `source` into the new directory `out`. Call it again to resume an interrupted run.

    Raises:
        Glm5Error: what is wrong and what to do, before anything is written. StoppedError: Ctrl-C or SIGTERM; finished
            work is kept.
    """
    return run_quantization(options)


def run_quantization(
    options: QuantizeOptions, progress: Progress = silent, on_plan: Callable[[PreparedJob], None] | None = None
) -> QuantizeReport:
    """`quantize` for a caller that shows the progress, and the plan before the work begins."""
    job = open_job(options)
    if on_plan is not None:
        on_plan(job)
    report = QuantizeReport(job)
    if options.dry_run:
        report.prediction = predict(job)
        try:
            check_space(job)  # last: a prediction is most useful where the disk is too small
        except OutputError as error:
            report.problem = error
        return report
    try:
        report.result = run(job, progress)
    except KeyboardInterrupt:
        raise StoppedError(f"{job.out} is not finished", "run the same command again to resume") from None
    return report
