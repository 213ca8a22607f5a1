"""One line of doctor's report."""

from __future__ import annotations

from dataclasses import dataclass

OK, INFO, WARNING, PROBLEM = "ok", "info", "warning", "problem"


@dataclass(frozen=True)
class DoctorRow:
    """One line of the report. status: "ok", "info", "warning" or "problem"; note: detail, or the line that mends it.

    id, source: of the rule, for rows that come from one.
    """

    item: str
    value: str
    status: str = "info"
    note: str = ""
    id: str = ""
    source: str = ""
