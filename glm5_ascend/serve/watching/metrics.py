"""Metrics of a watch for Prometheus, as a file for the node exporter's textfile collector."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from glm5_ascend.serve.watching.judge import FINDINGS, WatchState
from glm5_ascend.serve.watching.poll import WatchPoll

HELP = {
    "up": ("gauge", "1 if the server answered anything in the last poll."),
    "healthy": ("gauge", "1 if it answered and there is no finding."),
    "polls_total": ("counter", "Polls so far."),
    "last_poll_timestamp_seconds": ("gauge", "When the last poll ended."),
    "answers_total": ("counter", "Answers by type of question and outcome."),
    "finding": ("gauge", "1 while there is a finding of this name."),
    "bad_ratio": ("gauge", "Share of bad answers in the last polls, by finding."),
    "logprob_shift_nats": ("gauge", "Largest mean distance of an answer's log-probabilities from the recorded ones."),
    "mtp_tokens_per_step": ("gauge", "Tokens per step of MTP, by engine."),
    "mtp_tokens_per_step_least": ("gauge", "Below this value the acceptance counts as broken."),
}
PREFIX = "glm5_watch_"
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass
class WatchMetrics:
    """Metrics of all polls so far. `url` is a label of every sample, without its login."""

    url: str
    least_per_step: float
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    polls: int = 0

    def add(self, poll: WatchPoll, state: WatchState) -> str:
        """Add a poll; returns the text for Prometheus."""
        self.polls += 1
        self.answers += poll.outcomes
        return "\n".join(self._lines(state)) + "\n"

    def _lines(self, state: WatchState) -> Iterator[str]:
        values: dict[str, list[tuple[dict[str, str], float]]] = {
            "up": [({}, state.reached)],
            "healthy": [({}, state.reached and not state.findings)],
            "polls_total": [({}, self.polls)],
            "last_poll_timestamp_seconds": [({}, round(time.time(), 3))],
            "answers_total": [({"kind": name, "outcome": to}, n) for (name, to), n in sorted(self.answers.items())],
            "finding": [({"finding": name}, name in state.findings) for name in FINDINGS],
            "bad_ratio": [({"finding": name}, state.figures[name]) for name in FINDINGS if name in state.figures],
            "logprob_shift_nats": [({}, v) for name, v in state.figures.items() if name == "logprob_shift_nats"],
            "mtp_tokens_per_step": [({"engine": engine}, value) for engine, value in sorted(state.per_step.items())],
            "mtp_tokens_per_step_least": [({}, self.least_per_step)],
        }
        for name, samples in values.items():
            metric_type, text = HELP[name]
            if samples:
                yield f"# HELP {PREFIX}{name} {text}"
                yield f"# TYPE {PREFIX}{name} {metric_type}"
            for labels, value in samples:
                all_labels = {"url": _LOGIN.sub("", self.url), **labels}
                pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in all_labels.items())
                yield f"{PREFIX}{name}{{{pairs}}} {float(value):.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
