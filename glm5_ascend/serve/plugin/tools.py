"""A correction of vLLM's streamed tool calls where the client forces one (`tool_choice` required or a function).

The grammar of a forced call is one of text: `<tool_call>` may be written as the token of that name or letter by letter
(`<`, `tool`, ...), and a small model does the latter. vLLM's stream parser looks for the token alone, so that the whole
markup comes out as content; its parser of whole answers looks at the text. Here both look at the text. Not for `auto`:
there the same letters may be an answer about tool calls.
`tests/serve/test_forced_tools.py` has the smallest case and notices when upstream is right; then this file goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.glm47_moe_tool_parser import Glm47MoeModelToolParser

#: vLLM's two names of one parser.
NAMES = ("glm45", "glm47")


class Glm5ToolParser(Glm47MoeModelToolParser):  # type: ignore[misc]
    """vLLM's, which reads a forced call from its text."""

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
    """Put it in the place of vLLM's."""
    for name in NAMES:
        ToolParserManager.register_module(name, force=True, module=Glm5ToolParser)
