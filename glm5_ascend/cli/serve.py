"""`glm5-ascend serve DIR [--profile NAME] [-- vllm flags]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.errors import ConfigError

PROFILE_ONLY = "For --profile with several machines: "


def register(app: typer.Typer) -> None:
    app.command("serve", context_settings={"allow_extra_args": True})(serve)


def serve(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint, quantized or not.")],
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1, or the profile's).")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port to listen on (8000, or the profile's).")
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print environment and command, start nothing.")] = False,
) -> int:
    """Serve the OpenAI API with vLLM: on this CPU, or by a deploy profile. What follows `--` goes to vLLM, and wins."""
    from glm5_ascend.deploy.serve_profile import refuse_broken, refuse_known_bad
    from glm5_ascend.serve.launch import DEFAULT_HOST, DEFAULT_PORT, check_directory
    from glm5_ascend.serve.launch import serve as run

    if profile is None and (role or node or rank or head or ip or nic):
        raise ConfigError("--role, --node, --rank, --head, --ip and --nic belong to a profile", "add --profile NAME")
    check_directory(directory)
    if not skip_verify and not dry_run:
        refuse_broken(directory)
    extra = list(context.args)
    if profile is None:
        return run(directory, extra, host=host or DEFAULT_HOST, port=port or DEFAULT_PORT, dry_run=dry_run)
    refuse_known_bad(profile, directory, role, extra, skip_verify)
    from glm5_ascend.deploy.profiles.command import Place
    from glm5_ascend.deploy.serve_profile import serve_profile

    place = Place(node=node, rank=rank, head=head, ip=ip, nic=nic)
    return serve_profile(directory, profile, extra, role=role, place=place, host=host, port=port, dry_run=dry_run)
