"""`glm5-ascend serve DIR [--profile NAME] [-- vllm flags]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from glm5_ascend.cli.command import Output, command
from glm5_ascend.errors import EXIT_OK, ConfigError, StoppedError
from glm5_ascend.serve.options import ServeOptions


@command(
    "serve", "serve glm5-w4a8", "serve glm5-w4a8 --profile a3-single-w4a8 --dry-run",
    "serve glm5-w4a8 --port 8080 -- --max-num-seqs 4", json="With --dry-run: as one JSON object on stdout.",
)  # fmt: skip
def run(options: ServeOptions, output: Output) -> int:
    """Serve the OpenAI API: on this CPU, or by a deploy profile. Flags after `--` go to the engine and win."""
    from glm5_ascend.deploy.profiles.command import script
    from glm5_ascend.deploy.profiles.load import load
    from glm5_ascend.deploy.server import checked_command, needs_key
    from glm5_ascend.serve.foreground import default_log, run_server

    if not options.dry_run:
        hide_key()
    if output.json and not options.dry_run:
        raise ConfigError("--json prints what --dry-run would start", "add --dry-run")
    command = checked_command(options)
    if options.dry_run:
        output.write(command.to_dict(), [script(load(options.profile), command.masked(), needs_key(command, options))])
        return EXIT_OK
    try:
        run_server(command, None if options.verbose else Path(options.log or default_log(command)))
    except KeyboardInterrupt:
        raise StoppedError("the server has ended") from None
    return EXIT_OK


def hide_key() -> None:
    """Start this process again without the API key on its command line, which `ps` shows everyone while it runs."""
    from glm5_ascend.serve.flags import ServerCommand

    program, *words = sys.orig_argv
    hidden = ServerCommand({}, words).without_key()
    if hidden.env:
        os.execve(sys.executable, [program, *hidden.argv], {**os.environ, **hidden.env})
