"""Where a report says it comes from."""

from __future__ import annotations

import shlex

from glm5_ascend.cli import run
from glm5_ascend.report.origin import COMMAND, command_line, machine, versions, without_login


def test_it_states_command_versions_and_machine() -> None:
    token = COMMAND.set(("eval", "a dir", "--url", "http://me:pw@host"))
    try:
        assert shlex.split(command_line()) == ["glm5-ascend", "eval", "a dir", "--url", "http://***@host"]
    finally:
        COMMAND.reset(token)
    assert {"glm5-ascend", "Python", "torch"} <= set(versions()) and "GB of memory" in machine()


def test_a_command_that_ended_is_not_named() -> None:
    assert run(["plan", "--nodes", "0"]) == 2
    assert COMMAND.get() is None


def test_logins_are_masked() -> None:
    assert without_login("http://me:pw@host:8000/v1") == "http://***@host:8000/v1"
    assert without_login("http://host/a@b") == "http://host/a@b"
