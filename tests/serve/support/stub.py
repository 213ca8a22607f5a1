"""A server of the chat API with canned answers, for checks that need no model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from glm5_ascend.serve.asking import CANARIES
from tests.support.listening import listening

COUNTERS = (
    'vllm:spec_decode_num_drafts_total{{engine="0"}} {}\nvllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {}\n'
)


def healthy(body: dict[str, Any]) -> dict[str, Any]:
    """The message that a good server answers to a question of `smoke` or `watch`."""
    question = body["messages"][-1]["content"]
    if "tools" in body and "weather" in question:
        arguments = json.dumps({"city": question.rstrip("?").rpartition(" ")[2]})
        call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        return {"content": "", "tool_calls": [call]}
    if own := re.search(r"Boris (\d+)", question):
        question = f"Boris {own[1]}."
    thinks = body.get("chat_template_kwargs", {}).get("enable_thinking", True)
    return {"content": f"The answer: {CANARIES.get(question, question)}", "reasoning": "Let me see." * thinks}


def wrong_sums(body: dict[str, Any]) -> dict[str, Any]:
    """A sum of the question's numbers, ten too small."""
    message, question = healthy(body), body["messages"][-1]["content"]
    if question in CANARIES:
        message["content"] = f"{question[8:-1]} = {int(CANARIES[question]) - 10}."
    return message


def pieces(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The deltas of a stream with this message."""
    for index, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        yield {"tool_calls": [call | {"index": index, "function": call["function"] | {"arguments": arguments[:3]}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[3:]}}]}
    yield {"reasoning": message.get("reasoning")}
    for start in range(0, len(message["content"]), 5):
        yield {"content": message["content"][start : start + 5]}


@contextmanager
def stub_server(
    content: str | None = None, metrics: str = "", thought: int = 0, thinking: str = "Let me add these. ",
    template: str = "thinking and tools", respond: Callable[[dict[str, Any]], dict[str, Any]] = healthy,
    largest_id: int = 255,
) -> Iterator[str]:  # fmt: skip
    """The URL of a server that answers as `healthy` does, or always with `content`, as broken weights do.

    Args:
        thought: tokens of a thought before each answer, which an answer of fewer tokens does not end, as GLM-5.3's.
        thinking: text of that thought.
        template: what its chat template writes into a prompt if it is asked for.
        largest_id: of its tokenizer, which every prompt begins with.
        respond: gives the message of an answer to a request; a `finish_reason` in it is the answer's.
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
            message = respond(body) if content is None else {"content": content}
            finish = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
            if body.get("max_tokens", 0) < thought:
                message, finish = {"content": "", "reasoning": thinking}, "length"
            choice = {"message": message, "finish_reason": finish, "token_ids": list(range(8))}
            options = [("thinking", "chat_template_kwargs"), ("tools", "tools")]
            written = [body.get(key) for word, key in options if word in template]
            prompt = json.dumps([body["messages"], written])
            usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": 9}
            if body.get("stream"):
                choices = [{"delta": delta} for delta in pieces(message)] + [{"delta": {}, "finish_reason": finish}]
                events = [{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": usage}]
                lines = [f"data: {json.dumps(event)}" for event in events] + ["data: [DONE]"]
                self.answer("".join(f"{line}\n\n" for line in lines).encode())
                return
            self.answer({"choices": [choice], "usage": usage, "prompt_token_ids": [largest_id, *prompt.encode()]})

        def answer(self, value: dict[str, Any] | bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(value if isinstance(value, bytes) else json.dumps(value).encode())

    with listening(Handler) as url:
        yield url
