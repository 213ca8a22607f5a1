"""`glm5-ascend deploy list` and `deploy render`."""

from __future__ import annotations

import json
from typing import Any

import typer

from glm5_ascend.cli.command import NoOptions, Output, app, command
from glm5_ascend.deploy.options import RenderOptions
from glm5_ascend.errors import EXIT_OK, json_frame

group = typer.Typer(help="Deploy profiles: list them, write them as files.", no_args_is_help=True)
app.add_typer(group, name="deploy")


@command("list", "deploy list", "deploy list --json", json=True, group=group)
def list_profiles(options: NoOptions, output: Output) -> int:
    """List every profile: machine, version, and the switches of the GLM-5 report that it sets."""
    from glm5_ascend.deploy.profiles.load import load, names
    from glm5_ascend.report.terminal import show

    profiles: list[dict[str, Any]] = [
        {
            "name": profile.name, "title": profile.title, "platform": profile.platform, "line": profile.line.name,
            "status": profile.status, "roles": list(profile.roles),
            "on": [key.replace("_", "-") for key, switch in profile.scheduling.items() if switch.on],
        }
        for profile in map(load, names())
    ]  # fmt: skip
    if output.json:
        print(json.dumps(json_frame("deploy list") | {"profiles": profiles}))
    else:
        show([item["name"], f"{item['title']}\n{item['line']}; on: {', '.join(item['on'])}"] for item in profiles)
    return EXIT_OK


@command(
    "render",
    "deploy render --profile a3-single-w4a8 --to shell",
    "deploy render --profile a3-2node --to k8s --out pods",
    json=True,
    group=group,
)
def render_profile(options: RenderOptions, output: Output) -> int:
    """Write a profile as scripts, containers or Kubernetes objects."""
    from glm5_ascend.deploy import render

    rendered = render(options)
    output.write(rendered.to_dict(), map(str, rendered.files))
    return EXIT_OK
