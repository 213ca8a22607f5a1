"""The HTTP client against servers that misbehave: every call ends within its limits, with one line."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError
from glm5_ascend.serve import client as client_module
from glm5_ascend.serve.client import Client

OK = b"HTTP/1.1 200 OK\r\n"


def event(**delta: str) -> bytes:
    value = {"choices": [{"delta": delta, "finish_reason": None}]}
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def whole(body: bytes, *headers: bytes) -> list[bytes]:
    head = b"\r\n".join([OK.rstrip(), b"Content-Length: %d" % len(body), *headers])
    return [head + b"\r\n\r\n" + body]


def forever(head: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.chain([head], itertools.repeat(piece))


#: What is sent after a request; a pause of 50 ms follows each piece of at most 4 bytes. And a part of the error.
BEHAVIOURS: dict[str, tuple[Callable[[], Iterator[bytes]], str]] = {
    "closes at once": (lambda: iter([]), "no answer"),
    "a slow body": (forever(OK + b"\r\n", b" "), "timed out"),
    "an endless body": (forever(OK + b"\r\n", b" " * 65536), "too long"),
    "endless chunks": (
        forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n"), "too long"
    ),
    "endless events": (
        forever(OK + b"Content-Type: text/event-stream\r\n\r\n", event(content="x") * 500), "too long"
    ),
    "endless header": (forever(OK + b"a: ", b"b" * 65536), "no answer"),
    "a body that is cut off": (lambda: iter([OK + b"Content-Length: 5000\r\n\r\n{"]), "no answer"),
    "a negative length": (lambda: iter([OK + b"Content-Length: -1\r\n\r\n{}"]), "no answer"),
    "compressed": (lambda: iter(whole(b"\x1f\x8b\x08\x00bomb", b"Content-Encoding: gzip")), "compressed"),
    "a redirection to a file": (
        lambda: iter([b"HTTP/1.1 302 F\r\nLocation: file:///etc/passwd\r\n\r\n"]), "redirects"
    ),
    "TLS": (lambda: iter([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)]), "no answer"),
    "bytes that are no text": (lambda: iter(whole(b'{"data": [{"id": "\xff\xfe"}]}')), ""),
    "nested JSON": (lambda: iter(whole(b"[" * 100_000)), ""),
    "a number of 100,000 digits": (lambda: iter(whole(b'{"data": ' + b"9" * 100_000 + b"}")), ""),
    "JSON of another kind": (lambda: iter(whole(b"[1, 2, 3]")), ""),
    "escapes in an error": (
        lambda: iter([b"HTTP/1.1 500 Oh\r\n\r\n\x1b[2J\x1b]0;owned\x07" + b"x" * 9000]), "HTTP 500"
    ),
}  # fmt: skip


@contextmanager
def serving(pieces: Iterator[bytes]) -> Iterator[str]:
    """A server that sends `pieces`, each by itself, to the first who asks, until the client goes."""
    stop = threading.Event()

    def answer() -> None:
        with suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for piece in pieces:
                    connection.sendall(piece)
                    if len(piece) <= 4:
                        stop.wait(0.05)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # bytes unread would reset the connection, and lose the answer
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("name", BEHAVIOURS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_call_ends_in_one_line(name: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_BYTES", 2**20)
    behaviour, part = BEHAVIOURS[name]
    patience = 0.6 if part in ("no answer", "timed out") else 60.0  # 1 MiB of events takes a second or two
    with serving(behaviour()) as url, pytest.raises((CheckFailedError, MissingEnvironmentError)) as caught:
        Client(url, "glm-5", timeout=patience).chat([], stream=stream)
    message = caught.value.message
    assert len(message) < 600 and "\n" not in message and caught.value.tip
    assert part in message


def test_a_stream_in_pieces_and_with_every_kind_of_line_end() -> None:
    """U+2028 and U+0085 end lines for Python and for httpx, not for JSON, where they may stand unescaped."""
    text = "one\u2028two\x85three 字"
    body = event(content=text) + event(reasoning="why") + b"data: [DONE]\n\n"
    with serving(iter([OK + b"\r\n", *(body[i : i + 7] for i in range(0, len(body), 7))])) as url:
        answer = Client(url, "glm-5").chat([], stream=True)
    assert (answer.content, answer.reasoning, answer.chunks) == (text, "why", 2)


def test_events_as_a_proxy_may_write_them() -> None:
    """No space after the colon, CRLF, comments that keep a connection alive, events with a name."""
    plain = event(content="one").replace(b"data: ", b"data:")
    second = event(content="two").replace(b"\n", b"\r\n")
    body = b": ping\n\n" + plain + b"event: x\nid: 1\n" + second + b"data:[DONE]\r\n"
    with serving(iter([OK + b"\r\n", body])) as url:
        answer = Client(url, "glm-5").chat([], stream=True)
    assert (answer.content, answer.chunks) == ("onetwo", 2)


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("http://127.0.0.1:9", ""), ("http://127.0.0.1:99999", ""), ("http://[", ""), ("http://nowhere.invalid", ""),
    ],
)  # fmt: skip
def test_no_server(url: str, key: str) -> None:
    with pytest.raises(MissingEnvironmentError, match="no answer"):
        Client(url, "glm-5", key=key).models()
