"""Times of streamed tokens: each event counts when it comes, and what is no stream of tokens is an error."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError
from glm5_ascend.plan.measure.served import ANSWERS, Timer
from glm5_ascend.serve.client import Client
from tests.support.listening import listening

#: Seconds after which what waits for ever is ended; nothing is judged by it.
ENDED = 60
Send = Callable[[bytes], None]


def event(*tokens: int) -> bytes:
    text = json.dumps({"choices": [{"text": "\u2028", "token_ids": list(tokens)}]}, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


@contextmanager
def answering(answer: Callable[[Send, dict[str, Any]], None]) -> Iterator[str]:
    """A server whose answer to every request is what `answer` sends; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

            def send(data: bytes) -> None:
                self.wfile.write(data)
                self.wfile.flush()

            answer(send, body)

    with listening(Handler) as url:
        yield url


def test_an_event_is_seen_before_the_next_one_is_sent() -> None:
    """The second is sent only when the first was seen: a client that collects lines would wait for ever."""
    seen = threading.Event()

    def answer(send: Send, body: dict[str, Any]) -> None:
        first = event(1)
        send(first[:20])
        send(first[20:-1])  # the line is whole, the empty one behind it is not there yet
        if seen.wait(ENDED):
            send(b"\n" + event(2) + b"data: [DONE]\n\n")

    with answering(answer) as url:
        events = Client(url, timeout=ENDED).stream("/v1/completions", {})
        assert next(events)["choices"][0]["token_ids"] == [1]
        seen.set()
        assert [event["choices"][0]["token_ids"] for event in events] == [[2]]


def test_every_token_has_the_time_of_its_event() -> None:
    asked = []

    def answer(send: Send, body: dict[str, Any]) -> None:
        asked.append(body)
        send(b": a comment\n\n" + event(5, 6))
        send(event() + event(7) + b"data: [DONE]\n\n")

    with answering(answer) as url:
        times = Timer(url, 10).arrivals([1, 2, 3], 3)
    assert len(times) == 3 and times[0] == times[1] <= times[2]
    assert asked[0]["prompt"] == [1, 2, 3] and asked[0]["max_tokens"] == 3 and asked[0]["stream"] is True


def test_tokens_that_do_not_come_are_an_error() -> None:
    with (
        answering(lambda send, body: send(event(1) + b"data: [DONE]\n\n")) as url,
        pytest.raises(CheckFailedError, match="1 of 3 tokens"),
    ):
        Timer(url, 10).arrivals([1], 3)
    with pytest.raises(MissingEnvironmentError, match="no answer"):
        Timer(url, 10).arrivals([1], 3)


def test_a_first_token_is_one_of_a_prompt_of_that_length() -> None:
    asked: list[int] = []

    def answer(send: Send, body: dict[str, Any]) -> None:
        asked.append(len(body["prompt"]))
        for _ in range(body["max_tokens"]):
            send(event(1))
        send(b"data: [DONE]\n\n")

    with answering(answer) as url:
        timer = Timer(url, 10)
        first = timer.first_token(128)
        assert first > 0 and asked == [128]
        assert all(0 <= token < 10 for token in timer.prompt(50))


class KnownTimer(Timer):
    """Requests whose tokens come one per second, the second request's `apart` seconds after the first's."""

    def __init__(self, apart: int) -> None:
        super().__init__("http://127.0.0.1:9", 10)
        self.apart, self.asked, self.lock = apart, list[int](), threading.Lock()

    def arrivals(self, prompt: Sequence[int], new_tokens: int) -> list[float]:
        with self.lock:
            self.asked.append(new_tokens)
            start = self.apart if len(self.asked) % 2 else 0
        return [float(start + second) for second in range(new_tokens)]


def test_requests_that_do_not_meet_are_asked_for_longer_answers() -> None:
    short, longer, longest = ANSWERS
    together = KnownTimer(short // 2)
    assert together.step(2) == pytest.approx(1.0) and together.asked == [short] * 2
    late = KnownTimer(short + 10)
    assert late.step(2) == pytest.approx(1.0) and late.asked == [short] * 2 + [longer] * 2
    never = KnownTimer(longest)
    with pytest.raises(CheckFailedError, match="did not decode together"):
        never.step(2)
    assert never.asked == [size for size in ANSWERS for _ in range(2)]
