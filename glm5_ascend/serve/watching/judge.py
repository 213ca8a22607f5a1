"""When answers and metrics are garbage. Everything is counted in polls and answers, nothing in seconds."""

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
    SILENT,
    TOOL,
    WRONG,
    WatchPoll,
)

#: Polls that are looked at together: a minute, at one every ten seconds.
WINDOW = 6
#: At once: half of a kind's answers are bad in one poll, at least two of them.
AT_ONCE, LEAST = 0.5, 2
#: In a window: this share, at least three answers, in at least two polls. One that is bad once in a while is no sign.
IN_WINDOW, LEAST_IN_WINDOW = 0.1, 3
#: Steps of MTP that a mean needs; below, nothing is said of it.
MIN_STEPS = 60
#: Of the tokens that MTP adds to a step, as learnt: less than this share is left.
SHARE_LEFT = 0.5
#: Tokens per step where nothing was learnt: GLM-5's first draft token alone is accepted in 0.86 to 0.9 of the steps.
LEAST_PER_STEP = 1.3
#: What is looked for: its name, the kinds of questions, and the outcomes that count as bad.
SIGNS = (
    ("wrong_answers", (CANARY,), (WRONG, EMPTY)),
    ("repeats", (CANARY, TOOL), (REPEATED,)),
    ("logprobs", (SCORE,), (MOVED,)),
    ("empty_tool_calls", (TOOL,), (EMPTY,)),
    ("refusals", (CANARY, SCORE, TOOL), (REFUSED,)),
)
ACCEPTANCE = "mtp_acceptance"
FINDINGS = (*(name for name, _, _ in SIGNS), ACCEPTANCE)


@dataclass
class WatchState:
    """After a poll. findings: name -> in words; figures: name -> value, shares of the window's answers."""

    reached: bool = True
    findings: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    per_step: dict[str, float] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


class Judge:
    """Remembers a window of polls.

    Args:
        learnt: tokens per step of a healthy server, 0 for unknown.
        least: tokens per step below which the acceptance is bad; None: by `learnt`, or `LEAST_PER_STEP`.
    """

    def __init__(self, learnt: float = 0.0, least: float | None = None) -> None:
        self.window: deque[WatchPoll] = deque(maxlen=WINDOW)
        if least is None:
            least = 1 + SHARE_LEFT * (learnt - 1) if learnt > 1 else LEAST_PER_STEP
        self.least = least

    def judge(self, poll: WatchPoll) -> WatchState:
        """What is known after this poll. One that reached nobody says nothing about answers, and is not remembered."""
        state = WatchState(poll.reached, said=list(poll.said))
        if poll.reached:
            self.window.append(poll)
        for name, kinds, outcomes in SIGNS:
            self._share(state, name, kinds, outcomes)
        self._acceptance(state)
        if poll.shift is not None:
            state.figures["logprob_shift_nats"] = poll.shift
        return state

    def _share(self, state: WatchState, name: str, kinds: tuple[str, ...], outcomes: tuple[str, ...]) -> None:
        counts = [
            (sum(poll.count(kind, *outcomes) for kind in kinds), sum(_answered(poll, kind) for kind in kinds))
            for poll in self.window
        ]
        bad, asked = sum(one for one, _ in counts), sum(all_ for _, all_ in counts)
        if not asked:
            return
        state.figures[name] = bad / asked
        last_bad, last = counts[-1]
        at_once = last_bad >= LEAST and last_bad >= AT_ONCE * last
        often = bad >= max(LEAST_IN_WINDOW, IN_WINDOW * asked) and sum(one > 0 for one, _ in counts) >= 2
        if at_once or often:
            state.findings[name] = f"{bad} of {asked} in the last {len(counts)} polls"

    def _acceptance(self, state: WatchState) -> None:
        """Of every engine (rank of attention DP) by itself: one bad among sixteen would vanish in their mean."""
        for engine, steps, accepted in self._steps():
            state.per_step[engine] = 1 + accepted / steps
        lengths = [poll.length for poll in self.window if poll.length is not None]
        if lengths:
            state.per_step[""] = lengths[-1]
        low = {engine: value for engine, value in state.per_step.items() if value < self.least}
        if low:
            engine = min(low, key=lambda each: low[each])
            of = f" of engine {engine}" if len(state.per_step) > 1 else ""
            state.findings[ACCEPTANCE] = f"{low[engine]:.2f} tokens per step{of}, {self.least:.2f} at least"

    def _steps(self) -> Iterator[tuple[str, float, float]]:
        """(engine, steps, accepted tokens) over as few of the last polls as make `MIN_STEPS`: a decay shows at once."""
        for engine in sorted({engine for poll in self.window for engine in poll.steps}):
            steps = accepted = 0.0
            for poll in reversed(self.window):
                more = poll.steps.get(engine, (0.0, 0.0))
                steps, accepted = steps + more[0], accepted + more[1]
                if steps >= MIN_STEPS:
                    yield engine, steps, accepted
                    break


def _answered(poll: WatchPoll, kind: str) -> int:
    return poll.count(kind) - poll.count(kind, SILENT)
