"""Servers that misbehave: every client command ends within its limits, with one line."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError
from glm5_ascend.serve import client as client_module
from glm5_ascend.serve.client import Client

OK = b"HTTP/1.1 200 OK\r\n"
EVENT = b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": null}]}\n\n'


def whole(body: bytes, *headers: bytes) -> list[bytes]:
    head = b"\r\n".join([OK.rstrip(), b"Content-Length: %d" % len(body), *headers])
    return [head + b"\r\n\r\n" + body]


def forever(head: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.chain([head], itertools.repeat(piece))


#: What is sent after a request; a pause of 50 ms follows each piece of at most 4 bytes.
BEHAVIOURS: dict[str, Callable[[], Iterator[bytes]]] = {
    "closes at once": lambda: iter([]),
    "a slow body": forever(OK + b"\r\n", b" "),
    "an endless body": forever(OK + b"\r\n", b" " * 65536),
    "endless chunks": forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "endless events": forever(OK + b"Content-Type: text/event-stream\r\n\r\n", EVENT * 500),
    "endless header": forever(OK + b"a: ", b"b" * 65536),
    "a body that is cut off": lambda: iter([OK + b"Content-Length: 5000\r\n\r\n{"]),
    "a negative length": lambda: iter([OK + b"Content-Length: -1\r\n\r\n{}"]),
    "compressed": lambda: iter(whole(b"\x1f\x8b\x08\x00bomb", b"Content-Encoding: gzip")),
    "a redirection to a file": lambda: iter([b"HTTP/1.1 302 F\r\nLocation: file:///etc/passwd\r\n\r\n"]),
    "TLS": lambda: iter([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)]),
    "bytes that are no text": lambda: iter(whole(b'{"data": [{"id": "\xff\xfe"}]}')),
    "nested JSON": lambda: iter(whole(b"[" * 100_000)),
    "a number of 100,000 digits": lambda: iter(whole(b'{"data": ' + b"9" * 100_000 + b"}")),
    "JSON of another kind": lambda: iter(whole(b"[1, 2, 3]")),
    "escapes in an error": lambda: iter([b"HTTP/1.1 500 Oh\r\n\r\n\x1b[2J\x1b]0;owned\x07" + b"x" * 10_000]),
}


@contextmanager
def serving(behaviour: Callable[[bytes], Iterator[bytes]]) -> Iterator[str]:
    """Sends to each connection what `behaviour` makes of the first bytes of its request, until the client goes."""
    stop, threads = threading.Event(), list[threading.Thread]()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = connection.recv(65536)
            for piece in behaviour(asked):
                if stop.is_set():
                    return
                connection.sendall(piece)
                if len(piece) <= 4:
                    stop.wait(0.05)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # bytes unread would reset the connection, and lose the answer
                pass

    def accept() -> None:
        while not stop.is_set():
            with suppress(TimeoutError):
                connection, _ = listening.accept()
                threads.append(threading.Thread(target=answer, args=(connection,), daemon=True))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            stop.set()
            threads[0].join()


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_BYTES", 2**20)


@pytest.mark.parametrize("what", BEHAVIOURS)
@pytest.mark.parametrize("use", ["models", "chat", "stream"])
def test_every_call_ends_in_one_line(what: str, use: str) -> None:
    with serving(lambda _: BEHAVIOURS[what]()) as url:
        client = Client(url, "glm-5", timeout=0.6)
        calls: dict[str, Callable[[], object]] = {
            "models": client.models,
            "chat": lambda: client.chat([]),
            "stream": lambda: client.chat([], stream=True),
        }
        with pytest.raises((CheckFailedError, MissingEnvironmentError)) as caught:
            calls[use]()
    assert len(str(caught.value)) < 600 and "\n" not in caught.value.message and caught.value.tip
