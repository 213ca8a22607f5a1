"""The same prompts to two servers: how long they answer, and how often they are right.

A prompts file is JSONL, one object a line: {"prompt": TEXT} or {"messages": [...]}, with "tools": [...] if they are
offered, "task": TEXT for the family it belongs to, "chat_template_kwargs": {...} for the template, and "expected" if
the answer is to be judged. It is right if it ends with that text ("match": "ends", the default), is that text ("exact")
or has it somewhere ("contains"); white space at both ends does not count. {"name": TEXT, "arguments": {...}} expects
that one call. Flips: see `metrics`. A tool call is kept where both models make the same calls with equal arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.checkpoint.texts import read_records
from glm5_ascend.errors import TextError
from glm5_ascend.fidelity.evaluation.intervals import mean_interval
from glm5_ascend.fidelity.evaluation.metrics import Metric
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.client import Answer, Client

#: Requests under way at a time.
AT_ONCE = 8
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "ends": lambda answer, expected: answer.endswith(expected),
    "exact": lambda answer, expected: answer == expected,
    "contains": lambda answer, expected: expected in answer,
}


@dataclass(frozen=True)
class Prompt:
    """One question; `expected` is None where length alone counts. options: further keys of the request."""

    messages: list[dict[str, Any]]
    expected: str | dict[str, Any] | None
    match: str
    task: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def right(self, answer: Answer) -> bool:
        if isinstance(self.expected, dict):
            return calls(answer) == [(self.expected["name"], self.expected["arguments"])]
        return self.expected is not None and MATCHES[self.match](answer.content.strip(), self.expected.strip())


def calls(answer: Answer) -> list[tuple[str, Any]]:
    """Its tool calls, their arguments parsed; the text itself where it is no JSON."""
    return [(name, _parsed(arguments)) for name, arguments in answer.tool_calls]


def _parsed(arguments: str) -> Any:
    try:
        return parse_json(arguments)
    except ValueError:
        return arguments


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file.

    Raises:
        TextError: unreadable, empty, or a record that is none, by line.
    """
    prompts = [_prompt(path, line, record) for line, record in read_records(path)]
    if not prompts:
        raise TextError(f"{path}: no prompts", 'one {"prompt": TEXT, "expected": TEXT} per line')
    return prompts


def _prompt(path: Path, line: int, record: Any) -> Prompt:
    if isinstance(record, dict):
        prompt, messages, expected = (record.get(key) for key in ("prompt", "messages", "expected"))
        match, task = record.get("match", "ends"), record.get("task", "")
        options = {key: record[key] for key in ("tools", "chat_template_kwargs") if key in record}
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        known = match in MATCHES and isinstance(task, str) and _options_fit(options) and _expectable(expected)
        if isinstance(messages, list) and messages and known:
            return Prompt(messages, expected, match, task, options)
    raise TextError(
        f'{path}:{line}: needs {{"prompt": TEXT}} or {{"messages": [...]}}, with "expected": TEXT or '
        f'{{"name", "arguments"}}, "match": {" | ".join(MATCHES)}, "task": TEXT, "tools": [...] if wanted',
        "correct the record",
    )


def _options_fit(options: dict[str, Any]) -> bool:
    return isinstance(options.get("tools", []), list) and isinstance(options.get("chat_template_kwargs", {}), dict)


def _expectable(expected: Any) -> bool:
    if isinstance(expected, dict):
        return isinstance(expected.get("name"), str) and isinstance(expected.get("arguments"), dict)
    return isinstance(expected, str | None)


def generate(client: Client, prompts: Iterable[Prompt], max_tokens: int) -> list[Answer]:
    """Greedy answers, in order."""

    def one(prompt: Prompt) -> Answer:
        return client.chat(prompt.messages, max_tokens=max_tokens, **prompt.options)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, prompts))


def generation_metrics(prompts: list[Prompt], reference: list[Answer], this: list[Answer]) -> list[Metric]:
    """Length inflation, tool calls kept and, where an answer is expected, scores and flips; drawn by prompt."""
    a = torch.tensor([float(answer.completion_tokens) for answer in reference], dtype=torch.float64)
    b = torch.tensor([float(answer.completion_tokens) for answer in this], dtype=torch.float64)
    inflation = mean_interval(b - a, a)
    cut = [sum(answer.finish == "length" for answer in answers) for answers in (reference, this)]
    rows = [
        Metric("length_source", f"tokens per answer, reference ({cut[0]} cut off)", float(a.mean()), mean_interval(a)),
        Metric("length_quantized", f"tokens per answer, this ({cut[1]} cut off)", float(b.mean()), mean_interval(b)),
        Metric("length_inflation", "longer answers", float((b - a).sum() / a.sum()), inflation, True),
    ]
    called = [calls(answer) for answer in reference]
    kept = torch.tensor([made == calls(answer) for made, answer in zip(called, this, strict=True) if made]).double()
    if len(kept):
        label = f"tool calls kept, of {len(kept)} answers with any"
        rows.append(Metric("tool_calls_kept", label, float(kept.mean()), mean_interval(kept), True))
    judged = [i for i, prompt in enumerate(prompts) if prompt.expected is not None]
    if judged:
        right = torch.tensor([[prompts[i].right(reference[i]), prompts[i].right(this[i])] for i in judged]).double()
        for name, label, values in (
            ("score_source", "right answers, reference", right[:, 0]),
            ("score_quantized", "right answers, this", right[:, 1]),
            ("score_change", "change of right answers", right[:, 1] - right[:, 0]),
            ("answer_flips", "flipped answers", (right[:, 1] - right[:, 0]).abs()),
        ):
            rows.append(Metric(name, label, float(values.mean()), mean_interval(values), True))
    return rows


def metrics_by_task(prompts: list[Prompt], reference: list[Answer], this: list[Answer]) -> dict[str, list[Metric]]:
    """`generation_metrics` of each named task."""
    found = {}
    for task in dict.fromkeys(prompt.task for prompt in prompts if prompt.task):
        at = [i for i, prompt in enumerate(prompts) if prompt.task == task]
        found[task] = generation_metrics(*([part[i] for i in at] for part in (prompts, reference, this)))  # type: ignore[arg-type]
    return found
