"""The chat template: there, readable as jinja, and written for this tokenizer. Parsed, never rendered.

The parser builds a tree and runs nothing: no constant is folded, no filter called. Its time and memory grow with the
text, which is bounded. transformers 5.19 renders `chat_template.jinja` if there is one, else `chat_template` of
tokenizer_config.json; without either, engines refuse chats and answer completions only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint, inside
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.checks.tokenizer_file import COPY, SETTINGS
from glm5_ascend.errors import CheckpointError

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

TEMPLATE, LEGACY = "chat_template.jinja", "chat_template.json"
#: GLM-5's has 5 kB, the longest known ones 30. The worst of this size that we found takes 1.3 s and 30 MB.
MAX_BYTES = 256 * 1024
#: A marker of a turn: one token for the tokenizer it was written for, a handful of pieces for any other.
_MARKER = re.compile(r"<\|[A-Za-z_][A-Za-z0-9_]*\|>")


def check_template(
    checkpoint: LoadedCheckpoint, settings: dict[str, Any], ids: dict[str, int] | None, report: Report
) -> None:
    """Findings about every template that a reader may choose; `ids` are the tokenizer's, None if not known."""
    texts = dict(_templates(checkpoint, settings, report))
    for (file, name), text in texts.items():
        problem = _problem(text)
        if problem:
            report.error("files.chat_template", f"{name}{problem}", file=file, fix=COPY)
        elif ids is not None and isinstance(text, str):
            _check_markers(file, text, ids, report)
    if not texts:
        report.warning(
            "files.chat_template",
            "no chat template: engines refuse chats and answer completions only",
            file=TEMPLATE,
            fix=COPY + ", if it has one",
        )
    both = [texts.get(key) for key in ((TEMPLATE, ""), (SETTINGS, "chat_template: "))]
    if None not in both and both[0] != both[1]:
        report.warning(
            "files.chat_template",
            f"differs from the one in {SETTINGS}: readers of transformers 5 take the file, older ones the other",
            file=TEMPLATE,
            fix=COPY,
        )


def _templates(
    checkpoint: LoadedCheckpoint, settings: dict[str, Any], report: Report
) -> Iterator[tuple[tuple[str, str], object]]:
    """((file, name of one of several), text) of all templates; what cannot be read is reported."""
    directory = checkpoint.directory
    for path in (directory / TEMPLATE, *sorted((directory / "additional_chat_templates").glob("*.jinja"))):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and inside(path, directory):
            try:
                yield (name, ""), _read_template(path)
            except CheckpointError as error:
                report.error("files.chat_template", error.message, file=name, fix=error.tip)
                yield (name, ""), None
    if (directory / LEGACY).is_file() and inside(directory / LEGACY, directory):
        try:
            if (legacy := checkpoint.read_json(LEGACY).get("chat_template")) is not None:
                yield (LEGACY, ""), legacy
        except CheckpointError as error:
            report.error("files.chat_template", error.message, file=LEGACY, fix=COPY)
    stated = settings.get("chat_template")
    if isinstance(stated, list):  # several, by name
        for entry in stated:
            stated_name = entry.get("name") if isinstance(entry, dict) else None
            yield (SETTINGS, f"chat_template {stated_name!r:.40}: "), entry.get("template") if stated_name else entry
    elif stated is not None:
        yield (SETTINGS, "chat_template: "), stated


def _read_template(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) <= MAX_BYTES:
            return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise CheckpointError(f"cannot be read: {reason}", COPY) from None
    raise CheckpointError(f"larger than {MAX_BYTES // 1024} KiB", COPY)


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
        template_parser()(text)
    except RecursionError:
        return "not valid jinja: nested too deeply"
    except Exception as error:  # TemplateSyntaxError, and what its lexer lets through
        line = getattr(error, "lineno", None)
        return f"not valid jinja{f', line {line}' if line else ''}: {str(error) or type(error).__name__:.120}"
    return None


def template_parser() -> Callable[[str], nodes.Template]:
    """A parser of the jinja that transformers renders: loop controls, and its `generation` blocks."""
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
    return environment.parse


def _check_markers(file: str, text: str, ids: dict[str, int], report: Report) -> None:
    markers = sorted(set(_MARKER.findall(text)))
    unknown = [marker for marker in markers if marker not in ids]
    if not unknown:
        return
    foreign = len(unknown) == len(markers)
    say = report.error if foreign else report.warning
    say(
        "files.chat_template",
        f"{len(unknown)} of its {len(markers)} markers are no tokens here, e.g. {unknown[0]:.40}: "
        + ("written for another model" if foreign else "they would be cut into pieces"),
        file=file,
        fix=COPY,
    )
