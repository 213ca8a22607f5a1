"""One line of doctor's report."""

from __future__ import annotations

from dataclasses import dataclass

OK, INFO, WARNING, PROBLEM = "ok", "info", "warning", "problem"


@dataclass(frozen=True)
class DoctorRow:
    """One line of the report. status: "ok", "info", "warning" or "problem"; note: a detail, or the fix.

    id, source: those of the rule, if the row comes from one.
    """

    item: str
    value: str
    status: str = "info"
    note: str = ""
    id: str = ""
    source: str = ""

    @property
    def of_machine(self) -> bool:
        """False for what another machine would find as well: of a profile, or of the checkpoint."""
        return not self.id and self.item != "checkpoint"
