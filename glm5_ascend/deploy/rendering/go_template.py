"""Objects with holes, written as a Go template: where a value of the chart goes in, and what depends on one.

A hole is a word that stands in the objects as a string, a key or an item of a list until the YAML is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from glm5_ascend.deploy.rendering.yaml_text import dumped

_SCALAR = re.compile(r"scalarofgo(\d+)x")
_LINE = re.compile(r"^( *)(?:lineofgo(\d+)x: null|- lineofgo(\d+)x)$", re.MULTILINE)


class GoTemplate:
    """Gives out holes, and fills them in the text."""

    def __init__(self) -> None:
        self._fragments: list[str] = []

    def scalar(self, fragment: str) -> str:
        self._fragments.append(fragment)
        return f"scalarofgo{len(self._fragments) - 1}x"

    def value(self, expression: str) -> str:
        return self.scalar(f"{{{{ {expression} }}}}")

    def line(self, action: str) -> str:
        """A line of its own, in place of a key or of an item."""
        self._fragments.append(f"{{{{- {action} }}}}")
        return f"lineofgo{len(self._fragments) - 1}x"

    def when(self, condition: str, content: dict[str, Any]) -> dict[str, Any]:
        """Keys that are there if `condition` holds, `if X` or `with X`."""
        return {self.line(condition): None, **content, self.line("end"): None}

    def items(self, condition: str, then: Iterable[Any], otherwise: Iterable[Any] = ()) -> list[Any]:
        """Items of a list, by a condition."""
        other = [self.line("else"), *otherwise] if otherwise else []
        return [self.line(condition), *then, *other, self.line("end")]

    def text(self, objects: Iterable[Any]) -> str:
        """YAML documents; what would be a template by itself stays as it is."""
        text = dumped(objects).replace("{{", '{{ "{{" }}')

        def own_lines(match: re.Match[str]) -> str:
            return match[1] + self._fragments[int(match[2] or match[3])]

        text = re.sub(_LINE, own_lines, text)
        return re.sub(_SCALAR, lambda match: self._fragments[int(match[1])], text)
