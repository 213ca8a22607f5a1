"""The rules of deploy/rules.yaml, and what they find in a set of facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from glm5_ascend.deploy.rules.expression import holds, names_in
from glm5_ascend.resources import data_dir

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Rule:
    """One known bad combination. source: the thread, document or file that says so."""

    id: str
    level: str
    when: str
    message: str
    fix: str
    source: str


@dataclass(frozen=True)
class Found:
    """A rule that holds, its message filled in."""

    id: str
    level: str
    message: str
    fix: str
    source: str


@cache
def rules() -> tuple[Rule, ...]:
    text = (data_dir("data/deploy") / "rules.yaml").read_text(encoding="utf-8")
    return tuple(Rule(**entry) for entry in yaml.safe_load(text))


def judge(facts: Mapping[str, Any]) -> tuple[list[Found], dict[str, list[str]]]:
    """What is wrong, and the rules that could not be checked with the facts they lack."""
    found, unchecked = [], {}
    for rule in rules():
        answer = holds(rule.when, facts)
        if answer is None:
            unchecked[rule.id] = sorted(names_in(rule.when) - set(facts))
        elif answer:
            shown = _Shown(facts)
            found.append(
                Found(rule.id, rule.level, rule.message.format_map(shown), rule.fix.format_map(shown), rule.source)
            )
    return found, unchecked


class _Shown(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return f"({name} unknown)"
