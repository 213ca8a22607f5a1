"""The tokens that a model's chat template begins every prompt with: `[gMASK]<sop>` for GLM.

Without them a model does worse than its weights can: attention keeps much of its mass on them. The template is parsed
and not rendered, as in `checks.chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from glm5_ascend.checkpoint.checks.chat_template import MAX_BYTES, TEMPLATE, template_parser
from glm5_ascend.checkpoint.checks.tokenizer_file import SETTINGS
from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.untrusted import read_bytes, read_json_object

#: Markers of a beginning. Those of turns have bars: <|user|>, <|im_start|>.
_MARKER = re.compile(r"\s*(\[\w+\]|<\w+>)")


def opening(tokenizer: SourceTokenizer) -> tuple[str, list[int]]:
    """Text and token ids of the markers that the template begins with; "" and [] if it begins otherwise."""
    literal = _first_literal(_template(tokenizer.source))
    text, end = "", 0
    ids: list[int] = []
    while (marker := _MARKER.match(literal, end)) and len(token := tokenizer.encode(marker[1])) == 1:
        text, ids, end = text + marker[1], [*ids, *token], marker.end()
    return text, ids


def _template(source: Path) -> str:
    """The template that transformers renders; "" without one, and for several by name."""
    path = source / TEMPLATE
    try:
        if path.is_file():
            return read_bytes(path, MAX_BYTES, CheckpointError, "").decode("utf-8", "replace")
        stated = read_json_object(source / SETTINGS).get("chat_template")
    except CheckpointError:
        return ""
    return stated if isinstance(stated, str) and len(stated) <= MAX_BYTES else ""


def _first_literal(template: str) -> str:
    """The text before anything that depends on the conversation."""
    try:
        return next(_literals(template), "")
    except Exception:  # the parser's own, and what its lexer lets through: rendering says what is wrong
        return ""


def _literals(template: str) -> Iterator[str]:
    from jinja2 import nodes

    for node in template_parser()(template).body:
        if isinstance(node, nodes.Output):
            for child in node.nodes:
                if not isinstance(child, nodes.TemplateData):
                    return
                if child.data.strip():
                    yield child.data
        elif not isinstance(node, (nodes.Macro, nodes.Assign, nodes.AssignBlock, nodes.ExprStmt)):
            return
