"""The HTTP client against a server that answers as told: streams in odd pieces, errors, ends too early."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError
from glm5_ascend.serve.client import Client

OK = b"HTTP/1.1 200 OK\r\n"


def _read_request(connection: socket.socket) -> None:
    """All of it: closing a connection with bytes unread resets it, and the answer is lost."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += connection.recv(65536)
    head, _, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    while length and len(body) < int(length[1]):
        body += connection.recv(65536)


@contextmanager
def answering(*pieces: bytes) -> Iterator[str]:
    """A server that sends `pieces`, each by itself, to whoever asks first, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                _read_request(connection)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for piece in pieces:
                    connection.sendall(piece)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(timeout=30)


def event(**delta: str) -> bytes:
    value = {"choices": [{"delta": delta, "finish_reason": None}]}
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def test_a_stream_in_pieces_and_with_every_kind_of_line_end() -> None:
    """U+2028 and U+0085 end lines for Python and for httpx, not for JSON, where they may stand unescaped."""
    text = "one\u2028two\x85three 字"
    body = event(content=text) + event(reasoning="why") + b"data: [DONE]\n\n"
    with answering(OK + b"\r\n", *(body[i : i + 7] for i in range(0, len(body), 7))) as url:
        answer = Client(url, "glm-5").chat([], stream=True)
    assert (answer.content, answer.reasoning, answer.chunks) == (text, "why", 2)


def test_events_as_a_proxy_may_write_them() -> None:
    """No space after the colon, CRLF, comments that keep a connection alive, events with a name."""
    plain = event(content="one").replace(b"data: ", b"data:")
    body = (
        b": ping\n\n" + plain + b"event: x\nid: 1\n" + event(content="two").replace(b"\n", b"\r\n") + b"data:[DONE]\r\n"
    )
    with answering(OK + b"\r\n", body) as url:
        answer = Client(url, "glm-5").chat([], stream=True)
    assert (answer.content, answer.chunks) == ("onetwo", 2)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_one_line(stream: bool) -> None:
    refused = pytest.raises(CheckFailedError, match="HTTP 400: too long")
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"too long " * 99) as url, refused as caught:
        Client(url, "glm-5").chat([], stream=stream)
    assert len(str(caught.value)) < 400 and caught.value.tip


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_dies_while_it_answers(stream: bool) -> None:
    died = pytest.raises(MissingEnvironmentError, match="no answer")
    with answering(OK + b"Content-Length: 5000\r\n\r\n", event(content="half")) as url, died:
        Client(url, "glm-5").chat([], stream=stream)


def test_an_answer_that_is_not_json() -> None:
    with answering(OK + b"\r\n<html>") as url, pytest.raises(CheckFailedError, match="not JSON"):
        Client(url, "glm-5").chat([])


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:99999", "http://[", "http://nowhere.invalid"])
def test_no_server(url: str) -> None:
    with pytest.raises(MissingEnvironmentError, match="no answer"):
        Client(url, "glm-5").models()


def test_a_key_that_is_no_header() -> None:
    with pytest.raises(MissingEnvironmentError, match="no answer"):
        Client("http://127.0.0.1:9", "glm-5", key="schlüssel\n").models()


def test_a_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(MissingEnvironmentError, match="timed out"):
        Client(f"http://127.0.0.1:{silent.getsockname()[1]}", "glm-5", timeout=0.2).models()
