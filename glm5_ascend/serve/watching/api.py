"""`watch()`: what the command `glm5-ascend watch` calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_ENVIRONMENT, EXIT_OK, ConfigError
from glm5_ascend.files.written import write_file
from glm5_ascend.serve.client import Client, server_address
from glm5_ascend.serve.watching.canaries import LEARNT, SHIPPED, CanarySet, learn, read_canaries
from glm5_ascend.serve.watching.judge import Judge, WatchState
from glm5_ascend.serve.watching.metrics import WatchMetrics, exported
from glm5_ascend.serve.watching.poll import GOOD, Poller, WatchPoll

#: Polls of `--once`: what is bad in one alone may be an accident.
ONCE = 2
OnPoll = Callable[[int, WatchState], object]


@dataclass
class WatchReport:
    """What a watch has seen.

    Attributes:
        findings: name -> (number of the poll that first showed it, in words).
        unreachable: polls in which nothing answered.
        last: the state after the last poll.
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
        for name, words in state.findings.items():
            self.findings.setdefault(name, (self.polls, words))
        self.last = state

    @property
    def exit_code(self) -> int:
        """1: garbage was found; 3: nothing answered in the last poll; 0: neither."""
        if self.findings:
            return EXIT_CHECK_FAILED
        return EXIT_OK if self.last.reached else EXIT_ENVIRONMENT

    @property
    def verdict(self) -> str:
        """One line."""
        of = f"{self.polls} poll{'s' * (self.polls != 1)}, {self.asked - self.bad} of {self.asked} answers good"
        if self.findings:
            found = "; ".join(f"{name} (poll {number}): {words}" for name, (number, words) in self.findings.items())
            return f"garbage: {found}; {of}"
        return f"ok: {of}" if self.last.reached else f"unreachable: {self.url} answers nothing; {of}"

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "schema_version": 1, "command": "watch", "ok": self.exit_code == EXIT_OK, "exit_code": self.exit_code,
            "url": self.url, "verdict": self.verdict, "polls": self.polls, "asked": self.asked, "bad": self.bad,
            "unreachable": self.unreachable,
            "findings": {name: {"poll": number, "says": words} for name, (number, words) in self.findings.items()},
            "figures": self.last.figures, "mtp_tokens_per_step": self.last.per_step, "said": self.last.said,
        }  # fmt: skip


def watch(
    url: str,
    *,
    canaries: str | Path | None = None,
    polls: int = 0,
    interval: float = 10.0,
    once: bool = False,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    textfile: str | Path | None = None,
    min_acceptance: float | None = None,
    model: str = "",
    timeout: float = 60.0,
    key: str = "",
    on_poll: OnPoll | None = None,
) -> WatchReport:
    """Ask known questions again and again: wrong or repeated answers, empty tool calls, moved log-probabilities, MTP.

    A server that is not there yet, or no more, is waited for.

    Args:
        canaries: file of questions, by `learn_canaries` or by hand; None asks three sums.
        polls: stop after so many; 0: never. interval: seconds from the begin of one to the begin of the next.
        once: `ONCE` polls, one right after the other.
        metrics_port: GET /metrics there for Prometheus, on `metrics_host`; 0: any free port.
        textfile: file that is written anew after each poll, for the node exporter.
        min_acceptance: tokens per step with MTP; None: half the gain that the file states, 1.3 without one.
        model, key: the server's name for the model ("" is its first), and its API key.
        timeout: seconds to wait for one answer.
        on_poll: called with the number of polls and the state after each.
    Raises:
        TextError: `canaries` is no such file. ConfigError: no URL, a port that is taken, a model it does not serve.
    """
    given = SHIPPED if canaries is None else read_canaries(Path(canaries))
    if textfile is not None and not Path(textfile).absolute().parent.is_dir():
        raise ConfigError(f"{textfile}: no such directory", "create it, or name another file with --textfile")
    client = Client(server_address(url), model, timeout, key)
    watcher, judge, report = (
        Poller(client, given),
        Judge(given.tokens_per_step, min_acceptance),
        WatchReport(client.url),
    )
    metrics = WatchMetrics(client.url, judge.least)
    with exported(metrics, metrics_port, metrics_host):
        for number in itertools.count(1):
            began = time.monotonic()
            poll = watcher.poll()
            state = judge.judge(poll)
            report.add(poll, state)
            metrics.add(poll, state)
            if textfile is not None:
                write_file(Path(textfile), metrics.text)
            if on_poll is not None:
                on_poll(number, state)
            if number >= (ONCE if once else polls or number + 1):
                return report
            time.sleep(max(0.0, 0.0 if once else began + interval - time.monotonic()))
    raise AssertionError("a watch ends with its last poll")


def learn_canaries(
    url: str, file: str | Path, *, canaries: str | Path | None = None, model: str = "", timeout: float = 60.0,
    key: str = "",
) -> CanarySet:  # fmt: skip
    """Write to `file` what a healthy server answers, for `watch`; asks the questions of `canaries`, or shipped ones.

    Raises:
        CheckFailedError: the server is not healthy. Others as `watch`.
    """
    questions = LEARNT if canaries is None else read_canaries(Path(canaries)).canaries
    client = Client(server_address(url), model, timeout, key)
    found = learn(replace(client, model=client.entry()["id"]), questions)
    found.save(Path(file))
    return found
