"""`glm5-ascend chat` against the real server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.serve.support.chat import API_KEY
from tests.support.command import assert_one_clear_line, environment, in_process, ran

pytestmark = pytest.mark.server


def talk(server: str, *lines: str) -> subprocess.CompletedProcess[str]:
    """A conversation typed into `chat`; the demo model answers greedily."""
    typed = "".join(f"{line}\n" for line in lines)
    return ran(
        sys.executable, "-m", "glm5_ascend", "chat", server, input=typed, env=environment(OPENAI_API_KEY=API_KEY)
    )


def test_questions_and_thinking(server: str) -> None:
    done = talk(server, "What is 47 + 38?", "/think off", "Who are you?", "/quit", "never")
    assert done.returncode == 0, done.stderr
    assert "7 + 8 = 15, 4 + 3 + 1 = 8." in done.stdout  # thought aloud
    assert "47 + 38 = 85." in done.stdout
    assert "I am a small GLM-5 made to test glm5-ascend." in done.stdout and "never" not in done.stdout


@pytest.mark.parametrize(
    ("target", "code", "word"),
    [("http://127.0.0.1:1", 3, "no answer"), ("nowhere", 2, "not a URL")],
)
def test_what_cannot_be_talked_to(target: str, code: int, word: str) -> None:
    assert_one_clear_line(in_process("chat", target), code, word)


def test_a_missing_key_is_named(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert_one_clear_line(in_process("chat", server), 1, "API key")
