"""`glm5-ascend plan` and `plan measure`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from glm5_ascend.cli.command import Output, app, command
from glm5_ascend.errors import OutputError
from glm5_ascend.plan.options import MeasureOptions, PlanReportOptions

#: Name of the command that runs where no subcommand is named.
_DEFAULT = "deployment"


class _PlanGroup(TyperGroup):
    """`plan DIR --option` without a subcommand's name is a plan; its help names the subcommands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        subcommands = [name for name in self.commands if name != _DEFAULT]
        return super().parse_args(ctx, args if args and args[0] in subcommands else [_DEFAULT, *args])


group = typer.Typer(cls=_PlanGroup, help="Plan a deployment on paper; measure this CPU.")
app.add_typer(group, name="plan")


@command(
    _DEFAULT, "plan --quant w4a8 --nodes 4 --slo tpot=50ms,ttft=2s", "plan work/glm5-w4a8 --html plan.html",
    json=True, group=group,
)  # fmt: skip
def run(options: PlanReportOptions, output: Output) -> int:
    """Plan a deployment on paper: memory, layout, latency and throughput, with their uncertainty.

    `plan measure` is a command of its own, with --help.
    """
    from glm5_ascend.deploy.planning.commands import with_commands
    from glm5_ascend.plan.api import plan
    from glm5_ascend.plan.report import document, show
    from glm5_ascend.report import page
    from glm5_ascend.report.header import make_header
    from glm5_ascend.report.terminal import text_console

    report = with_commands(plan(options))
    if options.html is not None:
        page.write(Path(options.html), document(report, make_header()))
    if output.json:
        print(json.dumps(report.to_dict()))
    else:
        show(report, text_console())
    return 0


@command("measure", "plan measure work/glm5-w4a8", group=group)
def measure(options: MeasureOptions, output: Output) -> int:
    """Describe this machine's CPU for `plan --hardware cpu`: serves a model here for some minutes."""
    from glm5_ascend.plan.hardware import measured_file
    from glm5_ascend.serve.environment import require_cpu_environment

    target = measured_file() if options.out is None else Path(options.out)
    if options.out is not None and target.exists():
        raise OutputError(f"{target} exists already", "name another file, or remove it")
    require_cpu_environment()
    from glm5_ascend.deploy.planning.measure import measure, write

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
    name = "cpu" if options.out is None else target
    shown = options.directory or "DIR"  # the demo model is gone with its folder
    load = "--mtp 0 --workload in=1024,out=64,concurrency=8"
    print(f"wrote {target}; use it: glm5-ascend plan {shown} --hardware {name} {load}")
    return 0
