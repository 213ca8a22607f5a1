"""The few calls of the OpenAI API that the checks make, as small values instead of a client library's objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx

from glm5_ascend.errors import CheckFailedError, ConfigError, MissingEnvironmentError

CHAT = "/v1/chat/completions"


@dataclass
class Answer:
    """One chat completion, streamed or not. tool_calls: (name, arguments as JSON text)."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    chunks: int = 0


@dataclass(frozen=True)
class Client:
    """url: of the server, without /v1. timeout: seconds for one answer."""

    url: str
    model: str = ""
    timeout: float = 300.0
    key: str = ""

    def get(self, path: str) -> bytes:
        """Raises `MissingEnvironmentError` where nothing answers, `CheckFailedError` for an HTTP error."""
        with self._answer("GET", path) as response:
            return response.read()

    def models(self) -> list[dict[str, Any]]:
        with self._answer("GET", "/v1/models") as response:
            served: list[dict[str, Any]] = json.loads(response.read())["data"]
        return served

    def entry(self) -> dict[str, Any]:
        """What the server says of the model `self.model`, of its first one where that is empty.

        Raises:
            ConfigError: it does not serve that model.
        """
        served = self.models()
        found = next((each for each in served if self.model in ("", each["id"])), None)
        if found is None:
            raise ConfigError(
                f"{self.url} does not serve {self.model!r}", f"it serves {', '.join(each['id'] for each in served)}"
            )
        return found

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name, summed over engines and labels; empty where the server shows none."""
        try:
            text = self.get("/metrics").decode()
        except CheckFailedError:
            return {}
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([\w:]+)(?:\{[^}]*\})? ([-+.\deE]+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Answer:
        """Greedy unless `options` say otherwise."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 256, **options}
        if options.get("stream"):
            return _gathered(self.stream(CHAT, {**body, "stream_options": {"include_usage": True}}))
        reply = self._post(body, CHAT)
        choice = reply["choices"][0]
        answer = Answer(finish=choice["finish_reason"] or "")
        _add(answer, choice["message"])
        _count(answer, reply.get("usage"))
        return answer

    def complete(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        """The first choice of /v1/completions for token ids; greedy unless `options` say otherwise."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **options}
        choice: dict[str, Any] = self._post(body, "/v1/completions")["choices"][0]
        return choice

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The server-sent events of a streamed answer, each when its line is there: nothing is held back."""
        with self._answer("POST", path, body) as response:
            for line in _lines(response):
                text = line.decode().strip()
                if text.startswith("data: ") and text != "data: [DONE]":
                    yield json.loads(text.removeprefix("data: "))

    def _post(self, body: dict[str, Any], path: str) -> Any:
        with self._answer("POST", path, body) as response:
            return json.loads(response.read())

    @contextmanager
    def _answer(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[httpx.Response]:
        """A good answer, its body still to be read; what goes wrong meanwhile becomes an error of ours."""
        url = self.url + path
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            with _session().stream(method, url, json=body, headers=headers, timeout=self.timeout) as response:
                if response.is_error:
                    said = response.read().decode(errors="replace")[:300]
                    raise CheckFailedError(f"{url}: HTTP {response.status_code}: {said}", "see the server's log")
                yield response
        except json.JSONDecodeError as error:
            raise CheckFailedError(f"{url}: the answer is no JSON: {error}", "see the server's log") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise MissingEnvironmentError(
                f"{url}: no answer: {str(error) or type(error).__name__}", "is the server up? URL is http://HOST:PORT"
            ) from None


@cache
def _session() -> httpx.Client:
    """One pool of connections for all clients; threads may share it."""
    return httpx.Client(follow_redirects=True)


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """By line feeds alone: httpx's own lines also end at U+2028 and its like, which may stand inside of JSON."""
    rest = b""
    for piece in response.iter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    yield rest


def _gathered(events: Iterator[dict[str, Any]]) -> Answer:
    answer = Answer()
    for event in events:
        _count(answer, event.get("usage"))
        for choice in event.get("choices") or ():
            answer.chunks += 1
            answer.finish = choice.get("finish_reason") or answer.finish
            _add(answer, choice["delta"])
    return answer


def _add(answer: Answer, part: dict[str, Any]) -> None:
    """Add a message or a streamed piece of one; a call's later pieces carry no name."""
    answer.content += part.get("content") or ""
    answer.reasoning += part.get("reasoning") or part.get("reasoning_content") or ""
    for call in part.get("tool_calls") or ():
        function = call.get("function") or {}
        if function.get("name"):
            answer.tool_calls.append((function["name"], function.get("arguments") or ""))
        elif answer.tool_calls:
            name, arguments = answer.tool_calls[-1]
            answer.tool_calls[-1] = (name, arguments + (function.get("arguments") or ""))


def _count(answer: Answer, usage: dict[str, Any] | None) -> None:
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage.get("completion_tokens") or 0


def server_address(url: str) -> str:
    """`url` without a trailing /v1.

    Raises:
        ConfigError: not a URL.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: not a URL", "give it as http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")
