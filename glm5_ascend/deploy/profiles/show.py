"""A command as lines of a shell script."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.engine_lines import VLLM_ASCEND_LINES
from glm5_ascend.serve.flags import ServerCommand

BREAK = " \\"


def heading(profile: Profile) -> list[str]:
    """Title, status and source of the profile as comments."""
    return [
        f"# {profile.name}: {profile.title}",
        f"# for {profile.line.name}; {profile.status}",
        f"# source: {profile.source}",
        *(f"# on {VLLM_ASCEND_LINES[-1].name}: {line}" for line in profile.on_next),
    ]


def exports(env: Mapping[str, str], quote: Callable[[str], str] = shlex.quote) -> list[str]:
    return [f"export {name}={quote(value)}" for name, value in env.items()]


def call(argv: list[str], quote: Callable[[str], str] = shlex.quote, end: str = "") -> list[str]:
    """One flag per line, joined by backslashes."""
    groups: list[list[str]] = []
    for position, arg in enumerate(argv):
        if position == 0 or arg.startswith("--"):
            groups.append([])
        groups[-1].append(quote(arg))
    lines = [" ".join(group) for group in groups]
    if end:
        lines.append(end)
    return [("  " if i else "") + line + (BREAK if i < len(lines) - 1 else "") for i, line in enumerate(lines)]


def script(profile: Profile, command: ServerCommand) -> str:
    return "\n".join([*heading(profile), *exports(command.env), *call(command.argv)])
