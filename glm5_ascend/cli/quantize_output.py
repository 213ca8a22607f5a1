"""What `quantize` shows on stderr: the plan before, a prediction, a summary after."""

from __future__ import annotations

from rich.table import Table

from glm5_ascend.cli.progress import console
from glm5_ascend.errors import shell_word
from glm5_ascend.quantize.estimate.memory import RunPrediction
from glm5_ascend.quantize.job import PreparedJob
from glm5_ascend.quantize.pipeline import QuantizeResult
from glm5_ascend.report.units import format_bytes, format_duration


def show_plan(job: PreparedJob) -> None:
    table = Table(title=f"recipe {job.plan.recipe.metadata.config_id}: {job.source.directory} -> {job.out}")
    table.add_column("modules")
    table.add_column("type")
    table.add_column("weights", justify="right")
    table.add_column("output", justify="right")
    for modules, scheme, count, nbytes in job.plan.summary():
        table.add_row(modules, scheme, str(count), format_bytes(nbytes))
    table.add_section()
    table.add_row("total", "", "", format_bytes(job.plan.output_bytes))
    console.print(table)
    for label, sentences in (("note", job.notes), ("warning", job.warnings)):
        for sentence in sentences:
            console.print(f"{label}: {sentence}", soft_wrap=True)


def show_prediction(prediction: RunPrediction) -> None:
    p = prediction
    console.print(
        f"predicted: {format_duration(p.seconds)} with {p.threads} threads at the rates measured here, "
        f"reading {format_bytes(p.source_bytes)} included; peak memory {format_bytes(p.peak_rss_bytes)}; on disk "
        f"{format_bytes(p.output_bytes)}, and {format_bytes(p.activation_bytes)} of activations until the end",
        soft_wrap=True,
    )


def show_result(job: PreparedJob, result: QuantizeResult) -> None:
    cold = sum(len(report.cold_experts) for report in result.layers)
    console.print(
        f"wrote {job.out}: {format_bytes(job.source.files.nbytes)} -> {format_bytes(job.plan.output_bytes)} "
        f"in {result.seconds:.1f} s, "
        f"peak memory {format_bytes(result.peak_rss_bytes)}, {job.calibration_tokens} calibration tokens",
        soft_wrap=True,
    )
    if cold:
        console.print(
            f"note: {cold} experts saw fewer tokens than a scale search needs and kept their scales; "
            "more calibration text helps (--calib, --samples)",
            soft_wrap=True,
        )
    console.print(f"next: glm5-ascend verify {shell_word(str(job.out))}", soft_wrap=True)
