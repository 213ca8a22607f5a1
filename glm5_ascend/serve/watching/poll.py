"""One round of questions to a watched server: bad answers, and the tokens per step of MTP since the last round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from statistics import fmean

from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError, shortened, shown
from glm5_ascend.serve.asking import FAILED, SmokeResult, unfinished_thought
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.mtp import MtpCounts, read_counts
from glm5_ascend.serve.probes import PROBES
from glm5_ascend.serve.smoke import tool_call
from glm5_ascend.serve.watching.canaries import SHIFT, Canary, CanarySet, ask_salted, repeats

#: Outcomes of a question besides the findings. SILENT: no answer in time, which can happen on a busy server.
GOOD, SILENT = "good", "silent"
WRONG, REPEATED, MOVED, EMPTY, REFUSED = "wrong_answers", "repeats", "logprobs", "empty_tool_calls", "refusals"
PROBE, ACCEPTANCE = "probes", "mtp_acceptance"
FINDINGS = (WRONG, REPEATED, MOVED, EMPTY, REFUSED, PROBE, ACCEPTANCE)
#: Bad answers of one sort in two polls that are a finding: a single one may be an accident. A probe asks several times.
BAD = 2
CITIES = ("Oslo", "Berlin")
#: Steps of MTP that a mean needs.
MIN_STEPS = 60
#: Least share of the recorded speed-up by MTP.
SPEEDUP_SHARE = 0.5
#: Least tokens per step if none were recorded: GLM-5's first draft token alone is accepted in 0.86 to 0.9 of the steps.
LEAST_PER_STEP = 1.3
#: Questions without an answer after which a poll ends.
PATIENCE = 2


@dataclass
class WatchPoll:
    """Result of one round.

    Attributes:
        outcomes: number of answers by outcome.
        findings: name -> description.
        shift: largest mean distance of an answer's log-probabilities from the recorded ones, nats; None: none recorded.
        per_step: engine -> tokens per step of MTP, over the last `MIN_STEPS` steps or more.
        messages: one line per bad answer.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, str] = field(default_factory=dict)
    shift: float | None = None
    per_step: dict[str, float] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def reached(self) -> bool:
        """True if the server answered anything, including errors."""
        return self.outcomes.total() > self.outcomes[SILENT]


class Poller:
    """Asks one server the same questions in each poll, and judges the answers of two polls together."""

    def __init__(self, client: Client, canaries: CanarySet) -> None:
        self.client, self.canaries = client, canaries.canaries
        recorded = canaries.tokens_per_step
        self.least = 1 + SPEEDUP_SHARE * (recorded - 1) if recorded > 1 else LEAST_PER_STEP
        self._probes = cycle(PROBES)
        self._last: Counter[str] = Counter()
        self._counts = MtpCounts()
        self._per_step: dict[str, float] = {}

    def poll(self) -> WatchPoll:
        """Ask all questions once; only the first ones if the server does not answer them."""
        result = WatchPoll()
        for question, put in self._questions(result):
            outcome, message = self._outcome(put)
            result.outcomes[outcome] += 1
            if outcome != GOOD:
                result.messages.append(f"{outcome}: {question}: {message}")
            if not result.reached and result.outcomes.total() >= PATIENCE:
                return result
        try:
            result.per_step = self._acceptance()
        except MissingEnvironmentError as error:
            result.messages.append(error.message)
        result.findings = self._findings(result)
        return result

    def _findings(self, result: WatchPoll) -> dict[str, str]:
        """Every engine's acceptance is judged: the mean of sixteen would hide a bad one."""
        both = self._last + result.outcomes
        self._last = result.outcomes
        least = {PROBE: 1}
        findings = {name: f"{both[name]} of {both.total()}" for name in FINDINGS if both[name] >= least.get(name, BAD)}
        lowest, engine = min(((n, engine) for engine, n in result.per_step.items()), default=(self.least, ""))
        if lowest < self.least:
            of = f" of engine {engine}" if len(result.per_step) > 1 else ""
            findings[ACCEPTANCE] = f"{lowest:.2f} tokens per step{of}, {self.least:.2f} at least"
        return findings

    def _questions(self, result: WatchPoll) -> Iterator[tuple[str, Callable[[], tuple[str, str]]]]:
        """Each question, and the function that asks it."""
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

    def _outcome(self, put: Callable[[], tuple[str, str]]) -> tuple[str, str]:
        """Outcome and message of a question. Raises `ConfigError` if the server has no model."""
        try:
            if not self.client.model:
                self.client = replace(self.client, model=self.client.entry()["id"])
            return put()
        except CheckFailedError as error:
            return REFUSED, error.message
        except MissingEnvironmentError as error:
            return SILENT, error.message

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

    def _acceptance(self) -> dict[str, float]:
        """Tokens per step of each engine. Counting goes on over polls until every engine has `MIN_STEPS` steps."""
        counts = read_counts(self.client)
        new = counts.since(self._counts)
        if min(new.steps.values(), default=MIN_STEPS) >= MIN_STEPS:
            self._counts, self._per_step = counts, new.per_step or self._per_step
        return self._per_step
