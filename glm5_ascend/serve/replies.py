"""Replies of the OpenAI chat API, as far as the checks read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class FunctionPart(_Part):
    name: str | None = None
    arguments: str | None = None


class CallPart(_Part):
    """A tool call, or a piece of a streamed one: all pieces of one call have the same index."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: FunctionPart = FunctionPart()


class Message(_Part):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPart] | None = None

    @property
    def thoughts(self) -> str:
        return self.reasoning or self.reasoning_content or ""


class Choice(_Part):
    message: Message | None = None
    delta: Message | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


_Count = Annotated[int, Field(ge=0, lt=2**31)]


class Usage(_Part):
    prompt_tokens: _Count
    completion_tokens: _Count | None = None


class ChatReply(_Part):
    """A chat completion, or one event of a streamed one."""

    choices: list[Choice] = []
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ServedModel(_Part):
    id: str
    max_model_len: int | None = None


@dataclass
class Answer:
    """One chat completion, streamed or not.

    Attributes:
        tool_calls: (name, arguments as JSON text).
        call_faults: what the API requires of tool calls and these do not have.
        chunks: number of events of a streamed answer.
        prompt_ids, token_ids: where `return_token_ids` asked for them and the answer was not streamed.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list)
    call_faults: list[str] = field(default_factory=list)
    finish: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    chunks: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, reply: ChatReply) -> None:
        """Add a reply, or one event of a stream; later events of a tool call carry no name."""
        if reply.usage:
            self.prompt_tokens, self.completion_tokens = reply.usage.prompt_tokens, reply.usage.completion_tokens or 0
        for choice in reply.choices:
            self.chunks += choice.message is None
            self.finish = choice.finish_reason or self.finish
            message = choice.message or choice.delta or Message()
            self.content += message.content or ""
            self.reasoning += message.thoughts
            for call in message.tool_calls or ():
                self._judge(call, streamed=choice.message is None)
                arguments = call.function.arguments or ""
                if call.function.name:
                    self.tool_calls.append((call.function.name, arguments))
                elif self.tool_calls:
                    name, earlier = self.tool_calls[-1]
                    self.tool_calls[-1] = (name, earlier + arguments)

    def _judge(self, call: CallPart, streamed: bool) -> None:
        """Add the faults of a call; a streamed one has an index in every piece, and all the rest in its first one."""
        first = not streamed or call.index == len(self.tool_calls)
        if streamed and call.index is None:
            self.call_faults.append("a piece without index")
        if first and not call.id:
            self.call_faults.append(f"id is {call.id!r}")
        if first and call.type != "function":
            self.call_faults.append(f"type is {call.type!r}, not 'function'")
        if first and not call.function.name:
            self.call_faults.append(f"function.name is {call.function.name!r}")
        if not streamed and call.function.arguments is None:
            self.call_faults.append("no function.arguments")
