"""The rules of deploy/rules.yaml, and what they find in a set of facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel

from glm5_ascend.deploy.rules.expression import holds, names_in
from glm5_ascend.files.resources import data_dir
from glm5_ascend.files.yaml_file import read_yaml

ERROR, WARNING = "error", "warning"


#: Chapters of deploy/TROUBLESHOOTING.md, in its order.
Topic = Literal[
    "versions", "indexer", "checkpoint", "graphs and MTP", "parallel layout", "FlashComm, MC2, MLAPO", "C8 caches",
    "prefill and decode", "SGLang", "machine",
]  # fmt: skip


class Rule(BaseModel):
    """One known bad combination.

    Attributes:
        when: a condition over `facts.FACTS`.
        source: the thread or file that says so.
        read: version of vllm-ascend -> `file:line word` where its code does it, the word on that line.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    id: str
    topic: Topic
    level: Literal["error", "warning"]
    when: str
    message: str
    fix: str
    source: str
    read: dict[str, str] = {}

    @property
    def known_from(self) -> str:
        """The source, and in which versions the rule was read."""
        places = [f"{version} {place.partition(' ')[0]}" for version, place in self.read.items()]
        return f"{self.source}; read in {' and '.join(places)}" if places else self.source


class RuleFile(RootModel[list[Rule]]):
    """deploy/rules.yaml."""


@dataclass(frozen=True)
class BrokenRule:
    """A rule that holds, its message filled in."""

    id: str
    level: str
    message: str
    fix: str
    source: str


@cache
def rules() -> tuple[Rule, ...]:
    """All of them, in the order of the file."""
    return tuple(read_yaml(data_dir("data/deploy") / "rules.yaml", RuleFile).root)


def judge(facts: Mapping[str, Any]) -> tuple[list[BrokenRule], dict[str, list[str]]]:
    """What is wrong, and the rules that could not be checked with the facts they lack."""
    broken: list[BrokenRule] = []
    unchecked = {}
    for rule in rules():
        answer = holds(rule.when, facts)
        if answer is None:
            unchecked[rule.id] = sorted(names_in(rule.when) - set(facts))
        elif answer:
            shown = _Shown(facts)
            broken.append(
                BrokenRule(
                    rule.id, rule.level, rule.message.format_map(shown), rule.fix.format_map(shown), rule.known_from
                )
            )
    return broken, unchecked


class _Shown(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return f"({name} unknown)"
