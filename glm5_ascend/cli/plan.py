"""`glm5-ascend plan`."""

from __future__ import annotations

import json
from pathlib import Path

from glm5_ascend.cli.command import Output, command
from glm5_ascend.plan.options import PlanReportOptions


@command(
    "plan", "plan --quant w4a8 --nodes 4 --slo tpot=50ms,ttft=2s", "plan work/glm5-w4a8 --html plan.html", json=True
)
def run(options: PlanReportOptions, output: Output) -> int:
    """Plan a deployment on paper: memory, layout, latency and throughput, with their uncertainty."""
    from glm5_ascend.deploy.planning.commands import with_commands
    from glm5_ascend.plan.api import plan
    from glm5_ascend.plan.report import document, show
    from glm5_ascend.report import page
    from glm5_ascend.report.terminal import text_console

    report = with_commands(plan(options))
    if options.html is not None:
        page.write(Path(options.html), document(report))
    if output.json:
        print(json.dumps(report.to_dict()))
    else:
        show(report, text_console())
    return 0
