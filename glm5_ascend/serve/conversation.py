"""A conversation with a served GLM-5 through the official OpenAI client: streamed, with thinking and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from glm5_ascend.errors import CheckFailedError, ConfigError, MissingEnvironmentError, OutputError

if TYPE_CHECKING:
    from openai import OpenAI

THINKING, ANSWER, TOOL_CALL = "thinking", "answer", "tool call"


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

    client: OpenAI
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
            for chunk in self._stream():
                if chunk.usage:
                    self.usage = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                for choice in chunk.choices:
                    yield from _add(choice.delta, message, calls)
            if calls:
                message["tool_calls"] = list(calls.values())
            self.messages.append({key: value for key, value in message.items() if value})
            yield from (Piece(TOOL_CALL, shown) for _, shown in self.open_calls())
        except BaseException:
            del self.messages[before:]
            raise

    def _stream(self) -> Iterator[Any]:
        import openai

        given = {"max_tokens": self.max_tokens, "temperature": self.temperature, "tools": self.tools or None}
        try:
            yield from self.client.chat.completions.create(
                model=self.model,
                messages=self.messages,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"chat_template_kwargs": {"enable_thinking": self.thinking}},
                **{key: value for key, value in given.items() if value is not None},
            )
        except openai.OpenAIError as error:
            raise _explained(error, str(self.client.base_url)) from None


def connect(url: str, model: str = "", key: str = "") -> Conversation:
    """A new conversation with the server at `url` (http://HOST:PORT, with or without /v1), with its first model.

    Raises:
        MissingEnvironmentError: the openai package is missing, or nothing answers.
        ConfigError: the server does not have that model. CheckFailedError: it refuses.
    """
    try:
        import openai
    except ImportError:
        raise MissingEnvironmentError("the openai package is not installed", "pip install openai") from None
    client = openai.OpenAI(base_url=url.rstrip("/").removesuffix("/v1") + "/v1", api_key=key or "none", max_retries=0)
    try:
        served = [entry.id for entry in client.models.list()]
    except openai.OpenAIError as error:
        raise _explained(error, url) from None
    if not served or model not in ("", *served):
        raise ConfigError(
            f"{url}: does not serve {model or 'any model'}", f"it serves {', '.join(served) or 'nothing'}"
        )
    return Conversation(client, model or served[0])


def _add(delta: Any, message: dict[str, Any], calls: dict[int, dict[str, Any]]) -> Iterator[Piece]:
    """Put a streamed delta into `message` and `calls`; yields what can be shown at once."""
    reasoning = getattr(delta, "reasoning", None) or getattr(delta, "reasoning_content", None)
    if reasoning:
        message["reasoning"] += reasoning
        yield Piece(THINKING, reasoning)
    if delta.content:
        message["content"] += delta.content
        yield Piece(ANSWER, delta.content)
    for part in delta.tool_calls or ():
        call = calls.setdefault(
            part.index, {"id": part.id or "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["function"]["name"] += (part.function.name if part.function else "") or ""
        call["function"]["arguments"] += (part.function.arguments if part.function else "") or ""


def _shown(function: dict[str, str]) -> str:
    """`get_weather(city='Oslo')`; the arguments as they came where they are no JSON object."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
        inside = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    except (ValueError, AttributeError):
        inside = function["arguments"]
    return f"{function['name']}({inside})"


def _explained(error: Exception, url: str) -> CheckFailedError | MissingEnvironmentError:
    import openai

    if isinstance(error, openai.AuthenticationError):
        return CheckFailedError(f"{url}: the server wants an API key", "set OPENAI_API_KEY, or give --key")
    if isinstance(error, openai.APIStatusError):
        return CheckFailedError(f"{url}: HTTP {error.status_code}: {error.message[:300]}", "see the server's log")
    reason = str(error.__cause__ or error)
    return MissingEnvironmentError(f"{url}: no answer: {reason}", "is the server up? start one: glm5-ascend serve DIR")
