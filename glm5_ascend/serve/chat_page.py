"""The chat page: one static file, shown at `/` of a server, or by `glm5-ascend ui` for a server elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

Scope = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
#: What the page may load: its own text, and answers of the server it talks to. No other host, no picture, no frame.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src {hosts}; base-uri 'none'"
)


def page() -> bytes:
    """The page as HTML in UTF-8."""
    return files("glm5_ascend").joinpath("data", "chat.html").read_bytes()


def headers(hosts: str = "'self'") -> list[tuple[bytes, bytes]]:
    """Response headers of the page; `hosts` are those its scripts may talk to."""
    return [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", POLICY.format(hosts=hosts).encode()),
        (b"cache-control", b"no-cache"),
        (b"x-content-type-options", b"nosniff"),
    ]


class ChatPage:
    """ASGI middleware for `vllm serve --middleware`: answers GET / with the page, hands everything else on."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Callable[..., Awaitable[Any]], send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            body = page()
            length = (b"content-length", str(len(body)).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [*headers(), length]})
            await send({"type": "http.response.body", "body": body if scope["method"] == "GET" else b""})
            return
        await self.app(scope, receive, send)
