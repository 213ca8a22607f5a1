"""`watch` and `learn_canaries`, the functions of the command `glm5-ascend watch`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_ENVIRONMENT, EXIT_OK, ConfigError
from glm5_ascend.files.written import write_named
from glm5_ascend.options import StrPath, with_options
from glm5_ascend.serve.client import Client, server_address
from glm5_ascend.serve.options import WatchOptions
from glm5_ascend.serve.watching.canaries import LEARN_QUESTIONS, SHIPPED, CanarySet, learn, read_canaries
from glm5_ascend.serve.watching.judge import Judge, WatchState
from glm5_ascend.serve.watching.metrics import WatchMetrics
from glm5_ascend.serve.watching.poll import GOOD, Poller, WatchPoll

#: Polls of `--once`: a fault in one poll alone may be an accident.
ONCE = 2


@dataclass
class WatchReport:
    """Result of a watch.

    Attributes:
        findings: name -> (number of the poll that first showed it, description).
        unreachable: number of polls without any answer.
        last: state after the last poll.
    """

    url: str
    polls: int = 0
    asked: int = 0
    bad: int = 0
    unreachable: int = 0
    findings: dict[str, tuple[int, str]] = field(default_factory=dict)
    last: WatchState = field(default_factory=WatchState)

    def add(self, poll: WatchPoll, state: WatchState) -> None:
        self.polls += 1
        self.asked += poll.outcomes.total()
        self.bad += sum(n for (_, outcome), n in poll.outcomes.items() if outcome != GOOD)
        self.unreachable += not state.reached
        for name, description in state.findings.items():
            self.findings.setdefault(name, (self.polls, description))
        self.last = state

    @property
    def exit_code(self) -> int:
        """1: garbage was found; 3: the last poll got no answer; 0: neither."""
        if self.findings:
            return EXIT_CHECK_FAILED
        return EXIT_OK if self.last.reached else EXIT_ENVIRONMENT

    @property
    def verdict(self) -> str:
        """The result as one line."""
        counts = f"{self.polls} poll{'s' * (self.polls != 1)}, {self.asked - self.bad} of {self.asked} answers good"
        if self.findings:
            findings = "; ".join(f"{name} (poll {number}): {text}" for name, (number, text) in self.findings.items())
            return f"garbage: {findings}; {counts}"
        return f"ok: {counts}" if self.last.reached else f"unreachable: {self.url} does not answer; {counts}"

    def to_dict(self) -> dict[str, Any]:
        """JSON of `watch --json`."""
        return {
            "schema_version": 1, "command": "watch", "ok": self.exit_code == EXIT_OK, "exit_code": self.exit_code,
            "url": self.url, "verdict": self.verdict, "polls": self.polls, "asked": self.asked, "bad": self.bad,
            "unreachable": self.unreachable,
            "findings": {name: {"poll": number, "says": text} for name, (number, text) in self.findings.items()},
            "figures": self.last.figures, "mtp_tokens_per_step": self.last.per_step, "messages": self.last.messages,
        }  # fmt: skip


@with_options(WatchOptions)
def watch(options: WatchOptions) -> WatchReport:
    """Watch a server for garbage: wrong or repeated answers, empty tool calls, moved log-probabilities, low acceptance.

    A server that does not answer is asked again in the next poll.

    Raises:
        TextError: `canaries` is not such a file.
        ConfigError: not a URL, no directory for `textfile`, or a model that the server does not have.
    """
    canaries = SHIPPED if options.canaries is None else read_canaries(Path(options.canaries))
    textfile = options.textfile and Path(options.textfile)
    if textfile and not textfile.absolute().parent.is_dir():
        raise ConfigError(f"{textfile}: no such directory", "create it, or name another file with --textfile")
    client = Client(server_address(options.url), options.model, options.timeout, options.key)
    poller, report = Poller(client, canaries), WatchReport(client.url)
    judge = Judge(canaries.tokens_per_step)
    metrics = WatchMetrics(client.url, judge.least)
    while True:
        began = time.monotonic()
        poll = poller.poll()
        state = judge.judge(poll)
        report.add(poll, state)
        text = metrics.add(poll, state)
        if textfile:
            write_named(textfile, text)
        if options.on_poll is not None:
            options.on_poll(report.polls, state)
        if report.polls == (ONCE if options.once else options.polls):
            return report
        if not options.once:
            time.sleep(max(0.0, began + options.interval - time.monotonic()))


def learn_canaries(
    url: str, file: StrPath, *, canaries: StrPath | None = None, model: str = "", timeout: float = 60.0, key: str = ""
) -> CanarySet:
    """Write the answers of a healthy server to `file`, for `watch`.

    Args:
        canaries: file with the questions; None: the shipped ones.
    Raises:
        CheckFailedError: the server is not healthy. Others as `watch`.
    """
    questions = LEARN_QUESTIONS if canaries is None else read_canaries(Path(canaries)).canaries
    client = Client(server_address(url), model, timeout, key)
    recorded = learn(replace(client, model=client.entry()["id"]), questions)
    recorded.save(Path(file))
    return recorded
