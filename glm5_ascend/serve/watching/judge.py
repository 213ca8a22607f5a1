"""Decides when answers and metrics are garbage. All bounds count polls and answers, not seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from glm5_ascend.serve.watching.poll import (
    CANARY,
    EMPTY,
    MOVED,
    REFUSED,
    REPEATED,
    SCORE,
    TOOL,
    WRONG,
    WatchPoll,
)

#: Number of polls that are judged together: one minute, at one poll every ten seconds.
WINDOW = 6
#: Immediate finding: half of the answers are bad in one poll, at least two of them.
IMMEDIATE_SHARE, IMMEDIATE_COUNT = 0.5, 2
#: Growing finding: this share of the window's answers is bad, at least three answers, in at least two polls.
WINDOW_SHARE, WINDOW_COUNT = 0.1, 3
#: Steps of MTP that a mean needs.
MIN_STEPS = 60
#: Least share of the recorded speed-up by MTP.
SPEEDUP_SHARE = 0.5
#: Least tokens per step if none were recorded: GLM-5's first draft token alone is accepted in 0.86 to 0.9 of the steps.
LEAST_PER_STEP = 1.3
#: Finding -> types of questions, outcomes that count as bad.
SIGNS = {
    "wrong_answers": ((CANARY,), (WRONG, EMPTY)),
    "repeats": ((CANARY, TOOL), (REPEATED,)),
    "logprobs": ((SCORE,), (MOVED,)),
    "empty_tool_calls": ((TOOL,), (EMPTY,)),
    "refusals": ((CANARY, SCORE, TOOL), (REFUSED,)),
}
ACCEPTANCE = "mtp_acceptance"
FINDINGS = (*SIGNS, ACCEPTANCE)


@dataclass
class WatchState:
    """State after a poll.

    Attributes:
        findings: name -> description.
        figures: name -> value; shares of the window's answers, and `logprob_shift_nats`.
        per_step: engine -> tokens per step of MTP.
        messages: one line per bad answer of the poll.
    """

    reached: bool = True
    findings: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    per_step: dict[str, float] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class Judge:
    """Keeps a window of polls.

    Args:
        recorded: tokens per step of a healthy server, 0 for unknown.
    Attributes:
        least: tokens per step below which the acceptance is bad.
    """

    def __init__(self, recorded: float = 0.0) -> None:
        self.window: deque[WatchPoll] = deque(maxlen=WINDOW)
        self.least = 1 + SPEEDUP_SHARE * (recorded - 1) if recorded > 1 else LEAST_PER_STEP

    def judge(self, poll: WatchPoll) -> WatchState:
        """State after this poll. A poll without any answer does not enter the window."""
        state = WatchState(poll.reached, messages=list(poll.messages))
        if poll.reached:
            self.window.append(poll)
        for name, (question_types, outcomes) in SIGNS.items():
            self._judge_share(state, name, question_types, outcomes)
        self._judge_acceptance(state)
        if poll.shift is not None:
            state.figures["logprob_shift_nats"] = poll.shift
        return state

    def _judge_share(
        self, state: WatchState, name: str, question_types: tuple[str, ...], outcomes: tuple[str, ...]
    ) -> None:
        bad = [sum(poll.count(question_type, outcomes) for question_type in question_types) for poll in self.window]
        answered = [sum(poll.answered(question_type) for question_type in question_types) for poll in self.window]
        total = sum(answered)
        if not total:
            return
        state.figures[name] = sum(bad) / total
        immediate = bad[-1] >= max(IMMEDIATE_COUNT, IMMEDIATE_SHARE * answered[-1])
        growing = sum(bad) >= max(WINDOW_COUNT, WINDOW_SHARE * total) and sum(count > 0 for count in bad) >= 2
        if immediate or growing:
            state.findings[name] = f"{sum(bad)} of {total} in the last {len(bad)} polls"

    def _judge_acceptance(self, state: WatchState) -> None:
        """Judge every engine (rank of attention DP) separately: the mean of sixteen would hide one bad engine."""
        for engine, steps, accepted in self._steps():
            state.per_step[engine] = 1 + accepted / steps
        lengths = [poll.length for poll in self.window if poll.length is not None]
        if lengths:
            state.per_step[""] = lengths[-1]
        low = {engine: value for engine, value in state.per_step.items() if value < self.least}
        if low:
            engine = min(low, key=lambda name: low[name])
            of = f" of engine {engine}" if len(state.per_step) > 1 else ""
            state.findings[ACCEPTANCE] = f"{low[engine]:.2f} tokens per step{of}, {self.least:.2f} at least"

    def _steps(self) -> Iterator[tuple[str, float, float]]:
        """(engine, steps, accepted tokens) over the fewest last polls with `MIN_STEPS` steps: shows a decay at once."""
        for engine in sorted({engine for poll in self.window for engine in poll.steps}):
            steps = accepted = 0.0
            for poll in reversed(self.window):
                more = poll.steps.get(engine, (0.0, 0.0))
                steps, accepted = steps + more[0], accepted + more[1]
                if steps >= MIN_STEPS:
                    yield engine, steps, accepted
                    break
