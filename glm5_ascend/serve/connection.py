"""One HTTP exchange with an untrusted server: bounded in time and bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx

from glm5_ascend.errors import CheckFailedError, ConfigError, MissingEnvironmentError, shortened

CONNECT_TIMEOUT_S = 20.0
MAX_ERROR_BYTES = 64 * 1024


class BoundedReply:
    """A successful answer whose body has not been read yet."""

    def __init__(self, response: httpx.Response, url: str, deadline: float, max_bytes: int) -> None:
        self._response, self._url, self._deadline, self._left = response, url, deadline, max_bytes

    def pieces(self) -> Iterator[bytes]:
        """The body as it arrives.

        Raises:
            CheckFailedError: more bytes than the limit. httpx.HTTPError: too late, or cut off.
        """
        for piece in self._response.iter_raw():
            self._left -= len(piece)
            if self._left < 0:
                raise CheckFailedError(f"{self._url}: the answer is too long", "is this a vLLM or SGLang server?")
            if time.monotonic() > self._deadline:
                raise httpx.ReadTimeout("timed out: the answer did not end")
            yield piece

    def read(self) -> bytes:
        return b"".join(self.pieces())

    def lines(self) -> Iterator[bytes]:
        """Lines that end with a line feed. httpx's own also end at U+2028 and others, which JSON may contain."""
        parts: list[bytes] = []
        for piece in self.pieces():
            *complete, rest = piece.split(b"\n")
            if complete:
                yield b"".join([*parts, complete[0]])
                yield from complete[1:]
                parts = []
            parts.append(rest)
        yield b"".join(parts)


@contextmanager
def exchange(
    method: str, url: str, body: dict[str, Any] | None, key: str, seconds: float, idle: float, max_bytes: int
) -> Iterator[BoundedReply]:
    """Send one request.

    Args:
        key: API key, empty for none.
        seconds: to the end of the answer. idle: seconds between two bytes. max_bytes: of its body.
    Raises:
        ConfigError: a key that cannot be sent. CheckFailedError: an HTTP error, a redirection, or too long.
        MissingEnvironmentError: no whole answer in time.
    """
    if not (key.isascii() and key.isprintable()):  # a header holds nothing else
        raise ConfigError("the API key has characters that no HTTP header may hold", "correct OPENAI_API_KEY")
    # No compression: a few kB can expand to GB.
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    deadline = time.monotonic() + seconds
    timeout = httpx.Timeout(idle, connect=min(idle, CONNECT_TIMEOUT_S))
    try:
        with _session().stream(method, url, json=body, headers=headers, timeout=timeout) as response:
            _raise_for_status(response, BoundedReply(response, url, deadline, MAX_ERROR_BYTES), url)
            yield BoundedReply(response, url, deadline, max_bytes)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        reason = "timed out" if time.monotonic() > deadline else str(error) or type(error).__name__
        raise MissingEnvironmentError(
            f"{url}: no answer: {shortened(reason, 200)}", "is the server up? URL is http://HOST:PORT"
        ) from None


@cache
def _session() -> httpx.Client:
    return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


def _raise_for_status(response: httpx.Response, reply: BoundedReply, url: str) -> None:
    if response.is_redirect:
        target = shortened(response.headers.get("location", "elsewhere"), 200)
        raise CheckFailedError(f"{url}: HTTP {response.status_code}: redirects to {target}", "give the URL it names")
    if response.status_code in (401, 403):
        raise CheckFailedError(
            f"{url}: HTTP {response.status_code}: the server requires an API key", "set OPENAI_API_KEY"
        )
    if not response.is_success:
        try:
            text = reply.read().decode(errors="replace")[:300]
        except CheckFailedError:
            text = "(a long text)"
        raise CheckFailedError(f"{url}: HTTP {response.status_code}: {text}", "see the server's log")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise CheckFailedError(f"{url}: the answer is compressed, which was not requested", "see the server's log")


def server_address(url: str) -> str:
    """`url` without a trailing /v1.

    Raises:
        ConfigError: not the URL of a server.
    """
    try:
        parts = httpx.URL(url)
        valid = parts.scheme in ("http", "https") and bool(parts.host) and url.isprintable() and " " not in url
        valid = valid and (parts.port is None or 0 < parts.port < 65536)
    except (httpx.InvalidURL, ValueError):
        valid = False
    if not valid:
        raise ConfigError(f"{shortened(url, 200)}: not a URL", "give it as http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")
