"""A conversation with a served GLM-5: streamed, with thinking and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from glm5_ascend.errors import OutputError
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.client import Client, Delta, server_address

THINKING, ANSWER, TOOL_CALL = "thinking", "answer", "tool call"
#: A slow machine writes a long answer for an hour; somebody sits there who can stop it.
ANSWER_TIMEOUT_S = 4 * 3600.0


class Piece(NamedTuple):
    """A part of an answer as it arrives. kind: THINKING, ANSWER or TOOL_CALL (whole: `name(arguments)`)."""

    kind: str
    text: str


@dataclass
class Conversation:
    """What was said, and how the next question is asked.

    Attributes:
        messages: as /v1/chat/completions takes them; an answer's `reasoning` is sent back with it, so that thoughts
            between the tool calls of one turn stay in the prompt.
        tools: function definitions, empty for none.
        usage: prompt and completion tokens of the last answer.
    """

    client: Client
    model: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = True
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    temperature: float | None = None
    usage: tuple[int, int] = (0, 0)

    def ask(self, question: str) -> Iterator[Piece]:
        """Send a question; yields the answer as it comes. A broken answer leaves the conversation as it was."""
        return self._turn({"role": "user", "content": question})

    def tool_result(self, call_id: str, content: str) -> None:
        """Add what a tool returned; `answer` goes on when all calls have a result."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def answer(self) -> Iterator[Piece]:
        """Let the model go on from the messages as they are."""
        return self._turn(None)

    def open_calls(self) -> list[tuple[str, str]]:
        """(id, `name(arguments)`) of the last message's tool calls, which want a result each."""
        last = self.messages[-1] if self.messages else {}
        return [(call["id"], _shown(call["function"])) for call in last.get("tool_calls") or ()]

    def save(self, path: Path) -> None:
        """Write the messages as JSON; never over another file.

        Raises:
            OutputError: the file exists, or cannot be written.
        """
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump({"model": self.model, "messages": self.messages}, file, indent=2, ensure_ascii=False)
        except FileExistsError:
            raise OutputError(f"{path}: exists", "name another file") from None
        except OSError as error:
            if path.is_file():
                path.unlink()  # the part that was written: the name was free
            raise OutputError(f"{path}: {error.strerror or error}", "name another file") from None

    def _turn(self, said: dict[str, Any] | None) -> Iterator[Piece]:
        before = len(self.messages)
        if said is not None:
            self.messages.append(said)
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": ""}
        calls: dict[int, dict[str, Any]] = {}
        try:
            for delta in self.client.deltas(self._request()):
                self.usage = delta.usage or self.usage
                yield from _add(delta, message, calls)
            if calls:
                message["tool_calls"] = list(calls.values())
            self.messages.append({key: value for key, value in message.items() if value})
            yield from (Piece(TOOL_CALL, shown) for _, shown in self.open_calls())
        except BaseException:
            del self.messages[before:]
            raise

    def _request(self) -> dict[str, Any]:
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature, "tools": self.tools or None}
        return {
            "model": self.model,
            "messages": self.messages,
            "chat_template_kwargs": {"enable_thinking": self.thinking},
            **{key: value for key, value in given.items() if value is not None},
        }


def connect(url: str, model: str = "", key: str = "") -> Conversation:
    """A new conversation with the server at `url` (http://HOST:PORT, with or without /v1), with its first model.

    Raises:
        ConfigError: no URL, or the server does not have that model. CheckFailedError: it refuses.
        MissingEnvironmentError: nothing answers.
    """
    client = Client(server_address(url), model, ANSWER_TIMEOUT_S, key)
    return Conversation(client, client.entry()["id"])


def _add(delta: Delta, message: dict[str, Any], calls: dict[int, dict[str, Any]]) -> Iterator[Piece]:
    """Put a streamed delta into `message` and `calls`; yields what can be shown at once."""
    if delta.reasoning:
        message["reasoning"] += delta.reasoning
        yield Piece(THINKING, delta.reasoning)
    if delta.content:
        message["content"] += delta.content
        yield Piece(ANSWER, delta.content)
    for part in delta.calls:
        call = calls.setdefault(
            part.place, {"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["function"]["name"] += part.name
        call["function"]["arguments"] += part.arguments


def _shown(function: dict[str, str]) -> str:
    """`get_weather(city='Oslo')`; the arguments as they came where they are no JSON object."""
    try:
        arguments = parse_json(function["arguments"] or "{}")
        inside = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    except (ValueError, AttributeError):
        inside = function["arguments"]
    return f"{function['name']}({inside})"
