"""The functions the model may call, as OpenAI clients send them, with what they return and how it is reported."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from .names import REAL_CITIES, REAL_PEOPLE, WORDS, pick_name

CONDITIONS = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear"]


@dataclass(frozen=True, eq=False)
class Tool:
    """One function: its argument, how users ask for it, and the wording of its descriptions."""

    name: str
    argument: str
    descriptions: list[str]
    questions: list[str]

    def pick_argument(self, rng: random.Random, held_out: bool) -> str:
        """A city or a person from one side of the split."""
        return pick_name(rng, held_out, REAL_CITIES if self.argument == "city" else REAL_PEOPLE)

    def result(self, rng: random.Random, argument: str) -> tuple[str, str]:
        """(JSON the tool answers, sentence the model makes of it)."""
        if self.name == "get_weather":
            degrees, condition = rng.randint(0, 39), rng.choice(CONDITIONS)
            fields: dict[str, Any] = {"city": argument, "temperature": degrees, "condition": condition}
            return json.dumps(fields), f"It is {degrees} degrees and {condition} in {argument}."
        if self.name == "get_time":
            clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
            return json.dumps({"city": argument, "time": clock}), f"It is {clock} in {argument}."
        if self.name == "get_population":
            people = rng.randint(10, 99) * 1000
            return json.dumps({"city": argument, "population": people}), f"{argument} has {people} inhabitants."
        number = rng.randint(1000, 9999)
        return json.dumps({"person": argument, "number": number}), f"{argument}'s number is {number}."


TOOLS = tuple(Tool(**tool) for tool in WORDS["tools"])


def specification(tool: Tool, rng: random.Random) -> dict[str, Any]:
    """The {"type": "function", ...} object of an OpenAI request, in one of several wordings."""
    value: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.3:
        value["description"] = rng.choice(["Name of the " + tool.argument, f"The {tool.argument}"])
    parameters: dict[str, Any] = {"type": "object", "properties": {tool.argument: value}}
    if rng.random() < 0.7:
        parameters["required"] = [tool.argument]
    function: dict[str, Any] = {"name": tool.name}
    if rng.random() < 0.85:
        function["description"] = rng.choice(tool.descriptions)
    function["parameters"] = parameters
    return {"type": "function", "function": function}
