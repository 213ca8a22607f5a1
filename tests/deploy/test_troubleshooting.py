"""deploy/TROUBLESHOOTING.md is the rules of `doctor`, readable, and current."""

from __future__ import annotations

import re

import pytest

from glm5_ascend.deploy.rules.load import rules
from glm5_ascend.deploy.troubleshooting import page, readable, split
from tests.support.command import ROOT

TEXT = (ROOT / "deploy" / "TROUBLESHOOTING.md").read_text(encoding="utf-8")


def test_the_file_is_current() -> None:
    """`python -m glm5_ascend.deploy.troubleshooting` writes it."""
    assert page() == TEXT


def test_every_rule_has_a_line_with_its_fix_and_its_source() -> None:
    for rule in rules():
        (line,) = (line for line in TEXT.splitlines() if line.startswith(f"| {rule.id} {rule.level} |"))
        number, symptom, _, _, fix, source = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        assert number and symptom and fix and source
        assert not re.search(r"\{\w+\}", line), line
        for thread in re.findall(r"#(\d+)", rule.source):
            assert f"[#{thread}](https://github.com/vllm-project/vllm-ascend/issues/{thread})" in source


@pytest.mark.parametrize(
    ("when", "versions", "cause"),
    [
        ("kv_nz", "", "kv_nz"),
        ("cann == '9.0.0' and pd", "CANN 9.0.0", "pd"),
        ("a and vllm_ascend >= '0.20' and vllm_ascend < '0.22'", "vllm-ascend >= 0.20, < 0.22", "a"),
        ("vllm_ascend < '0.17'", "vllm-ascend < 0.17", ""),
        ("a or vllm_ascend >= '0.24'", "", "a or vllm_ascend >= '0.24'"),
        ("a and (b or c)", "", "a and (b or c)"),
    ],
)
def test_versions_that_always_apply_stand_apart(when: str, versions: str, cause: str) -> None:
    assert split(when) == (versions, cause)


def test_messages_read_without_values() -> None:
    assert readable("CANN {cann} computes wrongly") == "CANN computes wrongly"
    assert readable("{tp} dies in {vllm_ascend}, {{}}") == "`tp` dies in this version, {}"
