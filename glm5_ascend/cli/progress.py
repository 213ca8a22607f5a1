"""What a quantization shows on stderr: the plan before, progress during, a summary after."""

from __future__ import annotations

import time

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from glm5_ascend.quantize.estimate.memory import Prediction
from glm5_ascend.quantize.pipeline import Prepared, Result
from glm5_ascend.quantize.run.layer import LayerReport
from glm5_ascend.report.page import size

console = Console(stderr=True, highlight=False)


def show_plan(job: Prepared) -> None:
    table = Table(title=f"recipe {job.recipe.metadata.config_id}: {job.options.source} -> {job.options.out}")
    table.add_column("modules")
    table.add_column("type")
    table.add_column("weights", justify="right")
    table.add_column("output", justify="right")
    for kind, scheme, count, nbytes in job.plan.summary():
        table.add_row(kind, scheme, str(count), size(nbytes))
    table.add_section()
    table.add_row("total", "", "", size(job.output_bytes))
    console.print(table)
    for note in job.notes:
        console.print(f"note: {note}", soft_wrap=True)


def show_prediction(prediction: Prediction) -> None:
    p = prediction
    console.print(
        f"predicted: {p.seconds / 3600:.1f} h ({p.seconds:.0f} s) with {p.threads} threads at the rates measured here, "
        f"reading {size(p.source_bytes)} included; peak memory {size(p.peak_rss_bytes)}; on disk "
        f"{size(p.output_bytes)}, and {size(p.activation_bytes)} of activations until the end",
        soft_wrap=True,
    )


def show_result(result: Result) -> None:
    cold = sum(len(report.cold_experts) for report in result.reports)
    console.print(
        f"wrote {result.out}: {size(result.source_bytes)} -> {size(result.output_bytes)} in {result.seconds:.1f} s, "
        f"peak memory {size(result.peak_rss_bytes)}, {result.calibration_tokens} calibration tokens",
        soft_wrap=True,
    )
    if cold:
        console.print(
            f"note: {cold} experts saw fewer tokens than a scale search needs and kept their scales; "
            "more calibration text helps (--calib, --samples)",
            soft_wrap=True,
        )
    console.print(f"next: glm5-ascend verify {result.out}", soft_wrap=True)


class ConsoleProgress:
    """A live bar on a terminal, one line per layer elsewhere, nothing when quiet."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.live = quiet, console.is_terminal and not quiet
        self.began = time.monotonic()
        self.layers = self.experts = self.before = 0
        self.bar: Progress | None = None

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, layers: int, experts: int, done: int) -> None:
        self.layers, self.experts, self.before = layers, experts, done
        if done and not self.quiet:
            console.print(f"going on with a stopped run: {done} of {layers} layers are done")
        if self.live:
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[rss]}"),
                console=console, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task("layer 0", total=layers, rss="")
            self.bar.start()

    def expert(self, layer: int, expert: int) -> None:
        if self.bar is not None:
            rss = f"RSS {size(psutil.Process().memory_info().rss)}"
            done = layer + expert / self.experts
            self.bar.update(self.task, description=f"layer {layer} expert {expert}", completed=done, rss=rss)

    def layer(self, report: LayerReport) -> None:
        done = report.layer + 1
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
        if self.quiet:
            return
        left = (time.monotonic() - self.began) / (done - self.before) * (self.layers - done)
        errors = ", ".join(f"{scheme} {error:.4f}" for scheme, error in sorted(report.errors.relative().items()))
        console.print(
            f"layer {report.layer + 1}/{self.layers}  weight error: {errors or 'FLOAT'}  "
            f"eta {left:.0f} s  RSS {size(psutil.Process().memory_info().rss)}",
            soft_wrap=True,
        )
