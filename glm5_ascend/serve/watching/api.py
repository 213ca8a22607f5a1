"""`watch`, the function of the command `glm5-ascend watch`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_ENVIRONMENT, EXIT_OK, ConfigError, json_frame
from glm5_ascend.files.written import write_named
from glm5_ascend.options import StrPath
from glm5_ascend.report.origin import without_login
from glm5_ascend.serve.client import Client, server_address
from glm5_ascend.serve.watching.canaries import ANSWER_S, SHIPPED, read_canaries
from glm5_ascend.serve.watching.poll import FINDINGS, GOOD, SILENT, Poller, WatchPoll

#: Seconds from one poll to the next.
INTERVAL_S = 10.0


@dataclass
class WatchReport:
    """Result of a watch.

    Attributes:
        outcomes: number of answers by outcome, of all polls.
        findings: name -> (number of the poll that first showed it, description).
        unreachable: number of polls without any answer.
    """

    url: str
    polls: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    unreachable: int = 0
    findings: dict[str, tuple[int, str]] = field(default_factory=dict)
    last: WatchPoll = field(default_factory=WatchPoll)

    def add(self, poll: WatchPoll) -> None:
        self.polls += 1
        self.outcomes += poll.outcomes
        self.unreachable += not poll.reached
        for name, description in poll.findings.items():
            self.findings.setdefault(name, (self.polls, description))
        self.last = poll

    @property
    def bad(self) -> int:
        """Number of questions without a good answer."""
        return self.outcomes.total() - self.outcomes[GOOD]

    @property
    def exit_code(self) -> int:
        """1: garbage was found; 3: the last poll got no answer; 0: neither."""
        if self.findings:
            return EXIT_CHECK_FAILED
        return EXIT_OK if self.last.reached else EXIT_ENVIRONMENT

    @property
    def verdict(self) -> str:
        """The result as one line."""
        asked = self.outcomes.total()
        counts = f"{self.polls} poll{'s' * (self.polls != 1)}, {asked - self.bad} of {asked} answers good"
        if self.findings:
            findings = "; ".join(f"{name} (poll {poll}): {text}" for name, (poll, text) in self.findings.items())
            return f"garbage: {findings}; {counts}"
        return f"ok: {counts}" if self.last.reached else f"unreachable: {self.url} does not answer; {counts}"

    def to_dict(self) -> dict[str, Any]:
        """JSON of `watch --json`."""
        return json_frame("watch", self.exit_code) | {
            "url": self.url, "verdict": self.verdict, "polls": self.polls, "asked": self.outcomes.total(),
            "bad": self.bad, "unreachable": self.unreachable,
            "findings": {name: {"poll": poll, "says": text} for name, (poll, text) in self.findings.items()},
            "logprob_shift_nats": self.last.shift, "messages": self.last.messages,
        }  # fmt: skip

    def metrics(self) -> str:
        """The state as Prometheus' node exporter reads it. Thresholds over time are rules of Prometheus."""
        url = without_login(self.url).replace("\\", r"\\").replace('"', r"\"")
        samples: dict[str, dict[str, float]] = {
            "up": {"": self.last.reached},
            "last_poll_timestamp_seconds": {"": time.time()},
            "answers_total": {f',outcome="{name}"': self.outcomes[name] for name in (GOOD, SILENT, *FINDINGS)},
            "finding": {f',finding="{name}"': name in self.last.findings for name in FINDINGS},
            "logprob_shift_nats": {} if self.last.shift is None else {"": self.last.shift},
        }
        lines = []
        for name, values in samples.items():
            lines.append(f"# TYPE glm5_watch_{name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines += [f'glm5_watch_{name}{{url="{url}"{label}}} {float(n):.10g}' for label, n in values.items()]
        return "\n".join(lines) + "\n"


def watch(
    url: str, *, canaries: StrPath | None = None, polls: int = 0, interval: float = INTERVAL_S,
    textfile: StrPath | None = None, key: str = "", timeout: float = ANSWER_S,
    on_poll: Callable[[int, WatchPoll], object] | None = None,
) -> WatchReport:  # fmt: skip
    """Watch a server for garbage: wrong or repeated answers, empty tool calls, moved log-probabilities.

    A server that does not answer is asked again in the next poll.

    Args:
        canaries: file of questions with known answers, as `learn_canaries` writes it; None: three sums.
        polls: number of polls; 0: no end. interval: seconds from one poll to the next.
        textfile: file of metrics for Prometheus' node exporter, written after each poll.
        key: API key of the server. timeout: seconds for one answer.
        on_poll: called with the number of polls so far and the last one.
    Raises:
        TextError: `canaries` is not such a file.
        ConfigError: not a URL, no directory for `textfile`, or a server without a model.
    """
    questions = SHIPPED if canaries is None else read_canaries(Path(canaries))
    if textfile and not Path(textfile).absolute().parent.is_dir():
        raise ConfigError(f"{textfile}: no such directory", "create it, or name another file with --textfile")
    client = Client(server_address(url), timeout=timeout, key=key)
    poller, report = Poller(client, questions.canaries), WatchReport(client.url)
    while True:
        began = time.monotonic()
        poll = poller.poll()
        report.add(poll)
        if textfile:
            write_named(Path(textfile), report.metrics())
        if on_poll is not None:
            on_poll(report.polls, poll)
        if report.polls == polls:
            return report
        time.sleep(max(0.0, began + interval - time.monotonic()))
