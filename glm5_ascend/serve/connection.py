"""One HTTP exchange with a server that is not trusted: bounded in time and bytes, whatever it sends or leaves out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import httpx

from glm5_ascend.errors import CheckFailedError, ConfigError, MissingEnvironmentError, shortened

CONNECT_TIMEOUT_S = 20.0
MAX_REFUSAL_BYTES = 64 * 1024


class Limits(NamedTuple):
    """Of one answer. seconds: to its end; idle: between two bytes. max_bytes: of its body."""

    seconds: float
    idle: float
    max_bytes: int


class BoundedReply:
    """A good answer whose body is still to be read."""

    def __init__(self, response: httpx.Response, url: str, deadline: float, max_bytes: int) -> None:
        self._response, self._url, self._deadline, self._left = response, url, deadline, max_bytes

    def pieces(self) -> Iterator[bytes]:
        """The body as it arrives.

        Raises:
            CheckFailedError: more than it may hold. httpx.HTTPError: too late, or cut off.
        """
        for piece in self._response.iter_raw():
            self._left -= len(piece)
            if self._left < 0:
                raise CheckFailedError(f"{self._url}: the answer is too long", "is this a vLLM or SGLang server?")
            if time.monotonic() > self._deadline:
                raise httpx.ReadTimeout("timed out: the answer did not end")
            yield piece
        if time.monotonic() > self._deadline:  # `_Watch` has ended the connection, which can look like a whole answer
            raise httpx.ReadTimeout("timed out: the answer did not end")

    def read(self) -> bytes:
        return b"".join(self.pieces())

    def lines(self) -> Iterator[bytes]:
        """By line feeds alone: httpx's own lines also end at U+2028 and its like, which may stand inside of JSON."""
        parts: list[bytes] = []
        for piece in self.pieces():
            *whole, rest = piece.split(b"\n")
            if whole:
                yield b"".join([*parts, whole[0]])
                yield from whole[1:]
                parts = []
            parts.append(rest)
        yield b"".join(parts)


@contextmanager
def exchange(method: str, url: str, body: dict[str, Any] | None, key: str, limits: Limits) -> Iterator[BoundedReply]:
    """Ask once.

    Args:
        key: API key, empty for none.
    Raises:
        CheckFailedError: an HTTP error, a redirection, or too long. MissingEnvironmentError: no whole answer in time.
    """
    # Nothing is unpacked: some kB can stand for GB.
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    deadline = time.monotonic() + limits.seconds
    timeout = httpx.Timeout(limits.idle, connect=min(limits.idle, CONNECT_TIMEOUT_S))
    try:
        with (
            _Watch(limits.seconds) as watch,
            _session().stream(
                method, url, json=body, headers=headers, timeout=timeout, extensions={"trace": watch.trace}
            ) as response,
        ):
            _refuse(response, BoundedReply(response, url, deadline, MAX_REFUSAL_BYTES), url)
            yield BoundedReply(response, url, deadline, limits.max_bytes)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        said = "timed out" if time.monotonic() > deadline else str(error) or type(error).__name__
        raise MissingEnvironmentError(
            f"{url}: no answer: {shortened(said, 200)}", "is the server up? URL is http://HOST:PORT"
        ) from None


@cache
def _session() -> httpx.Client:
    """One for all threads. A connection of its own for each exchange, so that ending one ends nothing else."""
    return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


def _refuse(response: httpx.Response, reply: BoundedReply, url: str) -> None:
    """Raise `CheckFailedError` for everything but a good answer that can be read as it is."""
    if response.is_redirect:
        target = shortened(response.headers.get("location", "elsewhere"), 200)
        raise CheckFailedError(f"{url}: HTTP {response.status_code}: redirects to {target}", "give the URL it names")
    if response.status_code in (401, 403):
        raise CheckFailedError(
            f"{url}: HTTP {response.status_code}: the server wants an API key", "set OPENAI_API_KEY, or give --key"
        )
    if not response.is_success:
        try:
            said = reply.read().decode(errors="replace")[:300]
        except CheckFailedError:
            said = "(a long text)"
        raise CheckFailedError(f"{url}: HTTP {response.status_code}: {said}", "see the server's log")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise CheckFailedError(f"{url}: the answer is compressed, which was not asked for", "see the server's log")


class _Watch:
    """Ends the connection when its time is over: a server that drips headers keeps every single read within limits."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._lock, self._late = threading.Lock(), False
        self._socket: socket.socket | None = None

    def __enter__(self) -> _Watch:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def trace(self, name: str, info: dict[str, Any]) -> None:
        """httpx tells here what it does."""
        if name in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
            if self._late:
                self._end()

    def _end(self) -> None:
        with self._lock:
            self._late = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # closed meanwhile
                    self._socket.shutdown(socket.SHUT_RDWR)


def server_address(url: str) -> str:
    """`url` without a trailing /v1.

    Raises:
        ConfigError: not the URL of a server.
    """
    try:
        parts = httpx.URL(url)
        sound = parts.scheme in ("http", "https") and bool(parts.host) and url.isprintable() and " " not in url
        sound = sound and (parts.port is None or 0 < parts.port < 65536)
    except (httpx.InvalidURL, ValueError):
        sound = False
    if not sound:
        raise ConfigError(f"{shortened(url, 200)}: not a URL", "give it as http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")
