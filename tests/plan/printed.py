"""The printed report of a plan."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from glm5_ascend.plan.report import show
from glm5_ascend.plan.result import Plan


def lines(plan: Plan, width: int = 80) -> list[str]:
    """The lines for a terminal of `width` columns."""
    text = StringIO()
    show(plan, Console(file=text, width=width, highlight=False))
    return text.getvalue().splitlines()
