"""deploy/GPUSTACK.md: its parameters and variables are those of the profile."""

from __future__ import annotations

import re

from glm5_ascend.deploy.profiles.command import open_command
from glm5_ascend.deploy.profiles.load import load
from tests.support.command import ROOT


def test_parameters_are_those_of_the_profile() -> None:
    page = (ROOT / "deploy/GPUSTACK.md").read_text()
    parameters, variables = (set(block.splitlines()) for block in re.findall(r"```text\n(.*?)\n```", page, re.DOTALL))
    profile = load("a3-single-w4a8")
    command = open_command(profile.role(None), "MODEL", [])
    words = " ".join(command.argv[3:]).split(" --")
    flags = {"--" + flag.removeprefix("--").replace(" ", "=", 1) for flag in words}
    ours = {"--host", "--port", "--served-model-name", "--shutdown-timeout"}
    assert parameters == {flag for flag in flags if flag.split("=")[0] not in ours}
    assert variables == {f"{name}={value}" for name, value in command.env.items()}
    assert f"`{profile.line.image('a3')}`" in page and f"`{profile.line.tags['a2']}`" in page
