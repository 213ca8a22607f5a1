"""Corrects vLLM's tool calls: streamed ones that the client forces, and those that max_tokens cuts.

The grammar of a forced call describes text: a model may write `<tool_call>` as one token or letter by letter (`<`,
`tool`, ...), and a small model does the latter. vLLM's stream parser looks for the token only, so the markup becomes
content; its parser of complete answers looks at the text. Here both look at the text. Not for `auto`: there the same
letters may be an answer about tool calls.

A complete answer whose call was cut says "tool_calls", and its parser closes the arguments: `get_weather({})` looks
like a call that the model made. Streams say "length", and close the arguments as well. When these can go: `compat`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.glm47_moe_tool_parser import Glm47MoeModelToolParser

#: vLLM's two names of one parser.
NAMES = ("glm45", "glm47")


class Glm5ToolParser(Glm47MoeModelToolParser):  # type: ignore[misc]
    """vLLM's parser, which reads a forced call from the text and leaves a call open that the model did not close."""

    def finish_streaming(self) -> Any:
        return None if self._parser_engine._engine.state.name.startswith("TOOL_") else super().finish_streaming()

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        if request.tool_choice not in (None, "none", "auto"):
            previous_token_ids = current_token_ids = delta_token_ids = ()
        return super().extract_tool_calls_streaming(
            previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids, request
        )


def with_cut_calls(full_answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap `chat_completion_full_generator`: an answer that max_tokens cut says so, and has no unfinished call."""

    @functools.wraps(full_answer)
    async def answer(self: Any, request: Any, results: AsyncIterator[Any], *arguments: Any, **options: Any) -> Any:
        last: Any = None

        async def remembered() -> AsyncIterator[Any]:
            nonlocal last
            async for last in results:
                yield last

        response = await full_answer(self, request, remembered(), *arguments, **options)
        for choice in getattr(response, "choices", ()):  # an error has none
            output = next(output for output in last.outputs if output.index == choice.index)
            if output.finish_reason == "length":
                choice.finish_reason = "length"
                _, opened, call = output.text.rpartition("<tool_call>")
                if opened and "</tool_call>" not in call and choice.message.tool_calls:
                    choice.message.tool_calls.pop()
        return response

    return answer


def register() -> None:
    """Replace vLLM's parser under both of its names, and correct complete answers; safe to call twice."""
    for name in NAMES:
        ToolParserManager.register_module(name, force=True, module=Glm5ToolParser)
    full_answer = OpenAIServingChat.chat_completion_full_generator
    if not hasattr(full_answer, "__wrapped__"):
        OpenAIServingChat.chat_completion_full_generator = with_cut_calls(full_answer)
