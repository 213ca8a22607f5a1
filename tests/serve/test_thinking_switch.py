"""Z.ai's `thinking: {"type": "disabled"}` reaches the chat template; other requests pass byte by byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from glm5_ascend.serve.middleware import ThinkingSwitch

OFF = {"thinking": {"type": "disabled"}}


def received(body: bytes, path: str = "/v1/chat/completions", cut: int = 7, gone: bool = False) -> Any:
    """What the application behind the middleware receives; `gone`: the client leaves in the middle."""
    pieces = [body[i : i + cut] for i in range(0, len(body), cut)]
    messages = [
        {"type": "http.request", "body": piece, "more_body": i + 1 < len(pieces)} for i, piece in enumerate(pieces)
    ]
    if gone:
        messages = [messages[0], {"type": "http.disconnect"}]
    seen: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        while not seen or seen[-1].get("more_body"):
            seen.append(await receive())

    asyncio.run(ThinkingSwitch(app)({"type": "http", "method": "POST", "path": path}, receive, None))
    return seen[-1] if gone else b"".join(message["body"] for message in seen)


@pytest.mark.parametrize(
    ("request_body", "switches"),
    [
        (OFF, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "enabled", "clear_thinking": False}},
         {"enable_thinking": True, "clear_thinking": False}),
        (OFF | {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        (OFF | {"chat_template_kwargs": {"reasoning_effort": "high"}},
         {"enable_thinking": False, "reasoning_effort": "high"}),
        (OFF | {"chat_template_kwargs": None}, {"enable_thinking": False}),
    ],
)  # fmt: skip
def test_the_switch_is_translated(request_body: dict[str, Any], switches: dict[str, Any]) -> None:
    sent = {"model": "glm-5", "messages": [{"role": "user", "content": "é"}]}
    assert json.loads(received(json.dumps(sent | request_body).encode())) == sent | {"chat_template_kwargs": switches}


@pytest.mark.parametrize(
    "body",
    [b'{"model": "glm-5"}', b'{"thinking": true}', b'{"thinking": {"type": "auto"}}', b'{"thinking"', b'["thinking"]',
     b'{"messages": [{"content": "\\"thinking\\""}]}',
     b'{"chat_template_kwargs": 7, "thinking": {"type": "disabled"}}'],
)  # fmt: skip
def test_other_requests_pass_unchanged(body: bytes) -> None:
    assert received(body) == body


def test_other_routes_are_not_read() -> None:
    body = json.dumps(OFF).encode()
    assert received(body, path="/v1/messages") == body


def test_a_client_that_leaves() -> None:
    assert received(json.dumps(OFF).encode(), gone=True) == {"type": "http.disconnect"}
