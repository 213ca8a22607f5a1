"""The chat template: there, readable as jinja, and written for this tokenizer. Parsed, never rendered.

The parser builds a tree and runs nothing: no constant is folded, no filter called. Its time and memory grow with the
text, which is bounded. transformers 5.19 renders `chat_template.jinja` if there is one, else `chat_template` of
tokenizer_config.json; without either, engines refuse chats and answer completions only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint, inside
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.checks.tokenizer_file import COPY, SETTINGS
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.untrusted import read_bytes

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

TEMPLATE = "chat_template.jinja"
#: GLM-5's has 5 kB, the longest known ones 30. The worst of this size that we found takes 1.3 s and 30 MB.
MAX_BYTES = 256 * 1024
#: A marker of a turn: one token for the tokenizer it was written for, a handful of pieces for any other.
_MARKER = re.compile(r"<\|[A-Za-z_][A-Za-z0-9_]*\|>")


def check_template(
    checkpoint: LoadedCheckpoint, settings: dict[str, Any], ids: dict[str, int] | None, report: Report
) -> None:
    """Findings about every template that a reader may choose; `ids` are the tokenizer's, None if not known."""
    texts = dict(_templates(checkpoint, settings, report))
    for file, text in texts.items():
        if problem := _problem(text):
            _say(report.error, file, f"chat template: {problem}")
        elif ids is not None and isinstance(text, str):
            _check_markers(file, text, ids, report)
    if not texts:
        why = "no chat template: engines refuse chats and answer completions only"
        _say(report.warning, TEMPLATE, why, f"{COPY}, if it has one")
    if len(texts) == 2 and None not in texts.values() and texts[TEMPLATE] != texts[SETTINGS]:
        why = f"differs from the one in {SETTINGS}: readers of transformers 5 take the file, older ones the other"
        _say(report.warning, TEMPLATE, why)


def _say(say: Callable[..., None], file: str, message: str, fix: str = COPY) -> None:
    """Report with `say`, the report's `error` or `warning`."""
    say("files.chat_template", message, file=file, fix=fix)


def _templates(checkpoint: LoadedCheckpoint, settings: dict[str, Any], report: Report) -> Iterator[tuple[str, object]]:
    """(file, text) of all templates; what cannot be read is reported."""
    path = checkpoint.directory / TEMPLATE
    if path.is_file() and inside(path, checkpoint.directory):
        text = None
        try:
            text = read_bytes(path, MAX_BYTES, CheckpointError, COPY).decode("utf-8")
        except CheckpointError as error:
            _say(report.error, TEMPLATE, error.message)
        except UnicodeDecodeError:
            _say(report.error, TEMPLATE, "cannot be read: not UTF-8")
        yield TEMPLATE, text
    if (stated := settings.get("chat_template")) is not None:
        yield SETTINGS, stated


def _problem(text: object) -> str | None:
    """Why no engine can render this template; None if it can be parsed, or was reported already."""
    if text is None:
        return None
    if not isinstance(text, str):
        return f"is {text!r:.40}, no text"
    if not text.strip():
        return "empty: chats become nothing"
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        return f"larger than {MAX_BYTES // 1024} KiB"
    try:
        _parse(text)
    except RecursionError:
        return "not valid jinja: nested too deeply"
    except Exception as error:  # TemplateSyntaxError, and what its lexer lets through
        line = getattr(error, "lineno", None)
        return f"not valid jinja{f', line {line}' if line else ''}: {str(error) or type(error).__name__:.120}"
    return None


def _parse(text: str) -> None:
    """Parse the jinja that transformers renders: with loop controls, and its `generation` blocks."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} ... {% endgeneration %}` marks what the assistant said; here a plain block."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own way

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.parse(text)


def _check_markers(file: str, text: str, ids: dict[str, int], report: Report) -> None:
    markers = sorted(set(_MARKER.findall(text)))
    unknown = [marker for marker in markers if marker not in ids]
    if not unknown:
        return
    foreign = len(unknown) == len(markers)
    why = f"{len(unknown)} of its {len(markers)} markers are no tokens here, e.g. {unknown[0]:.40}: "
    why += "written for another model" if foreign else "they would be cut into pieces"
    _say(report.error if foreign else report.warning, file, why)
