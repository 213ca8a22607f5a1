"""`glm5-ascend rehearse CHECKPOINT --profile NAME`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.deploy.options import RehearseOptions


def register(app: typer.Typer) -> None:
    add_command(
        app, "rehearse", run,
        "rehearse --prepare env",
        "rehearse glm5-w4a8 --profile a3-pd --ranks all",
        json="Report as one JSON object on stdout.",
    )  # fmt: skip


def run(options: RehearseOptions, output: Output) -> int:
    """Build, load, weigh and run a deployment's ranks with vllm-ascend's own code: no NPU, no weights, a minute each.

    GLM5_REHEARSAL names the environment that --prepare made. What follows `--` goes to vLLM, after the profile's flags.
    Operators are called for shapes only.
    """
    if options.prepare is not None:
        from glm5_ascend.deploy.rehearsal.environment import prepare

        environment = prepare(Path(options.prepare), _say, options.line)
        print(f"{environment.folder}: ready; export GLM5_REHEARSAL={environment.folder}")
        return 0
    from glm5_ascend.cli.rehearse_shown import page, show
    from glm5_ascend.deploy.rehearsal.api import rehearse
    from glm5_ascend.report.page import check_path, write

    if options.html is not None:
        check_path(Path(options.html))
    rehearsal = rehearse(options, _say)
    if options.html is not None:
        write(Path(options.html), page(rehearsal))
    if output.json:
        print(json.dumps(rehearsal.to_dict()))
    else:
        show(rehearsal)
    return rehearsal.exit_code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
