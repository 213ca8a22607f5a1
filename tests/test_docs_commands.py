"""Every command the documents show exists, with the flags they show."""

from __future__ import annotations

import re
import shlex

import pytest
import typer

from glm5_ascend.cli import app
from tests.support.command import ROOT

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "quant_recipes/README.md", "deploy/README.md"]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def shown() -> list[tuple[str, str]]:
    """(document, command line) of every indented or back-quoted glm5-ascend or make command."""
    found = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        lines = re.findall(r"^    (.*)$", text, re.MULTILINE) + re.findall(r"`([^`]+)`", text)
        for line in lines:
            line = line.split("  #")[0].strip()
            if re.match(r"(?:[A-Z0-9_]+=\S+ )?(glm5-ascend|make) \S", line):
                found.append((name, line))
    return found


@pytest.mark.parametrize(("document", "line"), shown())
def test_command_exists(document: str, line: str) -> None:
    program, *words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z0-9_]+=", word)]
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words if "=" not in word and word != "..."} <= targets
        return
    command = COMMANDS[words[0]]
    if words[0] == "deploy":  # the one group of commands
        command, words = command.commands[words[1]], words[1:]
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    flags = {word.split("=")[0] for word in words[: words.index("--") if "--" in words else None] if word[:2] == "--"}
    assert flags <= known | {"--help"}


def test_the_documents_show_the_contract() -> None:
    commands = {line.split()[1] for _, line in shown() if line.startswith("glm5-ascend")}
    assert {"demo-model", "quantize", "verify", "serve", "doctor", "smoke", "deploy"} <= commands
    assert {"make demo", "make test"} <= {line for _, line in shown()}
