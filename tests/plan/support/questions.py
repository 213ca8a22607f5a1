"""Random questions for the planner, with their answers."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from glm5_ascend.errors import PlanError
from glm5_ascend.plan import plan
from glm5_ascend.plan.api import Plan

QUESTIONS = 24


def _question(chance: random.Random) -> dict[str, Any]:
    prompt, output = chance.choice((200, 3500, 16_000, 60_000, 130_000)), chance.choice((100, 1500))
    load = f"in={prompt},out={output},concurrency={chance.choice((1, 4, 16, 64, 300))}"
    load += chance.choice(("", "", ",prefix_hit=0.9", ",requests=64", ",requests=400,prefix_hit=0.5", ",rate=2"))
    return {
        "model": chance.choice(("glm-5", "glm-5.1", "glm-5.2", "glm-5.3")),
        "quant": chance.choice(("w4a8", "w8a8", "w4a8c8", "w8a8c8", "bf16")),
        "cache": chance.choice((None, None, "li", "li+sfa")), "mtp": chance.choice((None, 0, 1, 3)),
        "hardware": chance.choice(("a3", "a3", "a2", "a3-roce")), "nodes": chance.choice((1, 2, 3, 4, 5, 8, None)),
        "slo": chance.choice((None, "tpot=50ms", "ttft=2s", "tpot=30ms,ttft=5s")), "workload": load,
    }  # fmt: skip


@cache
def answered() -> list[tuple[dict[str, Any], Plan]]:
    """Questions with an answer; the others do not fit."""
    chance, found = random.Random(28), list[tuple[dict[str, Any], Plan]]()
    while len(found) < QUESTIONS:
        question = _question(chance)
        try:
            found.append((question, plan(**question)))
        except PlanError as error:
            assert "does not fit" in error.message, question
    return found
