"""All routes of a server with a key: requests without a key, with a wrong one and with the right one."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from glm5_ascend.serve.middleware import OPEN_PATHS, RequireApiKey
from tests.serve.support.chat import API_KEY

#: Routes that the server's openapi.json does not list.
UNLISTED = (
    ("GET", "/docs"), ("GET", "/redoc"), ("GET", "/openapi.json"), ("GET", "/nowhere"), ("GET", "/metrics/"),
    ("POST", "/health"), ("GET", "//v1/models"), ("GET", "/%69nvocations"), ("POST", "/invocations/"),
)  # fmt: skip


def status(server: str, method: str, path: str, key: str | None, body: str = "{}") -> int:
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    connection = http.client.HTTPConnection(urlsplit(server).netloc, timeout=120)
    try:
        connection.request(method, path, None if method == "GET" else body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def routes(server: str) -> list[tuple[str, str]]:
    """Method and path of all routes that the server names."""
    connection = http.client.HTTPConnection(urlsplit(server).netloc, timeout=120)
    connection.request("GET", "/openapi.json", headers={"Authorization": f"Bearer {API_KEY}"})
    paths: dict[str, Any] = json.loads(connection.getresponse().read())["paths"]
    connection.close()
    return sorted((method.upper(), path) for path, methods in paths.items() for method in methods)


def test_every_route_requires_the_key(server: str) -> None:
    listed = routes(server)
    assert ("POST", "/invocations") in listed and ("POST", "/tokenize") in listed and len(listed) > 20
    for method, path in (*listed, *UNLISTED):
        path = path.replace("{", "").replace("}", "")
        allowed = path in OPEN_PATHS and method in ("GET", "HEAD")
        for key in (None, "guess", API_KEY[:-1], ""):
            code = status(server, method, path, key)
            assert (code < 400) if allowed else (code == 401), (method, path, key, code)
        print(f"{method:6} {path:40} {'open' if allowed else 'key'}")


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
def test_requests_with_the_key(server: str, path: str) -> None:
    body = json.dumps({"model": "glm-5", "prompt": "Hello", "max_tokens": 1})
    assert status(server, "POST", path, API_KEY, body) == 200
    assert status(server, "GET", "/openapi.json", API_KEY) == 200


@pytest.mark.parametrize(("key", "code"), [("k", None), ("", 1000)])
def test_websockets_are_closed(key: str, code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    sent: list[dict[str, Any]] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "websocket.close", "code": 1000})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [(b"authorization", b"Bearer other")]}
    asyncio.run(RequireApiKey(app)(scope, None, send))  # type: ignore[arg-type]
    assert [message["code"] for message in sent] == [code or 1008]
