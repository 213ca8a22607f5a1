"""Every command's help: examples that can be typed, every option described; and what a wrong line gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer

from glm5_ascend.cli import app, run
from tests.support.command import glm5_ascend

ROOT: Any = typer.main.get_command(app)


def commands(group: Any = ROOT, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for name, command in group.commands.items():
        inner = (*path, name)
        found += commands(command, inner) if hasattr(command, "commands") else [(inner, command)]
    return found


COMMANDS = commands()


def examples(command: Any) -> list[str]:
    return [line.strip() for line in (command.epilog or "").split("\n\n")[1:]]


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_examples_can_be_typed(path: tuple[str, ...], command: Any) -> None:
    assert examples(command), "no example"
    for example in examples(command):
        program, *words = example.split()
        assert program == "glm5-ascend" and tuple(words[: len(path)]) == path, example
        context = ROOT.make_context("glm5-ascend", list(path))
        command.make_context(" ".join(path), words[len(path) :], parent=context)  # a wrong option raises
    assert not [param.name for param in command.params if not param.help]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["-V"]) == 0
    short = capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == short and short.startswith("glm5-ascend ")


def test_a_shell_completes_the_value_of_a_choice() -> None:
    done = glm5_ascend(
        _GLM5_ASCEND_COMPLETE="complete_bash", COMP_WORDS="glm5-ascend deploy render --to ", COMP_CWORD="4"
    )
    assert done.stdout.split() == ["shell", "compose", "k8s", "kustomize"]


WRONG = [
    (["quantize", "--foo"], "No such option: --foo", "glm5-ascend quantize --help"),
    (["quantise"], "Did you mean 'quantize'", "glm5-ascend --help"),
    (["deploy", "render", "--to", "k9s", "--profile", "a3-2node"], "k9s", "glm5-ascend deploy render --help"),
    (["verify"], "DIR", "glm5-ascend verify --help"),
    (["quantize", "a", "b", "--samples", "none"], "--samples", "glm5-ascend quantize --help"),
]


@pytest.mark.parametrize(("arguments", "said", "fix"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_a_wrong_line_is_answered_in_two_lines_and_as_json(
    arguments: list[str], said: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--json"]) == 2
    shown = capsys.readouterr()
    error, tip = shown.err.splitlines()
    assert error.startswith("error: ") and said in error
    assert tip == f"  fix: {fix}"
    answer = json.loads(shown.out)
    assert answer["exit_code"] == 2 and not answer["ok"] and said in answer["error"]["message"]
    assert run(arguments) == 2
    assert capsys.readouterr().out == ""
