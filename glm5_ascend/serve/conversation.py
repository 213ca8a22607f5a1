"""A conversation with a served GLM-5: streamed, with thinking and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from glm5_ascend.errors import OutputError
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
        messages: as /v1/chat/completions takes them; an answer's `reasoning` is sent back too, so that thoughts
            between the tool calls of one turn stay in the prompt.
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
        return self._turn({"role": "user", "content": question})

    def tool_result(self, call_id: str, content: str) -> None:
        """Add the result of a tool call. When all calls have a result, call `answer`."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def answer(self) -> Iterator[Piece]:
        """Let the model answer the messages as they are."""
        return self._turn(None)

    def open_calls(self) -> list[tuple[str, str]]:
        """(id, `name(arguments)`) of the last message's tool calls, each of which needs a result."""
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
            raise OutputError(f"{path}: already exists", "name another file") from None
        except OSError as error:
            if path.is_file():
                path.unlink()  # the incomplete file
            raise OutputError(f"{path}: {error.strerror or error}", "name another file") from None

    def _turn(self, question: dict[str, Any] | None) -> Iterator[Piece]:
        before = len(self.messages)
        if question is not None:
            self.messages.append(question)
        answer = Answer()
        try:
            for reply in self.client.events(self._request()):
                answer.add(reply)
                for delta in (choice.delta or Message() for choice in reply.choices):
                    if delta.thoughts:
                        yield Piece(THINKING, delta.thoughts)
                    if delta.content:
                        yield Piece(ANSWER, delta.content)
            self.usage = answer.prompt_tokens, answer.completion_tokens
            self.messages.append(_message(answer))
            yield from (Piece(TOOL_CALL, shown) for _, shown in self.open_calls())
        except BaseException:
            del self.messages[before:]
            raise

    def _request(self) -> dict[str, Any]:
        request = {
            "model": self.model,
            "messages": self.messages,
            "chat_template_kwargs": {"enable_thinking": self.thinking},
        }
        return request | ({"tools": self.tools} if self.tools else {})


def connect(url: str, key: str = "") -> Conversation:
    """A new conversation with the server at `url` (http://HOST:PORT, with or without /v1), with its first model.

    Raises:
        ConfigError: no URL, or the server has no model. CheckFailedError: it refuses.
        MissingEnvironmentError: nothing answers.
    """
    client = Client(server_address(url), timeout=ANSWER_TIMEOUT_S, key=key)
    return Conversation(client, client.entry()["id"])


def _message(answer: Answer) -> dict[str, Any]:
    """An answer as a message of the conversation, without what is empty."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(answer.call_ids, answer.tool_calls, strict=True)
    ]
    message = {"role": "assistant", "content": answer.content, "reasoning": answer.reasoning, "tool_calls": calls}
    return {key: value for key, value in message.items() if value}


def _shown(function: dict[str, str]) -> str:
    """`get_weather(city='Oslo')`; the arguments unchanged if they are no JSON object."""
    try:
        arguments = parse_json(function["arguments"] or "{}")
        text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    except (ValueError, AttributeError):
        text = function["arguments"]
    return f"{function['name']}({text})"
