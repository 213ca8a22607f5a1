"""A server of the chat API with canned answers, for checks that need no model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from glm5_ascend.serve.smoke import CANARIES
from tests.support.listening import listening

COUNTERS = (
    'vllm:spec_decode_num_drafts_total{{engine="0"}} {}\nvllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {}\n'
)


def healthy(body: dict[str, Any]) -> dict[str, Any]:
    """The message that a good server answers to a question of `smoke` or `watch`."""
    question = body["messages"][-1]["content"]
    if "tools" not in body:
        return {"content": f"The answer: {CANARIES.get(question, question)}"}
    arguments = json.dumps({"city": question.rstrip("?").rpartition(" ")[2]})
    return {"content": "", "tool_calls": [{"id": "a", "function": {"name": "get_weather", "arguments": arguments}}]}


@contextmanager
def stub_server(
    content: str | None = None, metrics: str = "", thought: int = 0, thinking: str = "Let me add these. "
) -> Iterator[str]:
    """The URL of a server that answers as `healthy` does, or always with `content`, as broken weights do.

    Args:
        thought: tokens of a thought before each answer, which an answer of fewer tokens does not end, as GLM-5.3's.
        thinking: text of that thought.
        metrics: answer of GET /metrics; "": counts of drafts, which grow with every answer.
    """
    answered = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer((metrics or COUNTERS.format(40 * answered, 80 * answered)).encode())
            else:
                self.answer({"data": [{"id": "glm-5", "max_model_len": 4096}]} if "models" in self.path else {})

        def do_POST(self) -> None:
            nonlocal answered
            answered += 1
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "messages" not in body:
                entries = [{str(token): {"logprob": -0.5}} for token in body["prompt"][1:]]
                self.answer({"choices": [{"text": "", "prompt_logprobs": [None, *entries]}]})
                return
            message = healthy(body) if content is None else {"content": content}
            finish = "tool_calls" if message.get("tool_calls") else "stop"
            if body.get("max_tokens", 0) < thought:
                message, finish = {"content": "", "reasoning": thinking}, "length"
            choice = {"message": message, "finish_reason": finish, "token_ids": list(range(8))}
            usage = {"prompt_tokens": 9, "completion_tokens": 9}
            self.answer({"choices": [choice], "usage": usage, "prompt_token_ids": [1, 2, 3]})

        def answer(self, value: dict[str, Any] | bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(value if isinstance(value, bytes) else json.dumps(value).encode())

    with listening(Handler) as url:
        yield url
