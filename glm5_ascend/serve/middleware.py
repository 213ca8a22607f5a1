"""ASGI middleware of `vllm serve --middleware`: the API key on every route, Z.ai's switch `thinking`."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.flags import KEY_VARIABLE

App = Callable[..., Awaitable[None]]
Receive = Callable[..., Awaitable[Any]]
Scope = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
#: Flags of every server of vLLM: middleware that a user's `--middleware` adds to.
GUARDS = ("--middleware", f"{__name__}.RequireApiKey", "--middleware", f"{__name__}.ThinkingSwitch")
#: Routes without a key: health probes, metrics, the version. None of them runs the model.
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
_MESSAGE = "an API key is required: Authorization: Bearer KEY"
_UNAUTHORIZED = json.dumps({"error": {"message": _MESSAGE, "type": "Unauthorized", "code": 401}}).encode()


class RequireApiKey:
    """Answers 401 to requests without the key of VLLM_API_KEY, except on `OPEN_PATHS`.

    vLLM asks for the key below /v1 and a few other prefixes only; `/invocations` for example runs the model without it.
    Without the variable all requests pass. Preflight requests (OPTIONS) carry no key and pass.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.key = os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.key or scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no API key"})
        else:
            header_list = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": header_list})
            await send({"type": "http.response.body", "body": _UNAUTHORIZED})

    def _may_pass(self, scope: Scope) -> bool:
        method = scope.get("method")
        if method == "OPTIONS" or (method in ("GET", "HEAD") and scope["path"] in OPEN_PATHS):
            return True
        authorization = dict(reversed(scope["headers"])).get(b"authorization", b"")  # the first one counts
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self.key.encode())


class ThinkingSwitch:
    """Gives the chat template the switch `thinking` of Z.ai's API, which vLLM would ignore without a word.

    `{"type": "disabled"}` becomes `chat_template_kwargs: {"enable_thinking": false}`, and `clear_thinking` goes along.
    What a request states in `chat_template_kwargs` itself is kept. GLM-5.3's template thinks in any case.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith("/chat/completions"):
            await self.app(scope, receive, send)
            return
        body = bytearray()
        messages: list[dict[str, Any]] = []
        while not messages:
            message = await receive()
            body += message.get("body", b"")
            if message["type"] != "http.request" or not message.get("more_body", False):
                messages.append(message)
        if messages[0]["type"] == "http.request":
            messages = [{"type": "http.request", "body": with_thinking(bytes(body)), "more_body": False}]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)


def with_thinking(body: bytes) -> bytes:
    """A request of chat completions with `thinking` in the place of the chat template's switches."""
    if b'"thinking"' not in body:
        return body
    try:
        request = parse_json(body)
    except ValueError:
        return body  # vLLM says what is wrong with it
    thinking = request.get("thinking") if isinstance(request, dict) else None
    if not isinstance(thinking, dict) or thinking.get("type") not in ("enabled", "disabled"):
        return body
    switches = request.get("chat_template_kwargs") or {}
    if not isinstance(switches, dict):
        return body
    stated = {"enable_thinking": thinking["type"] == "enabled"}
    if isinstance(thinking.get("clear_thinking"), bool):
        stated["clear_thinking"] = thinking["clear_thinking"]
    del request["thinking"]
    return json.dumps(request | {"chat_template_kwargs": stated | switches}).encode()
