"""`glm5-ascend plan`."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.errors import OutputError, PlanError
from glm5_ascend.plan.options import PlanCommandOptions


def register(app: typer.Typer) -> None:
    add_command(
        app, "plan", run,
        "plan --quant w4a8 --nodes 4 --slo tpot=50ms,ttft=2s",
        "plan work/glm5-w4a8 --html plan.html",
        json="One JSON object on stdout.",
    )  # fmt: skip


def run(options: PlanCommandOptions, output: Output) -> int:
    """Plan a deployment on paper: memory, layout, latency and throughput, with their uncertainty."""
    if options.measure:
        return _measure(options)
    if options.calibrate is not None:
        return _calibrate(options)
    if options.out is not None:
        raise PlanError("--out goes with --measure or --calibrate", "the plan itself: --json, or --html FILE")
    from glm5_ascend.deploy.planning.commands import plan_commands
    from glm5_ascend.plan.api import plan

    report = plan(replace(options, html=None))
    report = replace(report, commands=plan_commands(report.plan))
    if options.html is not None:
        from glm5_ascend.plan.html import write

        write(report.plan, Path(options.html), report.commands)
    if options.sweep:
        from glm5_ascend.plan.sweep import goodput, sweep

        rows = sweep(report.plan)
        if output.json:
            print(json.dumps({"schema_version": 1, "command": "plan", "ok": True, "exit_code": 0, "rows": rows}))
            return 0
        print(report.plan.best.layout)
        _show_table(rows)
        print(goodput(rows))
    elif output.json:
        print(json.dumps(report.to_dict()))
    else:
        from rich.console import Console

        report.show(Console(highlight=False))
    return 0


def _show_table(rows: list[dict[str, Any]]) -> None:
    from glm5_ascend.report.terminal import show

    show([tuple(rows[0]), *(tuple(map(str, row.values())) for row in rows)] if rows else [])


def _calibrate(options: PlanCommandOptions) -> int:
    """Fit to the user's runs, print the changes, and write the machine."""
    from glm5_ascend.plan.calibrate import calibrate, calibrated
    from glm5_ascend.plan.measure.describe import write
    from glm5_ascend.plan.search import read_layout

    assert options.calibrate is not None
    out = _new_file(options)
    sizes: dict[str, int] = {"dp": 1, **(read_layout(options.layout) if options.layout else {})}
    setup: dict[str, object] = {
        "model": options.model or "glm-5", "quant": options.quant, "nodes": options.nodes, "cache": options.cache
    }  # fmt: skip
    keys = ("tp", "dp", "pp", "prefill_tp", "prefill_dp", "prefill_pp", "prefills")
    setup |= {key: sizes[key] for key in keys if key in sizes}
    calibration = calibrate(Path(options.calibrate), options.hardware, setup)
    for line in calibration.lines():
        print(line)
    if out is not None:
        write(calibrated(calibration, options.hardware), out, replace=False)
        print(f"wrote {out}; use it: glm5-ascend plan --hardware {out}")
    return 0


def _measure(options: PlanCommandOptions) -> int:
    """Measure this machine and write its description."""
    from glm5_ascend.plan.hardware import measured_file
    from glm5_ascend.serve.environment import require_cpu_environment

    out = _new_file(options)
    target = out or measured_file()
    require_cpu_environment()
    from glm5_ascend.plan.measure.describe import measure, summary, write

    with tempfile.TemporaryDirectory() as folder:
        if options.directory is not None:
            directory = Path(options.directory)
        else:
            from glm5_ascend.demo_model.resources import write_demo_model

            directory = write_demo_model(Path(folder) / "glm5-demo")
        handle, log = tempfile.mkstemp(prefix="glm5-measure-", suffix=".log")  # stays if the server fails
        os.close(handle)
        hardware = measure(directory, Path(log))
        os.unlink(log)
    write(hardware, target, replace=out is None)
    for line in summary(hardware):
        print(line)
    name = "cpu" if out is None else target
    load = "--mtp 0 --workload in=1024,out=64,concurrency=8"
    shown = options.directory or "DIR"  # the demo model is gone with its folder
    print(f"wrote {target}; use it: glm5-ascend plan {shown} --hardware {name} {load}")
    return 0


def _new_file(options: PlanCommandOptions) -> Path | None:
    """The file of --out, which must not exist."""
    if options.out is None:
        return None
    if Path(options.out).exists():
        raise OutputError(f"{options.out} exists already", "name another file, or remove it")
    return Path(options.out)
