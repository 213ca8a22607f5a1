"""The same prompts to two servers: length of the answers, and how often they are right.

A prompts file is JSONL, one object a line: {"prompt": TEXT} or {"messages": [...]}, with "tools": [...] if functions
are offered, "task": TEXT for the task it belongs to, "chat_template_kwargs": {...} for the template, and "expected" if
the answer is judged. It is right if it ends with that text ("match": "ends", the default), is that text ("exact") or
contains it ("contains"); white space at both ends does not count. {"name": TEXT, "arguments": {...}} expects that one
call. Flips: see `metrics`. A tool call is kept where both models make the same calls with equal arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glm5_ascend.checkpoint.records import read_records
from glm5_ascend.errors import TextError
from glm5_ascend.fidelity.evaluation.intervals import mean_interval
from glm5_ascend.fidelity.evaluation.metrics import CHANGE, LENGTH, SHARE, Metric, mean_metric
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.client import Answer, Client

#: Concurrent requests.
CONCURRENCY = 8
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "ends": lambda answer, expected: answer.endswith(expected),
    "exact": lambda answer, expected: answer == expected,
    "contains": lambda answer, expected: expected in answer,
}


class ExpectedCall(BaseModel):
    """The only tool call of a correct answer."""

    name: str
    arguments: dict[str, Any]


class Prompt(BaseModel):
    """One line of a prompts file; `expected` is None where only the length counts."""

    model_config = ConfigDict(frozen=True, strict=True)

    messages: list[dict[str, Any]] = Field(min_length=1)
    expected: str | ExpectedCall | None = None
    match: Literal["ends", "exact", "contains"] = "ends"
    task: str = ""
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, record: Any) -> Any:
        if isinstance(record, dict) and isinstance(record.get("prompt"), str):
            return {**record, "messages": [{"role": "user", "content": record["prompt"]}]}
        return record

    @property
    def options(self) -> dict[str, Any]:
        """Further keys of the request."""
        options = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
        return {key: value for key, value in options.items() if value is not None}

    def right(self, answer: Answer) -> bool:
        if isinstance(self.expected, ExpectedCall):
            return tool_calls(answer) == [(self.expected.name, self.expected.arguments)]
        return self.expected is not None and MATCHES[self.match](answer.content.strip(), self.expected.strip())


def tool_calls(answer: Answer) -> list[tuple[str, Any]]:
    """(name, arguments) of the answer's tool calls; arguments that are not JSON stay text."""

    def parsed(arguments: str) -> Any:
        try:
            return parse_json(arguments)
        except ValueError:
            return arguments

    return [(name, parsed(arguments)) for name, arguments in answer.tool_calls]


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a JSONL file.

    Raises:
        TextError: unreadable, empty, or a line that is not a prompt.
    """
    prompts = []
    for line, record in read_records(path):
        try:
            prompts.append(Prompt.model_validate(record))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the record"
            raise TextError(f"{path}:{line}: {key}: {first['msg']}", "see glm5_ascend/fidelity/README.md") from None
    if not prompts:
        raise TextError(f"{path}: no prompts", 'one {"prompt": TEXT, "expected": TEXT} per line')
    return prompts


def generate(client: Client, prompts: Iterable[Prompt], max_tokens: int) -> list[Answer]:
    """Greedy answers, in order."""

    def ask(prompt: Prompt) -> Answer:
        return client.chat(prompt.messages, max_tokens=max_tokens, **prompt.options)

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(ask, prompts))


def generation_metrics(prompts: list[Prompt], reference: list[Answer], quantized: list[Answer]) -> list[Metric]:
    """Length inflation, tool calls kept and, where an answer is expected, scores and flips; intervals draw prompts."""
    lengths = [
        torch.tensor([float(answer.completion_tokens) for answer in answers], dtype=torch.float64)
        for answers in (reference, quantized)
    ]
    cut = [sum(answer.finish == "length" for answer in answers) for answers in (reference, quantized)]
    longer = lengths[1] - lengths[0]
    inflation, inflation_interval = float(longer.sum() / lengths[0].sum()), mean_interval(longer, lengths[0])
    rows = [
        mean_metric("length_source", f"tokens per answer, reference ({cut[0]} cut off)", lengths[0], LENGTH),
        mean_metric("length_quantized", f"tokens per answer, quantized ({cut[1]} cut off)", lengths[1], LENGTH),
        Metric("length_inflation", "longer answers", inflation, inflation_interval, CHANGE),
    ]
    pairs = [(tool_calls(a), tool_calls(b)) for a, b in zip(reference, quantized, strict=True)]
    same_calls = torch.tensor([a == b for a, b in pairs if a]).double()
    if len(same_calls):
        label = f"tool calls kept, of {len(same_calls)} answers with any"
        rows.append(mean_metric("tool_calls_kept", label, same_calls, SHARE))
    judged = [i for i, prompt in enumerate(prompts) if prompt.expected is not None]
    if judged:
        right = torch.tensor(
            [[prompts[i].right(reference[i]), prompts[i].right(quantized[i])] for i in judged]
        ).double()
        change = right[:, 1] - right[:, 0]
        rows += [
            mean_metric("score_source", "right answers, reference", right[:, 0], SHARE),
            mean_metric("score_quantized", "right answers, quantized", right[:, 1], SHARE),
            mean_metric("score_change", "change of right answers", change, CHANGE),
            mean_metric("answer_flips", "flipped answers", change.abs(), SHARE),
        ]
    return rows


def metrics_by_task(prompts: list[Prompt], reference: list[Answer], quantized: list[Answer]) -> dict[str, list[Metric]]:
    """`generation_metrics` of each named task."""
    figures = {}
    for task in dict.fromkeys(prompt.task for prompt in prompts if prompt.task):
        rows = [row for row in zip(prompts, reference, quantized, strict=True) if row[0].task == task]
        figures[task] = generation_metrics([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
    return figures
