"""`glm5-ascend deploy list` and `glm5-ascend deploy render`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import glm5_ascend.cli.deploy_fleet as deploy_fleet
from glm5_ascend.cli.help import command
from glm5_ascend.deploy.target import RenderTarget

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Deploy profiles: list them, write them as files.", no_args_is_help=True)
    command(group, "list", list_profiles, "deploy list", "deploy list --json")
    command(
        group, "render", render,
        "deploy render --profile a3-single-w4a8 --to shell",
        "deploy render --profile a3-2node --to k8s --out pods",
    )  # fmt: skip
    deploy_fleet.register(group)
    app.add_typer(group, name="deploy")


def list_profiles(as_json: AsJson = False) -> int:
    """Show every profile: machine, version, and which switches of the GLM-5 report are on."""
    from glm5_ascend.deploy.profiles.listing import listed_profiles, to_dict
    from glm5_ascend.report.terminal import show

    profiles = listed_profiles()
    if as_json:
        print(json.dumps(to_dict(profiles)))
        return 0
    show([each.name, f"{each.title}\n{each.line}; on: {', '.join(each.on)}"] for each in profiles)
    return 0


def render(
    profile: Annotated[str, typer.Option(metavar="NAME", help="Deploy profile; `deploy list` shows them.")],
    to: Annotated[RenderTarget, typer.Option(metavar="TARGET", help="shell, compose, k8s, kustomize or systemd.")],
    model: Annotated[
        str, typer.Option(metavar="PATH", help="Path of the checkpoint on the machines.")
    ] = "/models/glm5",
    out: Annotated[Path | None, typer.Option(show_default="NAME-TARGET", help="Folder for the files.")] = None,
    values: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML of the cluster's own, for k8s and kustomize."),
    ] = None,
    api_key_secret: Annotated[
        str | None, typer.Option(metavar="NAME", help="Secret with the API key, below `key` (k8s, kustomize).")
    ] = None,
    nic: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Interface between machines, else found by the route (k8s, kustomize)."),
    ] = None,
    open: Annotated[
        bool,
        typer.Option("--open", help="Start without an API key: anyone may ask (k8s, kustomize)."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Write a profile as scripts, containers, Kubernetes objects or units."""
    from glm5_ascend.deploy import render as rendered

    written = rendered(
        profile, to, model=model, out=out, values=values, api_key_secret=api_key_secret, nic=nic, open=open
    )
    if as_json:
        print(json.dumps(written.to_dict()))
        return 0
    for path in written.files:
        print(path)
    return 0
