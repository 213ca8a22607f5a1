"""Questions whose answers are known: shipped ones, or a file that was learnt from a healthy server or written by hand.

    {"schema_version": 1, "canaries": [{"question": "What is 47 + 38?", "contains": "85"}]}

is a whole file. What a healthy server adds to it: its answers, the ids and log-probabilities of their tokens, and how
many tokens it makes per step of MTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckFailedError, TextError, shown
from glm5_ascend.files.untrusted import read_json_object
from glm5_ascend.files.written import write_file
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.smoke import CANARIES
from glm5_ascend.serve.watching.texts import ask_canary, fresh, repeats, tokens_per_step

#: How often each question is asked while it is learnt: what differs then is no sign of a fault.
ROUNDS = 3
#: Nats, mean over an answer's tokens of |log-probability - learnt one|. Broken weights and caches move it by 1 and
#: more; rounding that depends on the batch, by 0.05 and less.
SHIFT_FLOOR = 0.3
SHIFT_MARGIN = 4.0
#: Share of characters in common (difflib): two healthy answers to a short question have more, noise has less.
ALIKE = 0.5
STEADY = 0.8
MAX_FILE_BYTES = 4 * 1024**2
CITIES = ("Oslo", "Berlin")


@dataclass(frozen=True)
class Canary:
    """A question, and what is known of a right answer; each part may be unknown.

    Attributes:
        contains: text that every right answer has.
        answer: a healthy server's own, compared letter by letter.
        prompt_ids, token_ids: of question and answer, as the server's template and tokenizer make them.
        logprobs: of `token_ids` after `prompt_ids`, nats; `shift`: how far their mean may move.
    """

    question: str
    contains: str = ""
    answer: str = ""
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    shift: float = SHIFT_FLOOR

    def wrong(self, text: str) -> bool:
        """Whether an answer's text is none to this question."""
        if self.contains:
            return self.contains not in text
        return bool(self.answer) and likeness(self.answer, text) < ALIKE


@dataclass(frozen=True)
class CanarySet:
    """All canaries of a server. tokens_per_step: with MTP, while they were learnt; 0 without."""

    canaries: tuple[Canary, ...]
    cities: tuple[str, ...] = CITIES
    tokens_per_step: float = 0.0
    model: str = ""

    def save(self, path: Path) -> None:
        """As JSON, in place of an older file. Raises OutputError."""
        value = {"schema_version": 1, **asdict(self)}
        write_file(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


#: Asked where no file is given: the real GLM-5 and the demo model both know the answers.
SHIPPED = CanarySet(tuple(Canary(question, right) for question, right in CANARIES.items()))
#: What else a healthy server is asked when it is learnt.
LEARNT = (
    *SHIPPED.canaries,
    Canary("Repeat: Oslo Paris Rome"),
    Canary("Numbers: Anna 4711, Boris 8052. What is Boris's number?"),
    Canary("Who are you?"),
)


def likeness(one: str, other: str) -> float:
    """Share of characters in common, 0 to 1."""
    return SequenceMatcher(None, " ".join(one.split())[:400], " ".join(other.split())[:400], autojunk=False).ratio()


def read_canaries(path: Path) -> CanarySet:
    """A file of canaries.

    Raises:
        TextError: not there, or not such a file; names the entry.
    """
    fix = "write it with glm5-ascend watch URL --learn FILE"
    data = read_json_object(path, max_bytes=MAX_FILE_BYTES, error=TextError, fix=fix)
    entries = data.get("canaries")
    if not isinstance(entries, list) or not entries:
        raise TextError(f"{path}: no canaries in it", fix)
    found = []
    for number, entry in enumerate(entries, start=1):
        try:
            found.append(_canary(entry))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TextError(f"{path}: canary {number}: {shown(str(error), 120)}", fix) from None
    cities, per_step = data.get("cities", CITIES), data.get("tokens_per_step", 0.0)
    if not isinstance(cities, list | tuple) or not all(isinstance(each, str) for each in cities):
        raise TextError(f"{path}: cities is no list of names", fix)
    if not isinstance(per_step, int | float) or not 0 <= per_step < 100:
        raise TextError(f"{path}: tokens_per_step is {shown(per_step)}", fix)
    return CanarySet(tuple(found), tuple(cities), float(per_step), str(data.get("model", "")))


def _canary(entry: Any) -> Canary:
    texts = {name: entry.get(name, "") for name in ("question", "contains", "answer")}
    if not all(isinstance(text, str) for text in texts.values()) or not texts["question"]:
        raise TypeError("question, contains and answer are texts, question is not empty")
    prompt, tokens = tuple(entry.get("prompt_ids", ())), tuple(entry.get("token_ids", ()))
    if not all(type(each) is int and 0 <= each < 2**31 for each in (*prompt, *tokens)):
        raise TypeError("prompt_ids and token_ids are lists of token ids")
    logprobs = tuple(float(each) for each in entry.get("logprobs", ()))
    if len(logprobs) not in (0, len(tokens)) or not all(-1e4 < each <= 0 for each in logprobs):
        raise ValueError("logprobs has a number up to 0 for each of token_ids")
    shift = float(entry.get("shift", SHIFT_FLOOR))
    if not 0 < shift < 1e4:
        raise ValueError("shift is a number of nats above 0")
    return Canary(**texts, prompt_ids=prompt, token_ids=tokens, logprobs=logprobs, shift=shift)


def learn(client: Client, questions: Sequence[Canary] = LEARNT) -> CanarySet:
    """Ask a server that is known to be healthy, `ROUNDS` times each; what it does not answer alike is left out.

    Raises:
        CheckFailedError: it is not healthy: an answer is wrong or repeats itself, or hardly one is steady.
    """
    before = client.metrics()
    found = [canary for canary in (_learnt(client, question) for question in questions) if canary is not None]
    if len(found) < min(2, len(questions)):
        raise CheckFailedError(
            f"{client.url}: {len(found)} of {len(questions)} questions are answered alike {ROUNDS} times",
            "learn from a healthy server, at temperature 0",
        )
    per_step = tokens_per_step(before, client.metrics())
    return CanarySet(tuple(found), CITIES, per_step or 0.0, client.model)


def _learnt(client: Client, canary: Canary) -> Canary | None:
    """What the server says to one question; None where that is not the same each time and no part of it is known."""
    answers = [ask_canary(client, canary.question, **fresh()) for _ in range(ROUNDS)]
    texts = [answer.content.strip() for answer in answers]
    for text in texts:
        if not text or repeats(text) or (canary.contains and canary.contains not in text):
            raise CheckFailedError(
                f"{client.url} is not healthy: {canary.question!r} -> {shown(text, 80)}", "learn from a healthy server"
            )
    steady = min(likeness(texts[0], text) for text in texts) >= STEADY
    if not steady and not canary.contains:
        return None
    known = replace(canary, answer=texts[0] if steady else "")
    ids = answers[0].prompt_ids, answers[0].token_ids
    scored = [client.score(*ids) for _ in range(ROUNDS)] if all(ids) else []
    rounds = [each for each in scored if each is not None]
    if len(rounds) < ROUNDS:
        return known
    spread = max(mean_distance(rounds[0], other) for other in rounds)
    return replace(
        known, prompt_ids=tuple(ids[0]), token_ids=tuple(ids[1]), logprobs=tuple(rounds[0]),
        shift=max(SHIFT_FLOOR, SHIFT_MARGIN * spread),
    )  # fmt: skip


def mean_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean of the absolute differences, nats."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
