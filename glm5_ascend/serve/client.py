"""The few HTTP calls that the checks make, with the standard library alone."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from glm5_ascend.errors import CheckFailedError, ConfigError, MissingEnvironmentError


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
        return self._open(urllib.request.Request(self.url + path, headers=self._headers())).read()  # type: ignore[no-any-return]

    def models(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.get("/v1/models"))["data"]
        return found

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
            return _gathered(self._events(body))
        reply = json.loads(self._post(body).read())
        choice = reply["choices"][0]
        answer = Answer(finish=choice["finish_reason"] or "")
        _add(answer, choice["message"])
        _count(answer, reply.get("usage"))
        return answer

    def complete(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        """The first choice of /v1/completions for token ids; greedy unless `options` say otherwise."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **options}
        choice: dict[str, Any] = json.loads(self._post(body, "/v1/completions").read())["choices"][0]
        return choice

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for line in self._post({**body, "stream_options": {"include_usage": True}}):
            text = line.decode().strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                yield json.loads(text.removeprefix("data: "))

    def _post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        data = json.dumps(body).encode()
        return self._open(urllib.request.Request(self.url + path, data, self._headers()))

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise CheckFailedError(f"{request.full_url}: HTTP {error.code}: {said}", "see the server's log") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise MissingEnvironmentError(
                f"{request.full_url}: no answer: {reason}", "is the server up? URL is http://HOST:PORT"
            ) from None


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
