"""Corrects vLLM's streamed tool calls where the client forces a call (`tool_choice` required or a function).

The grammar of a forced call describes text: a model may write `<tool_call>` as one token or letter by letter (`<`,
`tool`, ...), and a small model does the latter. vLLM's stream parser looks for the token only, so the markup becomes
content; its parser of complete answers looks at the text. Here both look at the text. Not for `auto`: there the same
letters may be an answer about tool calls. When it can go: `compat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.glm47_moe_tool_parser import Glm47MoeModelToolParser

#: vLLM's two names of one parser.
NAMES = ("glm45", "glm47")


class Glm5ToolParser(Glm47MoeModelToolParser):  # type: ignore[misc]
    """vLLM's parser, which reads a forced call from the text."""

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


def register() -> None:
    """Replace vLLM's parser under both of its names."""
    for name in NAMES:
        ToolParserManager.register_module(name, force=True, module=Glm5ToolParser)
