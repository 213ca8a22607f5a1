"""The rules of deploy/rules.yaml, and their evaluation for a set of facts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
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


#: What users see, in their words and in the order of deploy/TROUBLESHOOTING.md.
Symptom = Literal[
    "garbled text", "repeats", "!!!!!", "empty answers", "hangs at start", "does not start", "crashes or hangs later",
    "acceptance falls", "OOM", "slow",
]  # fmt: skip


class Rule(BaseModel):
    """One known bad combination.

    Attributes:
        symptoms: what a user sees.
        when: a condition over `facts.FACTS`.
        source: thread or file that reports it.
        read: version of vllm-ascend -> `file:line word`: place in its code, and a word on that line.
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
    symptoms: list[Symptom] = []

    @property
    def known_from(self) -> str:
        """The source, and the places in vllm-ascend's code."""
        lines = [f"{version} {location.partition(' ')[0]}" for version, location in self.read.items()]
        return f"{self.source}; read in {' and '.join(lines)}" if lines else self.source


class RuleFile(RootModel[list[Rule]]):
    """deploy/rules.yaml."""


class Thread(BaseModel):
    """One report of users that no rule can check.

    Attributes:
        says: what they see, in a sentence. do: what helps. source: numbers of the threads.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    symptom: Symptom
    says: str
    do: str
    source: str


class ThreadFile(RootModel[list[Thread]]):
    """deploy/threads.yaml."""


@cache
def rules() -> tuple[Rule, ...]:
    """All rules in the order of the file."""
    return tuple(read_yaml(data_dir("data/deploy") / "rules.yaml", RuleFile).root)


@cache
def threads() -> tuple[Thread, ...]:
    """All entries of deploy/threads.yaml."""
    return tuple(read_yaml(data_dir("data/deploy") / "threads.yaml", ThreadFile).root)


def judge(facts: Mapping[str, Any]) -> tuple[list[Rule], dict[str, list[str]]]:
    """Evaluate all rules: the broken ones with their messages filled in, and the unchecked ones with what they miss."""
    broken: list[Rule] = []
    unchecked = {}
    for rule in rules():
        answer = holds(rule.when, facts)
        if answer is None:
            unchecked[rule.id] = sorted(names_in(rule.when) - set(facts))
        elif answer:
            values = defaultdict(lambda: "(unknown)", facts)
            filled = {name: getattr(rule, name).format_map(values) for name in ("message", "fix")}
            broken.append(rule.model_copy(update=filled))
    return broken, unchecked
