"""The same prompts to two servers: how long they answer, and how often they are right.

A prompts file is JSONL, one object a line: {"prompt": TEXT} or {"messages": [...]}, with "expected": TEXT if the answer
is to be judged. An answer is right if it ends with that text ("match": "ends", the default), is that text ("exact") or
has it somewhere ("contains"); white space at both ends does not count. Flips: see `metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.checkpoint.texts import read_records
from glm5_ascend.errors import TextError
from glm5_ascend.fidelity.evaluation.intervals import mean_interval
from glm5_ascend.fidelity.evaluation.metrics import Metric
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
    """One question; `expected` is None where length alone counts."""

    messages: list[dict[str, Any]]
    expected: str | None
    match: str

    def right(self, answer: str) -> bool:
        return self.expected is not None and MATCHES[self.match](answer.strip(), self.expected.strip())


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
        match = record.get("match", "ends")
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        if isinstance(messages, list) and messages and match in MATCHES and isinstance(expected, str | None):
            return Prompt(messages, expected, match)
    raise TextError(
        f'{path}:{line}: needs {{"prompt": TEXT}} or {{"messages": [...]}}, with "expected": TEXT and "match": '
        f"{' | '.join(MATCHES)} if wanted",
        "correct the record",
    )


def generate(client: Client, prompts: Iterable[Prompt], max_tokens: int) -> list[Answer]:
    """Greedy answers, in order."""

    def one(prompt: Prompt) -> Answer:
        return client.chat(prompt.messages, max_tokens=max_tokens)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, prompts))


def generation_metrics(prompts: list[Prompt], reference: list[Answer], this: list[Answer]) -> list[Metric]:
    """Length inflation and, over the prompts with an expected answer, scores and flips; drawn by prompt."""
    a = torch.tensor([float(answer.completion_tokens) for answer in reference], dtype=torch.float64)
    b = torch.tensor([float(answer.completion_tokens) for answer in this], dtype=torch.float64)
    inflation = mean_interval(b - a, a)
    cut = [sum(answer.finish == "length" for answer in answers) for answers in (reference, this)]
    rows = [
        Metric("length_source", f"tokens per answer, reference ({cut[0]} cut off)", float(a.mean()), mean_interval(a)),
        Metric("length_quantized", f"tokens per answer, this ({cut[1]} cut off)", float(b.mean()), mean_interval(b)),
        Metric("length_inflation", "longer answers", float((b - a).sum() / a.sum()), inflation, True),
    ]
    judged = [i for i, prompt in enumerate(prompts) if prompt.expected is not None]
    if judged:
        right = torch.tensor(
            [[prompts[i].right(reference[i].content), prompts[i].right(this[i].content)] for i in judged]
        ).double()
        for name, label, values in (
            ("score_source", "right answers, reference", right[:, 0]),
            ("score_quantized", "right answers, this", right[:, 1]),
            ("score_change", "change of right answers", right[:, 1] - right[:, 0]),
            ("answer_flips", "flipped answers", (right[:, 1] - right[:, 0]).abs()),
        ):
            rows.append(Metric(name, label, float(values.mean()), mean_interval(values), True))
    return rows
