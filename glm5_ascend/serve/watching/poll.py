"""One round of questions to a watched server, and what two rounds say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from statistics import fmean

from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError, shortened, shown
from glm5_ascend.serve.asking import FAILED, SmokeResult, unfinished_thought
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.probes import PROBES
from glm5_ascend.serve.smoke import tool_call
from glm5_ascend.serve.watching.canaries import SHIFT, Canary, ask_salted, repeats

#: Outcomes of a question besides the findings. SILENT: no answer in time, which can happen on a busy server.
GOOD, SILENT = "good", "silent"
WRONG, REPEATED, MOVED, EMPTY, REFUSED = "wrong_answers", "repeats", "logprobs", "empty_tool_calls", "refusals"
PROBE = "probes"
#: Bad answers of one sort in two polls that are a finding: a single one may be an accident. A probe asks several times.
FINDINGS = {WRONG: 2, REPEATED: 2, MOVED: 2, EMPTY: 2, REFUSED: 2, PROBE: 1}
CITIES = ("Oslo", "Berlin")
#: Questions without an answer after which a poll ends.
PATIENCE = 2


@dataclass
class WatchPoll:
    """Result of one round.

    Attributes:
        outcomes: number of answers by outcome.
        findings: name -> description.
        shift: largest mean distance of an answer's log-probabilities from the recorded ones, nats; None: none recorded.
        messages: one line per bad answer.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, str] = field(default_factory=dict)
    shift: float | None = None
    messages: list[str] = field(default_factory=list)

    @property
    def reached(self) -> bool:
        """True if the server answered anything, including errors."""
        return self.outcomes.total() > self.outcomes[SILENT]


class Poller:
    """Asks one server the same questions in each poll, and judges the answers of two polls together."""

    def __init__(self, client: Client, canaries: Sequence[Canary]) -> None:
        self.client, self.canaries = client, canaries
        self._probes = cycle(PROBES)
        self._last: Counter[str] = Counter()

    def poll(self) -> WatchPoll:
        """Ask all questions once; only the first ones if the server does not answer them.

        Raises:
            ConfigError: the server has no model.
        """
        result = WatchPoll()
        for question, put in self._questions(result):
            try:
                self.client = self.client if self.client.model else self.client.named()
                outcome, message = put()
            except CheckFailedError as error:
                outcome, message = REFUSED, error.message
            except MissingEnvironmentError as error:
                outcome, message = SILENT, error.message
            result.outcomes[outcome] += 1
            if outcome != GOOD:
                result.messages.append(f"{outcome}: {question}: {message}")
            if not result.reached and result.outcomes.total() >= PATIENCE:
                return result
        both, self._last = self._last + result.outcomes, result.outcomes
        result.findings = {
            name: f"{both[name]} of {both.total()}" for name, least in FINDINGS.items() if both[name] >= least
        }
        return result

    def _questions(self, result: WatchPoll) -> Iterator[tuple[str, Callable[[], tuple[str, str]]]]:
        """Each question, and the function that asks it and returns outcome and message."""
        for canary in self.canaries:
            yield canary.question, partial(self._ask, canary)
            if canary.logprobs:
                yield f"score of {canary.question}", partial(self._score, result, canary)
        for city in CITIES:
            yield f"tool call for {city}", partial(self._check, EMPTY, partial(tool_call, city=city))
        probe = next(self._probes)  # one in each poll
        yield probe, partial(self._check, PROBE, PROBES[probe])

    def _check(self, sign: str, check: Callable[[Client], SmokeResult]) -> tuple[str, str]:
        result = check(self.client)
        return (sign, shortened(result.detail, 160)) if result.status == FAILED else (GOOD, "")

    def _ask(self, canary: Canary) -> tuple[str, str]:
        answer = ask_salted(self.client, canary.question)
        if repeats(answer.content) or repeats(answer.reasoning):
            return REPEATED, shown(answer.content or answer.reasoning, 80)
        good = unfinished_thought(answer) or canary.is_answered_by(answer.content)
        return (GOOD, "") if good else (WRONG, shown(answer.content, 80))

    def _score(self, result: WatchPoll, canary: Canary) -> tuple[str, str]:
        logprobs = self.client.score(list(canary.prompt_ids), list(canary.token_ids))
        if logprobs is None:
            raise CheckFailedError("no log-probabilities, which the server returned when the canaries were recorded")
        distance = fmean(abs(now - before) for now, before in zip(logprobs, canary.logprobs, strict=True))
        result.shift = max(result.shift or 0.0, distance)
        if not distance <= SHIFT:  # NaN is bad, too
            return MOVED, f"log-probabilities moved by {distance:.2f} nats on average, {SHIFT} are allowed"
        return GOOD, ""
