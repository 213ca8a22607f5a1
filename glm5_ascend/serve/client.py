"""The few calls of the OpenAI API that the checks make, as small values instead of a client library's objects."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from glm5_ascend.errors import CheckFailedError, ConfigError, shortened, shown
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.connection import BoundedReply, Limits, exchange
from glm5_ascend.serve.connection import server_address as server_address

CHAT = "/v1/chat/completions"
#: An answer of 100,000 tokens, each an event of its own.
MAX_BYTES = 32 * 1024**2
#: A log-probability with its token, rank and text, written generously.
LOGPROB_BYTES = 512
#: Seconds for lists of models and metrics, which a server has ready.
QUICK_S = 30.0


@dataclass
class Answer:
    """One chat completion, streamed or not. tool_calls: (name, arguments as JSON text).

    prompt_ids, token_ids: where `return_token_ids` asked for them and the answer was not streamed.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    chunks: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class CallPart(NamedTuple):
    """A piece of a streamed tool call; pieces of one call have one place."""

    place: int
    id: str
    name: str
    arguments: str


class Delta(NamedTuple):
    """What one event of a streamed answer adds. usage: tokens of prompt and answer, in the last event."""

    content: str
    reasoning: str
    calls: list[CallPart]
    usage: tuple[int, int] | None


@dataclass(frozen=True)
class Client:
    """url: of the server, without /v1. timeout: seconds for one answer, to its last byte; idle: between two bytes."""

    url: str
    model: str = ""
    timeout: float = 300.0
    key: str = ""
    idle: float = 300.0

    def get(self, path: str) -> bytes:
        """Raises `MissingEnvironmentError` where nothing answers in time, `CheckFailedError` for an HTTP error."""
        with self._answer("GET", path) as reply:
            return reply.read()

    def models(self) -> list[dict[str, Any]]:
        """What the server lists: objects whose `id` is text."""
        served = self._parsed("GET", "/v1/models")
        with self._understood("/v1/models"):
            return [_model(each) for each in served["data"]]

    def entry(self) -> dict[str, Any]:
        """What the server says of the model `self.model`, of its first one where that is empty.

        Raises:
            ConfigError: it does not serve that model.
        """
        served = self.models()
        found = next((each for each in served if self.model in ("", each["id"])), None)
        if found is None:
            names = shortened(", ".join(each["id"] for each in served), 200)
            raise ConfigError(
                f"{self.url} does not serve {self.model or 'any model'!r}", f"it serves {names or 'none'}"
            )
        return found

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name, summed over engines and labels; empty where the server shows none."""
        found: dict[str, float] = {}
        for name, _, value in self.samples():
            found[name] = found.get(name, 0.0) + value
        return found

    def samples(self) -> list[tuple[str, str, float]]:
        """Prometheus samples: name, label `engine` (vLLM's DP rank, "" without), value; none where it shows none."""
        try:
            text = self.get("/metrics").decode(errors="replace")
        except CheckFailedError:
            return []
        found = []
        for name, labels, value in re.findall(r"^([\w:]+)(\{[^}\n]*\})? ([-+.\deE]{1,40})$", text, re.MULTILINE):
            with contextlib.suppress(ValueError):
                engine = re.search(r'[{,]engine="([^"]*)"', labels)
                found.append((name, engine[1] if engine else "", float(value)))
        return found

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Answer:
        """Greedy unless `options` say otherwise."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 256, **options}
        if options.get("stream"):
            events = self.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
            answer = Answer()
            for event in events:
                with self._understood(CHAT):
                    _gather(answer, event)
            return answer
        reply = self._parsed("POST", CHAT, body)
        with self._understood(CHAT):
            choice = reply["choices"][0]
            answer = Answer(finish=_text(choice["finish_reason"]))
            _add(answer, choice["message"])
            _count(answer, reply.get("usage"))
            answer.prompt_ids, answer.token_ids = _ids(reply.get("prompt_token_ids")), _ids(choice.get("token_ids"))
        return answer

    def deltas(self, request: dict[str, Any]) -> Iterator[Delta]:
        """A streamed chat completion as it comes."""
        for event in self.stream(CHAT, {**request, "stream": True, "stream_options": {"include_usage": True}}):
            with self._understood(CHAT):
                delta = _delta(event)
            yield delta

    def complete(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        """The first choice of /v1/completions for token ids; greedy unless `options` say otherwise."""
        path = "/v1/completions"
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **options}
        probabilities = len(prompt) * ((options.get("prompt_logprobs") or 0) + 1)
        reply = self._parsed("POST", path, body, MAX_BYTES + probabilities * LOGPROB_BYTES)
        with self._understood(path):
            choice: dict[str, Any] = {**reply["choices"][0]}
        return choice

    def prompt_probabilities(self, prompt: list[int], k: int) -> dict[str, Any]:
        """SGLang's own words for a prompt's log-probabilities and those of the `k` most probable ids of each place."""
        path = "/generate"
        body: dict[str, Any] = {
            "input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True,
            "logprob_start_len": 0, "top_logprobs_num": k,
        }  # fmt: skip
        reply = self._parsed("POST", path, body, MAX_BYTES + len(prompt) * (k + 1) * LOGPROB_BYTES)
        with self._understood(path):
            told: dict[str, Any] = {**reply["meta_info"]}
        return told

    def is_sglang(self) -> bool:
        """Whether the server has SGLang's description of its model, which vLLM has not."""
        for path in ("/model_info", "/get_model_info"):  # the second is the older name
            try:
                told = self._parsed("GET", path)
            except CheckFailedError:
                continue
            if isinstance(told, dict) and "is_generation" in told:
                return True
        return False

    def score(self, prompt: list[int], tokens: list[int]) -> list[float] | None:
        """Log-probability of each of `tokens` after `prompt`, in nats; None where the server does not give them."""
        entries = self.complete([*prompt, *tokens], max_tokens=1, prompt_logprobs=0).get("prompt_logprobs")
        if not entries:
            return None
        with self._understood("/v1/completions"):
            found = [
                float(entry[str(token)]["logprob"]) for token, entry in zip(tokens, entries[len(prompt) :], strict=True)
            ]
        return found

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The server-sent events of a streamed answer, each when its line is there: nothing is held back."""
        with self._answer("POST", path, body) as reply:
            for line in reply.lines():
                with self._understood(path):
                    name, _, text = line.decode().partition(":")
                    if name != "data":  # a comment that keeps the connection alive, an event's name, an empty line
                        continue
                    if text.strip() == "[DONE]":
                        return  # whatever still comes is no part of the answer
                    event = parse_json(text)
                    if not isinstance(event, dict) or event.get("error"):
                        raise CheckFailedError(f"{self.url}{path}: {shown(event, 300)}", "see the server's log")
                yield event
        raise CheckFailedError(f"{self.url}{path}: the stream ends without [DONE]", "the server broke off: see its log")

    def _parsed(self, method: str, path: str, body: dict[str, Any] | None = None, max_bytes: int | None = None) -> Any:
        with self._answer(method, path, body, max_bytes) as reply:
            data = reply.read()
        try:
            return parse_json(data)
        except ValueError as error:
            raise CheckFailedError(
                f"{self.url}{path}: the answer is no JSON: {shortened(str(error), 160)}", "see the server's log"
            ) from None

    @contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None, max_bytes: int | None = None
    ) -> Iterator[BoundedReply]:
        """What only says how the server is must come soon; an answer may be computed for long."""
        timeout = min(self.timeout, QUICK_S) if method == "GET" else self.timeout
        limits = Limits(timeout, min(timeout, self.idle), max_bytes or MAX_BYTES)
        with exchange(method, self.url + path, body, self.key, limits) as reply:
            yield reply

    @contextmanager
    def _understood(self, path: str) -> Iterator[None]:
        """An answer that has another form than the API's is an error of the server."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise CheckFailedError(
                f"{self.url}{path}: the answer is not what the OpenAI API says: {shortened(str(error), 160)}",
                "is this a vLLM or SGLang server? see its log",
            ) from None


