"""One round of questions to a watched server, and what /metrics counted meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError, shown
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.client import Answer, Client
from glm5_ascend.serve.smoke import ACCEPTED, DRAFTS, NO_THINKING, SGLANG_LENGTH, WEATHER, user
from glm5_ascend.serve.watching.canaries import Canary, CanarySet, mean_distance
from glm5_ascend.serve.watching.texts import MAX_TOKENS, ask_canary, fresh, repeats

#: What became of a question. SILENT: no answer in time, which a busy server may do.
GOOD, WRONG, REPEATED, EMPTY, MOVED, REFUSED, SILENT = (
    "good", "wrong", "repeated", "empty", "moved", "refused", "silent"
)  # fmt: skip
OUTCOMES = (GOOD, WRONG, REPEATED, EMPTY, MOVED, REFUSED, SILENT)
CANARY, SCORE, TOOL = "canary", "score", "tool"
#: Questions without an answer after which a poll ends.
PATIENCE = 2
Samples = Sequence[tuple[str, str, float]]


@dataclass
class WatchPoll:
    """What one round found.

    Attributes:
        outcomes: how many by (CANARY, SCORE or TOOL; outcome). SCORE: log-probabilities of a learnt answer.
        shift: largest mean distance of an answer's log-probabilities from the learnt ones, nats; None: none was known.
        steps: by engine, (steps of MTP, tokens accepted in them) since the poll before.
        length: tokens per step as SGLang tells them by itself, None elsewhere.
        said: what was not good, in words.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    shift: float | None = None
    steps: dict[str, tuple[float, float]] = field(default_factory=dict)
    length: float | None = None
    said: list[str] = field(default_factory=list)

    def count(self, kind: str, *outcomes: str) -> int:
        """How many of a kind; only those of `outcomes` where some are given."""
        return sum(
            n for (each, outcome), n in self.outcomes.items() if each == kind and outcome in (outcomes or OUTCOMES)
        )

    @property
    def reached(self) -> bool:
        """Whether anything was answered, were it an error."""
        return any(n for (_, outcome), n in self.outcomes.items() if outcome != SILENT)


class Poller:
    """Asks one server the same questions in each poll."""

    def __init__(self, client: Client, canaries: CanarySet) -> None:
        self.client, self.canaries = client, canaries
        self.counted: dict[tuple[str, str], float] = {}

    def poll(self) -> WatchPoll:
        """One round. A server that leaves the first questions without an answer is not asked the others."""
        found = WatchPoll()
        for kind, question, ask in self._questions(found):
            outcome, words = self._outcome(ask)
            found.outcomes[kind, outcome] += 1
            if outcome != GOOD:
                found.said.append(f"{outcome}: {question}: {words}")
            if not found.reached and found.outcomes.total() >= PATIENCE:
                return found
        try:
            self._read(found, self.client.samples())
        except MissingEnvironmentError as error:
            found.said.append(error.message)
        return found

    def _questions(self, found: WatchPoll) -> Iterator[tuple[str, str, Callable[[], tuple[str, str]]]]:
        """Kind, question, and what asks it."""
        for canary in self.canaries.canaries:
            yield CANARY, canary.question, partial(self._canary, canary)
            if canary.logprobs:
                yield SCORE, canary.question, partial(self._score, found, canary)
        for city in self.canaries.cities:
            yield TOOL, f"a tool for {city}", partial(self._tool, city)

    def _outcome(self, ask: Callable[[], tuple[str, str]]) -> tuple[str, str]:
        """What became of a question, and in words what was not good.

        Raises:
            ConfigError: the server does not have the model that was named.
        """
        try:
            if not self.client.model:
                self.client = replace(self.client, model=self.client.entry()["id"])
            return ask()
        except CheckFailedError as error:
            return REFUSED, error.message
        except MissingEnvironmentError as error:
            return SILENT, error.message

    def _canary(self, canary: Canary) -> tuple[str, str]:
        answer = ask_canary(self.client, canary.question, **fresh())
        text = answer.content
        if repeats(text) or repeats(answer.reasoning):
            return REPEATED, shown(text or answer.reasoning, 80)
        if not text.strip():
            return EMPTY, "an empty answer"
        return (WRONG, shown(text, 80)) if canary.wrong(text) else (GOOD, "")

    def _score(self, found: WatchPoll, canary: Canary) -> tuple[str, str]:
        now = self.client.score(list(canary.prompt_ids), list(canary.token_ids))
        if now is None:
            raise CheckFailedError("no log-probabilities, which it gave when the canaries were learnt")
        distance = mean_distance(canary.logprobs, now)
        found.shift = max(found.shift or 0.0, distance)
        if not distance <= canary.shift:  # NaN is far, too
            return MOVED, f"log-probabilities moved by {distance:.2f} nats on average, {canary.shift:.2f} are allowed"
        return GOOD, ""

    def _tool(self, city: str) -> tuple[str, str]:
        answer = self.client.chat(
            user(f"What is the weather in {city}?"), tools=[WEATHER], tool_choice="auto", max_tokens=MAX_TOKENS,
            **NO_THINKING, **fresh(),
        )  # fmt: skip
        if repeats(answer.content) or repeats(answer.reasoning):
            return REPEATED, shown(answer.content or answer.reasoning, 80)
        return (GOOD, "") if _called(answer) else (EMPTY, f"calls {shown(answer.tool_calls, 80)}")

    def _read(self, found: WatchPoll, samples: Samples) -> None:
        """Steps of MTP since the last reading; a counter that went back belongs to a new server."""
        now: dict[tuple[str, str], float] = {}
        for name, engine, value in samples:
            if name in (DRAFTS, ACCEPTED):
                now[name, engine] = now.get((name, engine), 0.0) + value
            elif name == SGLANG_LENGTH and value:
                found.length = value
        before, self.counted = self.counted, now
        for name, engine in now:
            if name == DRAFTS and (name, engine) in before:
                drafts = now[DRAFTS, engine] - before[DRAFTS, engine]
                accepted = now.get((ACCEPTED, engine), 0.0) - before.get((ACCEPTED, engine), 0.0)
                if drafts > 0 and accepted >= 0:
                    found.steps[engine] = drafts, accepted


def _called(answer: Answer) -> bool:
    """One call of the function, with a city in its arguments."""
    if len(answer.tool_calls) != 1:
        return False
    try:
        arguments = parse_json(answer.tool_calls[0][1])
    except ValueError:
        return False
    return isinstance(arguments, dict) and bool(arguments.get("city"))
