"""`glm5-ascend serve DIR [--profile NAME] [-- vllm flags]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.cli.help import command as add_command
from glm5_ascend.errors import EXIT_ENVIRONMENT, EXIT_OK, ConfigError, StoppedError

PROFILE_ONLY = "For --profile with several machines: "


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
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint, quantized or not.")],
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", show_default="127.0.0.1, or the profile's", help="Address to listen on."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, show_default="8000, or the profile's", help="Port to listen on.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Deploy profile; `glm5-ascend deploy list` shows them.")
    ] = None,
    role: Annotated[str | None, typer.Option(help=PROFILE_ONLY + "which role this one has.")] = None,
    node: Annotated[int, typer.Option(min=0, help=PROFILE_ONLY + "its number within the role.")] = 0,
    rank: Annotated[int, typer.Option(min=0, help=PROFILE_ONLY + "which of its servers.")] = 0,
    head: Annotated[str, typer.Option(help=PROFILE_ONLY + "address of the role's node 0.")] = "",
    ip: Annotated[str, typer.Option(help=PROFILE_ONLY + "this machine's address.")] = "",
    nic: Annotated[str, typer.Option(help=PROFILE_ONLY + "its network interface.")] = "",
    skip_verify: Annotated[bool, typer.Option("--skip-verify", help="Do not check a quantized DIR first.")] = False,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default="in your folder for logs", help="Where vLLM's log goes.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show vLLM's log instead.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print environment and command, start nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: as one JSON object on stdout.")] = False,
) -> int:
    """Serve the OpenAI API with vLLM: on this CPU, or by a deploy profile. What follows `--` goes to vLLM, and wins."""
    from glm5_ascend.deploy.profiles.command import ServerPlace
    from glm5_ascend.deploy.refusals import refuse_broken
    from glm5_ascend.deploy.serve_profile import serve_profile, shell_script
    from glm5_ascend.serve.flags import ServerCommand, value_of
    from glm5_ascend.serve.foreground import Foreground, default_log
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
            codes.append(Foreground(file).run(built))
        except KeyboardInterrupt:
            raise StoppedError("the server has ended") from None

    if profile is None:
        checkpoint = check_directory(directory)
        if not skip_verify and not dry_run:
            refuse_broken(checkpoint)
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
