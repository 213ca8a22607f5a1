"""`glm5-ascend chat` and the chat page, against the real server."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request

import pytest

from tests.serve.support.chat import API_KEY
from tests.support.command import TIMEOUT_S, assert_one_clear_line, environment, in_process
from tests.support.programs import debian_program

pytestmark = pytest.mark.server


def talk(server: str, *lines: str) -> subprocess.CompletedProcess[str]:
    """A conversation typed into `chat`; the demo model answers greedily."""
    command = [sys.executable, "-m", "glm5_ascend", "chat", server]
    return subprocess.run(
        command, input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, check=False,
        env=environment(OPENAI_API_KEY=API_KEY), timeout=TIMEOUT_S,
    )  # fmt: skip


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


def test_the_page_is_at_the_root(server: str) -> None:
    with urllib.request.urlopen(f"{server}/") as reply:
        text, policy = reply.read().decode(), reply.headers["content-security-policy"]
    assert "<title>glm5-ascend chat</title>" in text
    assert "default-src 'none'" in policy
    assert not re.search(r"(?:src|href)=|https?://", text), "the page loads nothing"


@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_the_page_in_a_browser(server: str, width: int, scheme: str) -> None:
    from playwright.sync_api import expect, sync_playwright

    chromium = debian_program("chromium", "chromium")
    assert chromium is not None, "make test-all needs Debian's chromium: apt-get install chromium"
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        foreign: list[str] = []
        page.on("request", lambda request: foreign.append(request.url) if not request.url.startswith(server) else None)
        page.goto(f"{server}/")
        expect(page.locator("#state")).to_have_text("this server wants an API key", timeout=30_000)
        page.fill("#key", API_KEY)
        page.locator("#key").press("Tab")
        expect(page.locator("#state")).to_have_text(re.compile("^context"), timeout=30_000)
        page.fill("#question", "What is 47 + 38?")
        page.locator("#question").press("Enter")
        expect(page.locator(".answer")).to_be_visible(timeout=120_000)
        expect(page.locator("#state")).to_have_text("ready", timeout=120_000)
        assert page.locator("details summary").inner_text() == "thinking"
        assert not page.locator(".thoughts").is_visible()  # folded
        assert "tokens/s" in page.locator(".figures").inner_text()
        assert "tokens per step" in page.locator(".figures").inner_text()
        assert page.locator("html").evaluate("e => e.scrollWidth <= e.clientWidth")
        browser.close()
    assert foreign == []