def _model(entry: dict[str, Any]) -> dict[str, Any]:
    longest = entry.get("max_model_len")
    if not isinstance(entry["id"], str) or not isinstance(longest, int | None):
        raise TypeError("a model's id is text, its max_model_len a number")
    return entry


def _delta(event: dict[str, Any]) -> Delta:
    counted = Answer()
    _count(counted, event.get("usage"))
    parts = [choice["delta"] for choice in event.get("choices") or ()]
    calls = []
    for call in (each for part in parts for each in part.get("tool_calls") or ()):
        function = call.get("function") or {}
        name, arguments = _text(function.get("name")), _text(function.get("arguments"))
        calls.append(CallPart(int(call["index"]), _text(call.get("id")), name, arguments))
    return Delta(
        "".join(_text(part.get("content")) for part in parts),
        "".join(_text(part.get("reasoning") or part.get("reasoning_content")) for part in parts),
        calls,
        (counted.prompt_tokens, counted.completion_tokens) if event.get("usage") else None,
    )


def _gather(answer: Answer, event: dict[str, Any]) -> None:
    """Add one event of a stream."""
    _count(answer, event.get("usage"))
    for choice in event.get("choices") or ():
        answer.chunks += 1
        answer.finish = _text(choice.get("finish_reason")) or answer.finish
        _add(answer, choice["delta"])


def _add(answer: Answer, part: dict[str, Any]) -> None:
    """Add a message or a streamed piece of one; a call's later pieces carry no name."""
    answer.content += _text(part.get("content"))
    answer.reasoning += _text(part.get("reasoning") or part.get("reasoning_content"))
    for call in part.get("tool_calls") or ():
        function = call.get("function") or {}
        said = _text(function.get("arguments"))
        if function.get("name"):
            answer.tool_calls.append((_text(function["name"]), said))
        elif answer.tool_calls:
            name, arguments = answer.tool_calls[-1]
            answer.tool_calls[-1] = (name, arguments + said)


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list | None) or not all(type(each) is int for each in value or ()):
        raise TypeError(f"{shown(value)} where token ids should be")
    return value or []


def _text(value: Any) -> str:
    if not isinstance(value, str | None):
        raise TypeError(f"{shown(value)} where text should be")
    return value or ""


def _count(answer: Answer, usage: dict[str, Any] | None) -> None:
    if usage:
        counts = usage["prompt_tokens"], usage.get("completion_tokens") or 0
        if not all(type(count) is int and 0 <= count < 2**31 for count in counts):
            raise TypeError(f"{shown(usage)} where numbers of tokens should be")
        answer.prompt_tokens, answer.completion_tokens = counts
