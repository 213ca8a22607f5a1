"""`glm5-ascend plan`, `plan measure`, `plan calibrate` and `plan baselines`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from glm5_ascend.cli.command import NoOptions, Output, add_command
from glm5_ascend.errors import OutputError
from glm5_ascend.options import StrPath
from glm5_ascend.plan.options import CalibrateOptions, MeasureOptions, PlanOptions

#: Name of the command that runs where no subcommand is named.
_DEFAULT = "deployment"


class _PlanGroup(TyperGroup):
    """`plan DIR --option` without a subcommand's name is a plan; its help names the subcommands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        subcommands = [name for name in self.commands if name != _DEFAULT]
        return super().parse_args(ctx, args if args and args[0] in subcommands else [_DEFAULT, *args])


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=_PlanGroup, help="Plan a deployment on paper; measure, calibrate, baselines.")
    add_command(
        group, _DEFAULT, run,
        "plan --quant w4a8 --nodes 4 --slo tpot=50ms,ttft=2s",
        "plan work/glm5-w4a8 --html plan.html",
        json="One JSON object on stdout.",
    )  # fmt: skip
    add_command(group, "measure", measure, "plan measure work/glm5-w4a8")
    add_command(
        group, "calibrate", calibrate, "plan calibrate runs.csv --out my-a3.yaml",
        "plan calibrate bench.json --quant w8a8 --layout tp=16",
    )  # fmt: skip
    add_command(group, "baselines", baselines, "plan baselines", json="One JSON object on stdout.")
    app.add_typer(group, name="plan")


def run(options: PlanOptions, output: Output) -> int:
    """Plan a deployment on paper: memory, layout, latency and throughput, with their uncertainty.

    `plan measure`, `plan calibrate` and `plan baselines` are commands of their own, each with --help.
    """
    from dataclasses import replace

    from glm5_ascend.deploy.planning.commands import with_commands
    from glm5_ascend.plan.api import plan

    report = with_commands(plan(replace(options, html=None)))
    if options.html is not None:
        from glm5_ascend.plan.report import write

        write(report, Path(options.html))
    if output.json:
        print(json.dumps(report.to_dict()))
    else:
        from glm5_ascend.plan.report import show
        from glm5_ascend.report.terminal import text_console

        show(report, text_console())
    return 0


def calibrate(options: CalibrateOptions, output: Output) -> int:
    """Fit the planner's constants to your runs, print the changes, and write the machine."""
    from glm5_ascend.plan.evidence import calibrate
    from glm5_ascend.plan.hardware import write

    out = _new_file(options.out)
    setup = {"model": options.model, "quant": options.quant, "nodes": options.nodes, "layout": options.layout}
    calibration = calibrate(Path(options.runs), options.hardware, setup)
    for line in calibration.lines():
        print(line)
    if out is not None:
        write(calibration.machine, out)
        print(f"wrote {out}; use it: glm5-ascend plan --hardware {out}")
    return 0


def measure(options: MeasureOptions, output: Output) -> int:
    """Describe this machine's CPU for `plan --hardware cpu`: serves a model here for some minutes."""
    from glm5_ascend.plan.hardware import measured_file, write
    from glm5_ascend.serve.environment import require_cpu_environment

    out = _new_file(options.out)
    target = out or measured_file()
    require_cpu_environment()
    from glm5_ascend.plan.measure import measure

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
    write(hardware, target)
    print(f"{hardware.title}, measured on {hardware.measured_on}")
    name = "cpu" if out is None else target
    shown = options.directory or "DIR"  # the demo model is gone with its folder
    load = "--mtp 0 --workload in=1024,out=64,concurrency=8"
    print(f"wrote {target}; use it: glm5-ascend plan {shown} --hardware {name} {load}")
    return 0


def baselines(options: NoOptions, output: Output) -> int:
    """Compare the planner with every public result that it knows."""
    from glm5_ascend.plan.evidence import cases, predictions
    from glm5_ascend.plan.hardware import fitted
    from glm5_ascend.report.terminal import show

    rows = []
    for case, p in zip(cases(), predictions(cases(), fitted().constants), strict=True):
        for name, value in case.measured.items():
            row = {"id": case.row.id, "source": case.row.source, "layout": str(case.layout), "output": name}
            rows.append(
                {**row, "measured": value, "predicted": float(f"{getattr(p, name):.5g}"), "judged": case.judged}
            )
    if output.json:
        answer = {"schema_version": 1, "command": "plan", "ok": True, "exit_code": 0}
        print(json.dumps(answer | {"fitted": fitted().model_dump(mode="json"), "rows": rows}))
    else:
        show(
            [
                tuple(rows[0]),
                *(tuple(f"{v:,.4g}" if isinstance(v, float) else str(v) for v in r.values()) for r in rows),
            ]
        )
    return 0


def _new_file(path: StrPath | None) -> Path | None:
    """A file to write, which must not exist."""
    if path is not None and Path(path).exists():
        raise OutputError(f"{path} exists already", "name another file, or remove it")
    return None if path is None else Path(path)
