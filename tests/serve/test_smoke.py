"""`glm5-ascend smoke` against the real server, and against stubs."""

from __future__ import annotations

import json

import pytest

from glm5_ascend.serve.asking import degenerate, unfinished_thought
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.smoke import acceptance, canary
from glm5_ascend.serve.watching.canaries import ask_salted
from tests.serve.support.chat import API_KEY
from tests.serve.support.stub import stub_server
from tests.support.command import in_process

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)


def test_a_good_server_passes(server: str) -> None:
    """`server` is the trained model in W4A8 with MTP."""
    done = in_process("smoke", server, "--json")
    report = json.loads(done.stdout)
    checks = {line["check"]: line for line in report["checks"]}
    assert (done.returncode, report["ok"]) == (0, True), done.stdout
    for check in (
        "canary answers", "tool call", "thinking", "streaming",
        "own answers", "CJK text", "tools and JSON", "same again",
    ):  # fmt: skip
        assert checks[check]["status"] == "ok", checks[check]
    assert checks["canary answers"]["values"] == {"right": 3, "asked": 3}
    assert checks["long prompt"]["status"] in ("ok", "warning")
    assert checks["long prompt"]["values"]["prompt_tokens"] >= 1024
    assert checks["MTP acceptance"]["values"]["tokens_per_step"] > 1


@pytest.mark.parametrize(("length", "status"), [(3.16, "ok"), (1.2, "warning")])
def test_acceptance_of_sglang(length: float, status: str) -> None:
    """A line of SGLang's observability/metrics_collector.py: the mean of its last steps."""
    labels = 'engine_type="unified",model_name="glm-5",pp_rank="0",tp_rank="0"'
    with stub_server(metrics=f"sglang:spec_accept_length{{{labels}}} {length}\n") as url:
        result = acceptance(Client(url), {})
    assert (result.status, result.values) == (status, {"tokens_per_step": length})


def test_garbage_fails_every_check() -> None:
    with stub_server("!" * 200) as url:
        done = in_process("smoke", url, "--json")
        lines = in_process("smoke", url).stdout.splitlines()
    assert lines[0].startswith("canary answers") and len(lines) == 11
    assert lines[4].split()[2] == "failed" and lines[10].startswith("failed: ")
    assert done.returncode == 1
    checks = {line["check"]: line for line in json.loads(done.stdout)["checks"]}
    failed = {name for name, line in checks.items() if line["status"] == "failed"}
    assert failed == set(checks) - {"CJK text", "MTP acceptance"}
    assert "degenerate" in checks["canary answers"]["detail"]


@pytest.mark.parametrize(
    ("template", "skipped"),
    [
        ("", {"thinking", "tool call", "tools and JSON"}),
        ("tools", {"thinking"}),
        ("thinking", {"tool call", "tools and JSON"}),
        ("thinking and tools", set()),
    ],
)
def test_what_a_template_cannot_do_is_not_checked(template: str, skipped: set[str]) -> None:
    """The server answers every question in words; what its template can do, it should have done."""
    with stub_server("The answer: 85, 81, 71", template=template) as url:
        checks = {line["check"]: line for line in json.loads(in_process("smoke", url, "--json").stdout)["checks"]}
    asked = {"thinking", "tool call", "tools and JSON"}
    assert {name for name in asked if checks[name]["status"] == "skipped"} == skipped
    assert all(checks[name]["status"] == "failed" for name in asked - skipped)
    assert all("the chat template has no " in checks[name]["detail"] for name in skipped)


@pytest.mark.parametrize(
    ("text", "is_it"),
    [("", True), ("!!!!!!!!!!!!!!!!", True), ("the " * 20, True), ("47 + 38 = 85.", False), ("1, 2, 3, 4, 5", False)],
)
def test_degenerate_texts(text: str, is_it: bool) -> None:
    assert degenerate(text) is is_it


@pytest.mark.parametrize(
    ("thought", "thinking", "status"),
    [
        (0, "", "ok"),
        (1000, "Let me add these. ", "ok"),  # ends within the second answer's tokens
        (10**6, "Let me add these. ", "warning"),
        (10**6, "!" * 200, "failed"),
    ],
)
def test_a_thought_that_fills_the_answer_is_not_garbage(thought: int, thinking: str, status: str) -> None:
    """GLM-5.3's template always thinks: 256 tokens end inside of the thought (vllm #56994, #54744)."""
    with stub_server(thought=thought, thinking=thinking) as url:
        result = canary(Client(url))
    assert result.status == status, result


@pytest.mark.parametrize("thought", [1000, 10**6])
def test_watch_does_not_take_a_thought_for_an_empty_answer(thought: int) -> None:
    with stub_server(thought=thought) as url:
        answer = ask_salted(Client(url), "What is 47 + 38?")
    assert bool(answer.content) is (thought == 1000) and bool(unfinished_thought(answer)) is (thought > 1000)
