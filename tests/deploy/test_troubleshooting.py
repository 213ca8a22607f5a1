"""deploy/TROUBLESHOOTING.md is the rules of `doctor`, and current."""

from __future__ import annotations

from glm5_ascend.deploy.troubleshooting import page
from tests.support.command import ROOT


def test_the_file_is_current() -> None:
    """`python -m glm5_ascend.deploy.troubleshooting` writes it."""
    assert page() == (ROOT / "deploy" / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
