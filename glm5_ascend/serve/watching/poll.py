"""One round of questions to a watched server, with the MTP counts of /metrics since the last round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError, shortened, shown
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.smoke import (
    ACCEPTED,
    DRAFTS,
    NO_THINKING,
    SGLANG_LENGTH,
    WEATHER,
    ask,
    tool_problem,
    unfinished_thought,
    user,
)
from glm5_ascend.serve.watching.canaries import (
    MAX_TOKENS,
    Canary,
    CanarySet,
    ask_canary,
    mean_distance,
    new_salt,
    repeats,
)

#: Outcomes of a question. SILENT: no answer in time, which can happen on a busy server.
GOOD, WRONG, REPEATED, EMPTY, MOVED, REFUSED, SILENT = (
    "good", "wrong", "repeated", "empty", "moved", "refused", "silent"
)  # fmt: skip
#: Types of questions. SCORE: log-probabilities of a recorded answer.
CANARY, SCORE, TOOL = "canary", "score", "tool"
#: Questions without an answer after which a poll ends.
PATIENCE = 2


@dataclass
class WatchPoll:
    """Result of one round.

    Attributes:
        outcomes: counts by (type of question, outcome).
        shift: largest mean distance of an answer's log-probabilities from the recorded ones, nats; None: none recorded.
        steps: engine -> (steps of MTP, tokens accepted in them) since the last poll.
        length: SGLang's own mean of tokens per step; None for other engines.
        messages: one line per bad answer.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    shift: float | None = None
    steps: dict[str, tuple[float, float]] = field(default_factory=dict)
    length: float | None = None
    messages: list[str] = field(default_factory=list)

    def count(self, question_type: str, outcomes: Sequence[str]) -> int:
        return sum(self.outcomes[question_type, outcome] for outcome in outcomes)

    def answered(self, question_type: str) -> int:
        return sum(n for (name, outcome), n in self.outcomes.items() if name == question_type and outcome != SILENT)

    @property
    def reached(self) -> bool:
        """True if the server answered anything, including errors."""
        return any(n for (_, outcome), n in self.outcomes.items() if outcome != SILENT)


class Poller:
    """Asks one server the same questions in each poll."""

    def __init__(self, client: Client, canaries: CanarySet) -> None:
        self.client, self.canaries = client, canaries
        self._counters: dict[tuple[str, str], float] = {}

    def poll(self) -> WatchPoll:
        """Ask all questions once; only the first ones if the server does not answer them."""
        result = WatchPoll()
        for question_type, question, put in self._questions(result):
            outcome, message = self._outcome(put)
            result.outcomes[question_type, outcome] += 1
            if outcome != GOOD:
                result.messages.append(f"{outcome}: {question}: {message}")
            if not result.reached and result.outcomes.total() >= PATIENCE:
                return result
        try:
            self._read_metrics(result)
        except MissingEnvironmentError as error:
            result.messages.append(error.message)
        return result

    def _questions(self, result: WatchPoll) -> Iterator[tuple[str, str, Callable[[], tuple[str, str]]]]:
        """Type, question, and the function that asks it."""
        for canary in self.canaries.canaries:
            yield CANARY, canary.question, partial(self._ask_canary, canary)
            if canary.logprobs:
                yield SCORE, canary.question, partial(self._score, result, canary)
        for city in self.canaries.cities:
            yield TOOL, f"a tool for {city}", partial(self._ask_tool, city)

    def _outcome(self, ask: Callable[[], tuple[str, str]]) -> tuple[str, str]:
        """Outcome and message of a question. Raises `ConfigError` if the server does not have the requested model."""
        try:
            if not self.client.model:
                self.client = replace(self.client, model=self.client.entry()["id"])
            return ask()
        except CheckFailedError as error:
            return REFUSED, error.message
        except MissingEnvironmentError as error:
            return SILENT, error.message

    def _ask_canary(self, canary: Canary) -> tuple[str, str]:
        answer = ask_canary(self.client, canary.question)
        text = answer.content
        if repeats(text) or repeats(answer.reasoning):
            return REPEATED, shown(text or answer.reasoning, 80)
        if unfinished_thought(answer):
            return GOOD, ""
        if not text.strip():
            return EMPTY, "an empty answer"
        return (WRONG, shown(text, 80)) if canary.is_wrong(text) else (GOOD, "")

    def _score(self, result: WatchPoll, canary: Canary) -> tuple[str, str]:
        logprobs = self.client.score(list(canary.prompt_ids), list(canary.token_ids))
        if logprobs is None:
            raise CheckFailedError("no log-probabilities, which the server returned when the canaries were recorded")
        distance = mean_distance(canary.logprobs, logprobs)
        result.shift = max(result.shift or 0.0, distance)
        if not distance <= canary.shift:  # NaN is bad, too
            return MOVED, f"log-probabilities moved by {distance:.2f} nats on average, {canary.shift:.2f} are allowed"
        return GOOD, ""

    def _ask_tool(self, city: str) -> tuple[str, str]:
        answer = ask(
            self.client, user(f"What is the weather in {city}?"), tools=[WEATHER], tool_choice="auto",
            max_tokens=MAX_TOKENS, **NO_THINKING, **new_salt(),
        )  # fmt: skip
        if repeats(answer.content) or repeats(answer.reasoning):
            return REPEATED, shown(answer.content or answer.reasoning, 80)
        if unfinished_thought(answer):
            return GOOD, ""
        problem = tool_problem(answer, city)
        return (EMPTY, shortened(problem, 80)) if problem else (GOOD, "")

    def _read_metrics(self, result: WatchPoll) -> None:
        """Add the MTP steps since the last reading; a counter that decreased belongs to a restarted server."""
        counters: dict[tuple[str, str], float] = {}
        for name, engine, value in self.client.samples():
            if name in (DRAFTS, ACCEPTED):
                counters[name, engine] = counters.get((name, engine), 0.0) + value
            elif name == SGLANG_LENGTH and value:
                result.length = value
        before, self._counters = self._counters, counters
        for name, engine in counters:
            if name == DRAFTS and (name, engine) in before:
                drafts = counters[DRAFTS, engine] - before[DRAFTS, engine]
                accepted = counters.get((ACCEPTED, engine), 0.0) - before.get((ACCEPTED, engine), 0.0)
                if drafts > 0 and accepted >= 0:
                    result.steps[engine] = drafts, accepted
