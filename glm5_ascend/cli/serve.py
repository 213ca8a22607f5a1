"""`glm5-ascend serve DIR [--profile NAME] [-- vllm flags]`."""

from __future__ import annotations

import json

import typer

import glm5_ascend.cli.serve_options as options
from glm5_ascend.cli.help import command as add_command
from glm5_ascend.errors import EXIT_ENVIRONMENT, EXIT_OK, ConfigError, StoppedError


def register(app: typer.Typer) -> None:
    add_command(
        app, "serve", serve,
        "serve glm5-w4a8",
        "serve glm5-w4a8 --profile cpu --dry-run",
        "serve glm5-w4a8 --port 8080 -- --max-num-seqs 4",
        extra_args=True,
    )  # fmt: skip


def serve(
    context: typer.Context,
    directory: options.Directory,
    host: options.Host = None,
    port: options.Port = None,
    profile: options.Profile = None,
    role: options.Role = None,
    node: options.Node = 0,
    rank: options.Rank = 0,
    head: options.Head = "",
    ip: options.Ip = "",
    nic: options.Nic = "",
    skip_verify: options.SkipVerify = False,
    log: options.Log = None,
    verbose: options.Verbose = False,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
) -> int:
    """Serve the OpenAI API with vLLM: on this CPU, or by a deploy profile. What follows `--` goes to vLLM, and wins."""
    from glm5_ascend.deploy.profiles.command import ServerPlace
    from glm5_ascend.deploy.refusals import refuse_broken
    from glm5_ascend.deploy.serve_profile import serve_profile, shell_script
    from glm5_ascend.serve.flags import ServerCommand, value_of
    from glm5_ascend.serve.foreground import default_log, run_server
    from glm5_ascend.serve.launch import launch
    from glm5_ascend.serve.servable import check_directory

    if profile is None and (role or node or rank or head or ip or nic):
        raise ConfigError("--role, --node, --rank, --head, --ip and --nic belong to a profile", "add --profile NAME")
    if as_json and not dry_run:
        raise ConfigError("--json prints what --dry-run would start", "add --dry-run")
    codes: list[int] = []

    def start(built: ServerCommand) -> None:
        file = None if verbose else log or default_log(value_of(built.argv, "--port"))
        try:
            codes.append(run_server(built, file))
        except KeyboardInterrupt:
            raise StoppedError("the server has ended") from None

    if profile is None:
        checkpoint = check_directory(directory)
        if not skip_verify and not dry_run:
            refuse_broken(checkpoint, "vllm")
        command = launch(checkpoint, context.args, host=host, port=port, dry_run=dry_run, start=start)
        text = command.shown
    else:
        place = ServerPlace(node, rank, head, ip, nic, host, port)
        command = serve_profile(
            directory,
            profile,
            context.args,
            role=role,
            place=place,
            skip_verify=skip_verify,
            dry_run=dry_run,
            start=start,
        )
        text = shell_script(profile, command)
    if codes:
        return EXIT_OK if codes == [0] else EXIT_ENVIRONMENT
    print(json.dumps(command.to_dict()) if as_json else text)
    return EXIT_OK
