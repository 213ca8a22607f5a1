"""One key for every route. vLLM asks for it below /v1 and a few other prefixes; `/invocations` answers anyone."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from glm5_ascend.serve.flags import KEY_VARIABLE

Receive = Callable[..., Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
#: What anyone may read: the static chat page, what probes and Prometheus poll, the version. None runs the model.
OPEN = frozenset({"/", "/health", "/ping", "/metrics", "/version"})
_MESSAGE = "this server wants its API key: Authorization: Bearer KEY"
_REFUSAL = json.dumps({"error": {"message": _MESSAGE, "type": "Unauthorized", "code": 401}}).encode()


class EveryRouteWantsTheKey:
    """ASGI middleware for `vllm serve --middleware`: 401 without the key of VLLM_API_KEY, but for `OPEN`.

    It does nothing where the variable is not set. Preflight requests (OPTIONS) carry no key and pass.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.key = os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if not self.key or scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no API key"})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _may_pass(self, scope: dict[str, Any]) -> bool:
        if scope.get("method") == "OPTIONS":
            return True
        if scope["path"] in OPEN and scope.get("method") in ("GET", "HEAD"):
            return True
        return _carries(scope["headers"], self.key)


def _carries(headers: Iterable[tuple[bytes, bytes]], key: str) -> bool:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            return scheme.lower() == b"bearer" and hmac.compare_digest(given, key.encode())
    return False
