"""`glm5-ascend rehearse CHECKPOINT --profile NAME`."""

from __future__ import annotations

import sys
from pathlib import Path

from glm5_ascend.cli.command import Output, command
from glm5_ascend.deploy.options import RehearseOptions
from glm5_ascend.errors import printable


@command("rehearse", "rehearse --prepare env", "rehearse glm5-w4a8 --profile a3-pd --ranks all", json=True)
def run(options: RehearseOptions, output: Output) -> int:
    """Build, load and weigh a deployment's ranks with vllm-ascend's own code: no NPU, no weights, a minute each.

    GLM5_REHEARSAL names the environment that --prepare made. What follows `--` goes to vLLM, after the profile's flags.
    """
    if options.prepare is not None:
        from glm5_ascend.deploy.rehearsal.environment import prepare

        environment = prepare(Path(options.prepare), _say, options.line)
        print(f"{environment.folder}: ready; export GLM5_REHEARSAL={environment.folder}")
        return 0
    from glm5_ascend.deploy.rehearsal.run import rehearse

    rehearsal = rehearse(options, _say)
    output.write(rehearsal.to_dict(), map(printable, rehearsal.lines()))
    return rehearsal.exit_code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
