"""`glm5-ascend quantize SRC OUT`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import glm5_ascend.cli.quantize_options as options
from glm5_ascend.cli.help import command
from glm5_ascend.quantize.options import Quantizer

if TYPE_CHECKING:
    from glm5_ascend.errors import Glm5Error
    from glm5_ascend.quantize.api import QuantizeReport
    from glm5_ascend.quantize.pipeline import PreparedJob


def register(app: typer.Typer) -> None:
    command(
        app, "quantize", quantize,
        "quantize GLM-5 glm5-w4a8",
        "quantize GLM-5 glm5-w4a8 --recipe w4a8-best --dry-run",
        "quantize GLM-5 glm5-w8a8 --recipe w8a8 --max-ram 64GiB",
    )  # fmt: skip


def quantize(
    source: options.Source,
    out: options.Out,
    recipe: options.Recipe = "w4a8",
    calib: options.Calib = None,
    samples: options.Samples = 64,
    seq_len: options.SeqLen = 512,
    seed: options.Seed = 1234,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
    max_ram: options.MaxRam = None,
    restart: options.Restart = False,
    engine: options.Engine = Quantizer.own,
    device: options.Device = None,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Quantize GLM-5 to the format vllm-ascend loads (msModelSlim's). A stopped run goes on with the same command."""
    from glm5_ascend.cli.progress import ProgressBar
    from glm5_ascend.cli.quantize_output import show_plan
    from glm5_ascend.quantize.api import is_helper
    from glm5_ascend.quantize.api import quantize as run

    quiet = quiet or is_helper()

    def on_plan(prepared: PreparedJob) -> None:
        if not quiet:
            show_plan(prepared)

    with ProgressBar(quiet) as progress:
        report = run(
            source,
            out,
            recipe=recipe,
            calib=calib,
            samples=samples,
            seq_len=seq_len,
            seed=seed,
            overwrite=overwrite,
            threads=threads,
            max_ram=max_ram,
            restart=restart,
            engine=engine,
            device=device,
            dry_run=dry_run,
            progress=progress,
            on_plan=on_plan,
        )
    return 0 if report is None else _answer(report, source, as_json, quiet)


def _answer(report: QuantizeReport, source: Path, as_json: bool, quiet: bool) -> int:
    """Print what came of it; returns the exit code."""
    from glm5_ascend.cli.quantize_output import show_kept, show_prediction, show_result

    if report.prediction is not None and not quiet:
        show_prediction(report.prediction)
    if report.problem is not None and not as_json:
        raise report.problem
    if report.result is not None and not quiet:
        show_result(report.result)
    if report.result is None and report.out is not None:
        if not quiet:
            show_kept(report.out, report.kept)
        return _judged(report, source, as_json, quiet)
    if as_json:
        print(json.dumps(_as_json(report, report.problem)))
    elif quiet and report.out is not None:
        print(report.out)
    return report.problem.exit_code if report.problem else 0


def _judged(report: QuantizeReport, source: Path, as_json: bool, quiet: bool) -> int:
    """The official tool wrote, our verifier judges: its exit code is the command's."""
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
    frame: dict[str, object] = {"schema_version": 1, "command": "quantize", "ok": problem is None, "exit_code": 0}
    if problem is not None:
        frame |= {"exit_code": problem.exit_code, "error": {"message": problem.message, "fix": problem.tip}}
    return frame | report.to_dict()
