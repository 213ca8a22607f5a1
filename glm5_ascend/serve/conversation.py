"""A conversation with a served GLM-5: streamed, with thinking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.client import Answer, Client, server_address
from glm5_ascend.serve.replies import Message

THINKING, ANSWER, TOOL_CALL = "thinking", "answer", "tool call"
#: A slow machine can write a long answer for an hour; the user can stop it.
ANSWER_TIMEOUT_S = 4 * 3600.0


class Piece(NamedTuple):
    """A part of a streamed answer. channel: THINKING, ANSWER or TOOL_CALL (complete: `name(arguments)`)."""

    channel: str
    text: str


@dataclass
class Conversation:
    """Messages so far, and the options of the next question.

    Attributes:
        messages: as /v1/chat/completions takes them, with the `reasoning` of answers.
        tools: function definitions, empty for none.
        usage: prompt and completion tokens of the last answer.
    """

    client: Client
    model: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = True
    tools: list[dict[str, Any]] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)

    def ask(self, question: str) -> Iterator[Piece]:
        """Send a question and stream the answer. A failed answer leaves the conversation as it was."""
        messages, answer = [*self.messages, {"role": "user", "content": question}], Answer()
        request = {
            "model": self.model,
            "messages": messages,
            "chat_template_kwargs": {"enable_thinking": self.thinking},
        }
        for reply in self.client.events(request | ({"tools": self.tools} if self.tools else {})):
            answer.add(reply)
            for delta in (choice.delta or Message() for choice in reply.choices):
                if delta.thoughts:
                    yield Piece(THINKING, delta.thoughts)
                if delta.content:
                    yield Piece(ANSWER, delta.content)
        yield from (Piece(TOOL_CALL, _shown(name, arguments)) for name, arguments in answer.tool_calls)
        self.usage = answer.prompt_tokens, answer.completion_tokens
        message = {"role": "assistant", "content": answer.content, "reasoning": answer.reasoning}
        self.messages = [*messages, {key: value for key, value in message.items() if value}]


def connect(url: str, key: str = "") -> Conversation:
    """A new conversation with the server at `url` (http://HOST:PORT, with or without /v1), with its first model.

    Raises:
        ConfigError: no URL, or the server has no model. CheckFailedError: it refuses.
        MissingEnvironmentError: nothing answers.
    """
    client = Client(server_address(url), timeout=ANSWER_TIMEOUT_S, key=key)
    return Conversation(client, client.entry()["id"])


def _shown(name: str, arguments: str) -> str:
    """`get_weather(city='Oslo')`; the arguments unchanged if they are no JSON object."""
    try:
        values = parse_json(arguments or "{}")
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
    except (ValueError, AttributeError):
        return f"{name}({arguments})"
