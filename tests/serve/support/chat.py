"""What the HTTP tests ask the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from glm5_ascend.serve.asking import NO_THINKING as NO_THINKING
from glm5_ascend.serve.asking import WEATHER as WEATHER

#: Of the session's server.
API_KEY = "secret"
#: Seconds a client waits; only to end a request that hangs, also on a slow and busy machine.
ANSWER_LIMIT = 600


def ask(client: Any, question: str | list[dict[str, Any]], **more: Any) -> Any:
    """One greedy answer to a question or a whole conversation."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    values = {"model": "glm-5", "messages": messages, "temperature": 0, "max_tokens": 128} | more
    return client.chat.completions.create(**values)


@dataclass
class Whole:
    """A stream put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments
    finish: str | None = None


def joined(stream: Any) -> Whole:
    """All deltas of a chat stream with one choice."""
    whole = Whole()
    for chunk in stream:
        for choice in chunk.choices:
            whole.finish = choice.finish_reason or whole.finish
            whole.content += choice.delta.content or ""
            whole.reasoning += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(whole.calls):
                    whole.calls.append(("", ""))
                name, arguments = whole.calls[call.index]
                whole.calls[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    return whole
