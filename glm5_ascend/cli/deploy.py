"""`glm5-ascend deploy list` and `glm5-ascend deploy render`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.errors import OutputError


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Deploy profiles: list them, write them as files.", no_args_is_help=True)
    group.command("list")(list_profiles)
    group.command("render")(render)
    app.add_typer(group, name="deploy")


def list_profiles() -> int:
    """Show every profile: machine, version, and which switches of the GLM-5 report are on."""
    from glm5_ascend.deploy.profiles.load import load, names

    for profile in map(load, names()):
        on = [key.replace("_", "-") for key, switch in profile.scheduling.items() if switch.on]
        print(f"{profile.name:<21} {profile.title}\n{'':<21} {profile.versions}; on: {', '.join(on)}")
    return 0


def render(
    profile: Annotated[str, typer.Option(metavar="NAME", help="Deploy profile; `deploy list` shows them.")],
    to: Annotated[str, typer.Option(metavar="TARGET", help="shell, compose, k8s or systemd.")],
    model: Annotated[str, typer.Option(help="Path of the checkpoint on the machines.")] = "/models/glm5",
    out: Annotated[Path | None, typer.Option(help="Folder for the files. [NAME-TARGET]")] = None,
) -> int:
    """Write a profile as scripts, containers, Kubernetes objects or units."""
    from glm5_ascend.deploy.profiles.load import load
    from glm5_ascend.deploy.render import render as rendered

    files = rendered(load(profile), to, model)
    folder = out or Path(f"{profile}-{to}")
    if (folder.is_dir() and any(folder.iterdir())) or folder.is_file():
        raise OutputError(f"{folder}: exists and is not empty", "name another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
        print(path)
    return 0
