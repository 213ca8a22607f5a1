"""Questions with known answers (canaries): the shipped ones, or a file written by `learn_canaries` or by hand.

    {"schema_version": 1, "canaries": [{"question": "What is 47 + 38?", "contains": "85"}]}

is a complete file. `learn_canaries` adds a healthy server's answers, and the ids and log-probabilities of their tokens.
"""

from __future__ import annotations

import secrets
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from glm5_ascend.errors import CheckFailedError, TextError, shown
from glm5_ascend.files.untrusted import read_json_object
from glm5_ascend.files.written import write_named
from glm5_ascend.options import StrPath
from glm5_ascend.serve.asking import CANARIES, FAILED, NO_THINKING, ask, degenerate, judged, user
from glm5_ascend.serve.client import Answer, Client, server_address
from glm5_ascend.serve.probes import REPLACEMENT

#: Seconds for one answer.
ANSWER_S = 60.0
#: Number of times that `learn_canaries` asks each question: answers that differ between them are not compared later.
ROUNDS = 3
#: Nats, mean over an answer's tokens of |log-probability - recorded one|. Broken weights and caches move it by 1 and
#: more; rounding that depends on the batch, by 0.05 and less.
SHIFT = 0.3
#: Share of common characters (difflib): two healthy answers to a short question have more, noise has less.
MIN_SIMILARITY = 0.5
STEADY = 0.8
#: Most tokens of an answer; later tokens mostly repeat.
MAX_TOKENS = 160
_TIP = "write it with glm5-ascend watch URL --learn FILE"

_Id = Annotated[int, Field(ge=0, lt=2**31)]
_Logprob = Annotated[float, Field(gt=-1e4, le=0)]


class Canary(BaseModel, frozen=True):
    """A question, and what is known of a correct answer.

    Attributes:
        contains: text that every correct answer has.
        answer: a healthy server's answer.
        prompt_ids, token_ids: of question and answer, as the server's template and tokenizer make them.
        logprobs: of `token_ids` after `prompt_ids`, nats.
    """

    question: str = Field(min_length=1)
    contains: str = ""
    answer: str = ""
    prompt_ids: tuple[_Id, ...] = ()
    token_ids: tuple[_Id, ...] = ()
    logprobs: tuple[_Logprob, ...] = ()

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> Canary:
        if len(self.logprobs) not in (0, len(self.token_ids)):
            raise ValueError("logprobs needs one number per token of token_ids")
        return self

    def is_answered_by(self, text: str) -> bool:
        """False for an answer to another question, an empty or a broken one."""
        if not text.strip() or self.contains not in text or REPLACEMENT in text[:-1]:  # the last one may be cut
            return False
        return bool(self.contains) or not self.answer or similarity(self.answer, text) >= MIN_SIMILARITY


class CanarySet(BaseModel, frozen=True):
    """All canaries of a server."""

    schema_version: Literal[1] = 1
    canaries: tuple[Canary, ...] = Field(min_length=1)


#: Asked without a file: the real GLM-5 and the demo model both know the answers.
SHIPPED = CanarySet(canaries=tuple(Canary(question=question, contains=text) for question, text in CANARIES.items()))
#: Questions of `learn_canaries`.
LEARN_QUESTIONS = (
    *SHIPPED.canaries,
    Canary(question="Repeat: Oslo Paris Rome"),
    Canary(question="Numbers: Anna 4711, Boris 8052. What is Boris's number?"),
    Canary(question="Who are you?"),
)


def similarity(text: str, other: str) -> float:
    """Share of common characters, 0 to 1."""
    return SequenceMatcher(None, " ".join(text.split())[:400], " ".join(other.split())[:400], autojunk=False).ratio()


def repeats(text: str) -> bool:
    """True for a text that repeats a character, piece or phrase. An empty text repeats nothing."""
    return bool(text.strip()) and degenerate(text)


def ask_salted(client: Client, question: str) -> Answer:
    """Ask greedily, without thinking if the model can; a thought that fills the answer gets more tokens.

    A salt keeps vLLM from answering out of its prefix cache, which could hide a fault.
    """
    salt = {"cache_salt": secrets.token_hex(8), "return_token_ids": True}
    return ask(client, user(question), max_tokens=MAX_TOKENS, **NO_THINKING, **salt)


def read_canaries(path: Path) -> CanarySet:
    """Read a file of canaries.

    Raises:
        TextError: missing, or not such a file; names the entry.
    """
    data = read_json_object(path, error=TextError, fix=_TIP)
    try:
        return CanarySet.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(index) for index in first["loc"]) or "the file"
        raise TextError(f"{path}: {key}: {first['msg']}", _TIP) from None


def learn_canaries(
    url: str, file: StrPath, *, canaries: StrPath | None = None, key: str = "", timeout: float = ANSWER_S
) -> CanarySet:
    """Write the answers of a healthy server to `file`, for `watch`; leaves out questions with differing answers.

    Args:
        canaries: file with the questions; None: the shipped ones.
    Raises:
        CheckFailedError: an answer is wrong or repeats itself, or almost no answer is steady.
        TextError, ConfigError: as `watch`.
    """
    questions = LEARN_QUESTIONS if canaries is None else read_canaries(Path(canaries)).canaries
    client = Client(server_address(url), timeout=timeout, key=key).named()
    steady = [canary for canary in (_learn_one(client, question) for question in questions) if canary is not None]
    if len(steady) < min(2, len(questions)):
        raise CheckFailedError(
            f"{client.url}: only {len(steady)} of {len(questions)} questions get the same answer {ROUNDS} times",
            "learn from a healthy server, at temperature 0",
        )
    recorded = CanarySet(canaries=tuple(steady))
    write_named(Path(file), recorded.model_dump_json(indent=1) + "\n")
    return recorded


def _learn_one(client: Client, canary: Canary) -> Canary | None:
    """The canary with the server's answer; None if answers differ and no text of a correct one is known.

    Of a model that is too small for a question, the steady wrong answer is learnt.
    """
    answers = [ask_salted(client, canary.question) for _ in range(ROUNDS)]
    texts = [answer.content.strip() for answer in answers]
    for text in texts:
        if not text or repeats(text) or judged(client, canary.question, canary.contains, text) == FAILED:
            raise CheckFailedError(
                f"{client.url} is not healthy: {canary.question!r} -> {shown(text, 80)}", "learn from a healthy server"
            )
    if any(canary.contains not in text for text in texts):
        canary = canary.model_copy(update={"contains": ""})
    if min(similarity(texts[0], text) for text in texts) < STEADY:
        return canary if canary.contains else None
    prompt_ids, token_ids = answers[0].prompt_ids, answers[0].token_ids
    values = {**canary.model_dump(), "answer": texts[0]}
    if prompt_ids and token_ids and (logprobs := client.score(prompt_ids, token_ids)):
        values |= {"prompt_ids": prompt_ids, "token_ids": token_ids, "logprobs": logprobs}
    return Canary(**values)
