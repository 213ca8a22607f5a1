"""`glm5-ascend serve DIR [--profile NAME] [-- vllm flags]`."""

from __future__ import annotations

from pathlib import Path

import typer

from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.errors import EXIT_OK, ConfigError, StoppedError
from glm5_ascend.serve.flags import ServerCommand, value_of
from glm5_ascend.serve.options import ServeOptions


def register(app: typer.Typer) -> None:
    add_command(
        app, "serve", run,
        "serve glm5-w4a8",
        "serve glm5-w4a8 --profile cpu --dry-run",
        "serve glm5-w4a8 --port 8080 -- --max-num-seqs 4",
        json="With --dry-run: as one JSON object on stdout.",
    )  # fmt: skip


def run(options: ServeOptions, output: Output) -> int:
    """Serve the OpenAI API with vLLM: on this CPU, or by a deploy profile. Flags after `--` go to vLLM and win."""
    from glm5_ascend.deploy.profiles.command import ServerPlace
    from glm5_ascend.deploy.serve_profile import refuse_broken, serve_profile, shell_script
    from glm5_ascend.serve.foreground import default_log, run_server
    from glm5_ascend.serve.launch import launch
    from glm5_ascend.serve.servable import check_directory

    node = options.role or options.node or options.rank or options.head or options.ip or options.nic
    if options.profile is None and node:
        raise ConfigError("--role, --node, --rank, --head, --ip and --nic belong to a profile", "add --profile NAME")
    if output.json and not options.dry_run:
        raise ConfigError("--json prints what --dry-run would start", "add --dry-run")

    def start(command: ServerCommand) -> None:
        log = None if options.verbose else Path(options.log or default_log(value_of(command.argv, "--port")))
        try:
            run_server(command, log)
        except KeyboardInterrupt:
            raise StoppedError("the server has ended") from None

    if options.profile is None:
        checkpoint = check_directory(Path(options.directory))
        if not options.skip_verify:
            refuse_broken(checkpoint, "vllm")
        command = launch(
            checkpoint,
            options.vllm_args,
            host=options.host,
            port=options.port,
            open_server=options.open,
            dry_run=options.dry_run,
            start=start,
        )
        text = command.shown
    else:
        command = serve_profile(
            options.directory,
            options.profile,
            options.vllm_args,
            role=options.role,
            server=ServerPlace(
                options.node, options.rank, options.head, options.ip, options.nic, options.host, options.port
            ),
            skip_verify=options.skip_verify,
            open_server=options.open,
            dry_run=options.dry_run,
            start=start,
        )
        text = shell_script(options.profile, command)
    if options.dry_run:
        output.write(command.to_dict(), [text])
    return EXIT_OK
