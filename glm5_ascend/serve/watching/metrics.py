"""The watch's figures for Prometheus: as text, over HTTP, or as a file for the node exporter's textfile collector."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.watching.judge import FINDINGS, WatchState
from glm5_ascend.serve.watching.poll import WatchPoll

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HELP = {
    "up": ("gauge", "1 if the server answered anything in the last poll."),
    "healthy": ("gauge", "1 if it answered and nothing was found."),
    "polls_total": ("counter", "Polls so far."),
    "last_poll_timestamp_seconds": ("gauge", "When the last poll ended."),
    "answers_total": ("counter", "Answers by kind of question and outcome."),
    "finding": ("gauge", "1 while a sign of garbage is there, by its name."),
    "bad_ratio": ("gauge", "Share of bad answers in the last polls, by the sign they are counted for."),
    "logprob_shift_nats": ("gauge", "Largest mean distance of an answer's log-probabilities from the learnt ones."),
    "mtp_tokens_per_step": ("gauge", "Tokens per step of MTP, by engine."),
    "mtp_tokens_per_step_least": ("gauge", "Below it the acceptance counts as broken."),
}
PREFIX = "glm5_watch_"
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass
class WatchMetrics:
    """All polls so far, as text. `url` is a label of every sample, without the login that it may hold."""

    url: str
    least_per_step: float
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    polls: int = 0
    text: str = ""

    def add(self, poll: WatchPoll, state: WatchState) -> None:
        self.polls += 1
        self.answers += poll.outcomes
        # Whole at once: a scrape of another thread sees the old text or the new one.
        self.text = "\n".join(self._lines(state)) + "\n"

    def _lines(self, state: WatchState) -> Iterator[str]:
        values: dict[str, list[tuple[dict[str, str], float]]] = {
            "up": [({}, state.reached)],
            "healthy": [({}, state.reached and not state.findings)],
            "polls_total": [({}, self.polls)],
            "last_poll_timestamp_seconds": [({}, round(time.time(), 3))],
            "answers_total": [({"kind": kind, "outcome": to}, n) for (kind, to), n in sorted(self.answers.items())],
            "finding": [({"finding": name}, name in state.findings) for name in FINDINGS],
            "bad_ratio": [({"finding": name}, state.figures[name]) for name in FINDINGS if name in state.figures],
            "logprob_shift_nats": [
                ({}, value) for name, value in state.figures.items() if name == "logprob_shift_nats"
            ],
            "mtp_tokens_per_step": [({"engine": engine}, value) for engine, value in sorted(state.per_step.items())],
            "mtp_tokens_per_step_least": [({}, self.least_per_step)],
        }
        for name, samples in values.items():
            kind, told = HELP[name]
            if samples:
                yield f"# HELP {PREFIX}{name} {told}"
                yield f"# TYPE {PREFIX}{name} {kind}"
            for labels, value in samples:
                inside = ",".join(
                    f'{key}="{_escaped(text)}"' for key, text in {"url": _LOGIN.sub("", self.url), **labels}.items()
                )
                yield f"{PREFIX}{name}{{{inside}}} {float(value):.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@contextmanager
def exported(metrics: WatchMetrics, port: int | None, host: str) -> Iterator[int | None]:
    """GET /metrics on `port` (0: any free one) while the block runs; yields the port. None: nothing is opened.

    Raises:
        ConfigError: the port cannot be had.
    """
    if port is None:
        yield None
        return
    try:
        server = ThreadingHTTPServer((host, port), _handler(metrics))
    except OSError as error:
        raise ConfigError(f"--metrics-port {host}:{port}: {error.strerror or error}", "choose another one") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(metrics: WatchMetrics) -> type[BaseHTTPRequestHandler]:
    class Metrics(BaseHTTPRequestHandler):
        timeout = 10.0  # a client that sends nothing holds a thread no longer

        def do_GET(self) -> None:
            known = self.path.partition("?")[0] == "/metrics"
            body = metrics.text.encode() if known else b"GET /metrics\n"
            self.send_response(200 if known else 404)
            self.send_header("content-type", CONTENT_TYPE if known else "text/plain")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads a line per scrape."""

    return Metrics
