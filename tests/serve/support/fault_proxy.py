"""A proxy that plants faults into the answers of a real server, as broken weights, caches and drafts do."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.listening import listening

HEALTHY = "healthy"
#: Name of a fault -> the watch's word for it.
FAULTS = {
    "repeats": "repeats",
    "phrases": "repeats",
    "noise": "wrong_answers",
    "empty": "wrong_answers",
    "logprobs": "logprobs",
    "lost calls": "empty_tool_calls",
    "empty arguments": "empty_tool_calls",
    "errors": "refusals",
}


class FaultProxy:
    """Forwards everything to `target`; `fault` may be changed at any time. seed: of the noise."""

    def __init__(self, target: str, fault: str = HEALTHY, seed: int = 0) -> None:
        self.target, self.fault, self.random = target, fault, random.Random(seed)

    def spoil(self, path: str, status: int, body: bytes) -> tuple[int, bytes]:
        if self.fault == HEALTHY or status != 200 or "completions" not in path:
            return status, body
        if self.fault == "errors":
            return 500, b'{"error": "EngineCore encountered an issue"}'
        value = json.loads(body)
        for choice in value["choices"]:
            if "message" in choice:
                self._spoil_message(choice["message"])
            if self.fault == "logprobs" and choice.get("prompt_logprobs"):
                for entry in choice["prompt_logprobs"][1:]:
                    for candidate in entry.values():
                        candidate["logprob"] -= self.random.uniform(0.0, 4.0)
        return status, json.dumps(value).encode()

    def _spoil_message(self, message: dict[str, Any]) -> None:
        texts = {
            "repeats": "!" * 160,
            "phrases": "The answer to this is that " * 12,
            "noise": "".join(self.random.choices("abcdefghij klmnopqrstuvwxyz,.é中的", k=120)),
            "empty": "",
        }
        if self.fault in texts and not message.get("tool_calls"):
            message["content"] = texts[self.fault]
            message["reasoning"] = None
        if self.fault == "lost calls" and message.get("tool_calls"):
            message["tool_calls"], message["content"] = [], "<tool_call>get_weather"
        for call in message.get("tool_calls") or ():
            if self.fault == "empty arguments":
                call["function"]["arguments"] = "{}"


@contextmanager
def spoiled(proxy: FaultProxy) -> Iterator[str]:
    """The proxy's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.forward(None)

        def do_POST(self) -> None:
            self.forward(self.rfile.read(int(self.headers["Content-Length"])))

        def forward(self, body: bytes | None) -> None:
            headers = {name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers}
            request = urllib.request.Request(proxy.target + self.path, body, headers)
            try:
                with urllib.request.urlopen(request, timeout=600) as reply:
                    status, data = reply.status, reply.read()
            except urllib.error.HTTPError as error:
                status, data = error.code, error.read()
            except OSError:
                return  # no server: the connection ends without an answer
            status, data = proxy.spoil(self.path, status, data)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with listening(Handler) as url:
        yield url
