"""Questions with known answers (canaries): the shipped ones, or a file written by `learn` or by hand.

    {"schema_version": 1, "canaries": [{"question": "What is 47 + 38?", "contains": "85"}]}

is a complete file. `learn` adds a healthy server's answers, the ids and log-probabilities of their tokens, and the
server's tokens per step of MTP.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glm5_ascend.errors import CheckFailedError, TextError, shown
from glm5_ascend.files.untrusted import read_json_object
from glm5_ascend.files.written import write_named
from glm5_ascend.serve.client import Answer, Client
from glm5_ascend.serve.smoke import CANARIES, NO_THINKING, ask, degenerate, drafts_and_accepted, user

#: Number of times that `learn` asks each question: answers that differ between them are not compared later.
ROUNDS = 3
#: Nats, mean over an answer's tokens of |log-probability - recorded one|. Broken weights and caches move it by 1 and
#: more; rounding that depends on the batch, by 0.05 and less.
SHIFT_FLOOR = 0.3
SHIFT_MARGIN = 4.0
#: Share of common characters (difflib): two healthy answers to a short question have more, noise has less.
MIN_SIMILARITY = 0.5
STEADY = 0.8
MAX_FILE_BYTES = 4 * 1024**2
#: Most tokens of an answer; later tokens mostly repeat.
MAX_TOKENS = 160
_PHRASE = re.compile(r"(.{8,120}?)\1{4,}", re.DOTALL)
_TIP = "write it with glm5-ascend watch URL --learn FILE"

_Id = Annotated[int, Field(ge=0, lt=2**31)]
_Logprob = Annotated[float, Field(gt=-1e4, le=0)]


class Canary(BaseModel):
    """A question, and what is known of a correct answer.

    Attributes:
        contains: text that every correct answer has.
        answer: a healthy server's answer.
        prompt_ids, token_ids: of question and answer, as the server's template and tokenizer make them.
        logprobs: of `token_ids` after `prompt_ids`, nats; `shift`: how far their mean may move.
    """

    model_config = ConfigDict(frozen=True)

    question: str = Field(min_length=1)
    contains: str = ""
    answer: str = ""
    prompt_ids: tuple[_Id, ...] = ()
    token_ids: tuple[_Id, ...] = ()
    logprobs: tuple[_Logprob, ...] = ()
    shift: float = Field(default=SHIFT_FLOOR, gt=0, lt=1e4)

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> Canary:
        if len(self.logprobs) not in (0, len(self.token_ids)):
            raise ValueError("logprobs needs one number per token of token_ids")
        return self

    def is_wrong(self, text: str) -> bool:
        """True for a text that does not answer this question."""
        if self.contains:
            return self.contains not in text
        return bool(self.answer) and similarity(self.answer, text) < MIN_SIMILARITY


class CanarySet(BaseModel):
    """All canaries of a server. tokens_per_step: with MTP, when they were recorded; 0 without."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    canaries: tuple[Canary, ...] = Field(min_length=1)
    cities: tuple[str, ...] = ("Oslo", "Berlin")
    tokens_per_step: float = Field(default=0.0, ge=0, lt=100)
    model: str = ""

    def save(self, path: Path) -> None:
        """Write JSON, over an older file. Raises OutputError."""
        write_named(path, self.model_dump_json(indent=1) + "\n")


#: Asked without a file: the real GLM-5 and the demo model both know the answers.
SHIPPED = CanarySet(canaries=tuple(Canary(question=question, contains=text) for question, text in CANARIES.items()))
#: Questions of `learn`.
LEARN_QUESTIONS = (
    *SHIPPED.canaries,
    Canary(question="Repeat: Oslo Paris Rome"),
    Canary(question="Numbers: Anna 4711, Boris 8052. What is Boris's number?"),
    Canary(question="Who are you?"),
)


def similarity(one: str, other: str) -> float:
    """Share of common characters, 0 to 1."""
    return SequenceMatcher(None, " ".join(one.split())[:400], " ".join(other.split())[:400], autojunk=False).ratio()


def repeats(text: str) -> bool:
    """True for a text that repeats a character, piece or phrase. An empty text repeats nothing."""
    stripped = text.strip()[:8000]
    return bool(stripped) and (degenerate(stripped) or _PHRASE.search(stripped) is not None)


def new_salt() -> dict[str, Any]:
    """A request field that keeps vLLM from answering out of its prefix cache, which could hide a fault."""
    return {"cache_salt": secrets.token_hex(8)}


def ask_canary(client: Client, question: str) -> Answer:
    """Ask greedily, without thinking if the model can; a thought that fills the answer gets more tokens."""
    return ask(client, user(question), max_tokens=MAX_TOKENS, return_token_ids=True, **NO_THINKING, **new_salt())


def mean_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean of the absolute differences, nats."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def read_canaries(path: Path) -> CanarySet:
    """Read a file of canaries.

    Raises:
        TextError: missing, or not such a file; names the entry.
    """
    data = read_json_object(path, max_bytes=MAX_FILE_BYTES, error=TextError, fix=_TIP)
    try:
        return CanarySet.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(index) for index in first["loc"]) or "the file"
        raise TextError(f"{path}: {key}: {first['msg']}", _TIP) from None


def learn(client: Client, questions: Sequence[Canary] = LEARN_QUESTIONS) -> CanarySet:
    """Record the answers of a healthy server, `ROUNDS` times each; leaves out questions with differing answers.

    Raises:
        CheckFailedError: it is not healthy: an answer is wrong or repeats itself, or almost no answer is steady.
    """
    before = client.metrics()
    canaries = [canary for canary in (_learn_one(client, question) for question in questions) if canary is not None]
    if len(canaries) < min(2, len(questions)):
        raise CheckFailedError(
            f"{client.url}: only {len(canaries)} of {len(questions)} questions get the same answer {ROUNDS} times",
            "learn from a healthy server, at temperature 0",
        )
    drafts, accepted = drafts_and_accepted(before, client.metrics())
    per_step = 1 + accepted / drafts if drafts > 0 else 0.0
    return CanarySet(canaries=tuple(canaries), tokens_per_step=per_step, model=client.model)


def _learn_one(client: Client, canary: Canary) -> Canary | None:
    """The canary with the server's answer; None if answers differ and no part of a correct one is known."""
    answers = [ask_canary(client, canary.question) for _ in range(ROUNDS)]
    texts = [answer.content.strip() for answer in answers]
    for text in texts:
        if not text or repeats(text) or (canary.contains and canary.contains not in text):
            raise CheckFailedError(
                f"{client.url} is not healthy: {canary.question!r} -> {shown(text, 80)}", "learn from a healthy server"
            )
    steady = min(similarity(texts[0], text) for text in texts) >= STEADY
    if not steady and not canary.contains:
        return None
    values: dict[str, Any] = {"answer": texts[0] if steady else ""}
    prompt_ids, token_ids = answers[0].prompt_ids, answers[0].token_ids
    scores = [client.score(prompt_ids, token_ids) for _ in range(ROUNDS)] if prompt_ids and token_ids else []
    logprobs = [score for score in scores if score is not None]
    if len(logprobs) == ROUNDS:
        spread = max(mean_distance(logprobs[0], other) for other in logprobs)
        shift = max(SHIFT_FLOOR, SHIFT_MARGIN * spread)
        values |= {"prompt_ids": prompt_ids, "token_ids": token_ids, "logprobs": logprobs[0], "shift": shift}
    return Canary(**{**canary.model_dump(), **values})
