"""`glm5-ascend accept DIR --profile NAME`: the acceptance test of a machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from glm5_ascend.cli.command import Output, command
from glm5_ascend.deploy.options import AcceptOptions
from glm5_ascend.errors import printable

if TYPE_CHECKING:
    from glm5_ascend.deploy.acceptance.steps import StepResult


@command(
    "accept", "accept glm5-w4a8 --profile a3-single-w4a8 --against GLM-5",
    "accept glm5-w4a8 --profile cpu --minutes 1", json=True,
)  # fmt: skip
def run(options: AcceptOptions, output: Output) -> int:
    """Accept a machine: doctor, parity, serve, smoke, eval, load test against the plan, watch.

    Where the profile's NPUs are missing, only doctor and plan run. OPENAI_API_KEY is the server's API key, if it needs
    one.
    """
    from glm5_ascend.deploy.acceptance.run import accept

    show = (lambda result: None) if output.json else _show
    path, report = accept(options, os.environ.get("OPENAI_API_KEY", ""), show)
    output.write(report, [printable(report["verdict"]), printable(f"wrote {path}")])
    return int(report["exit_code"])


def _show(result: StepResult) -> None:
    print(printable(f"{result.name:<9} {result.status:<8} {result.seconds:>7.1f} s  {result.verdict}"), flush=True)
