"""Client for the calls of the OpenAI API that the checks make. Sizes and times of answers are bounded.

The `openai` client has neither bound: an answer without end would fill the memory.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from glm5_ascend.errors import CheckFailedError, ConfigError, shortened, shown
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.connection import BoundedReply, exchange
from glm5_ascend.serve.connection import server_address as server_address
from glm5_ascend.serve.replies import Answer as Answer
from glm5_ascend.serve.replies import ChatReply, ServedModel

CHAT = "/v1/chat/completions"
#: Largest answer: 100,000 tokens, each an event of its own.
MAX_BYTES = 32 * 1024**2
#: Generous size of a log-probability with its token, rank and text.
LOGPROB_BYTES = 512
#: Seconds for GET requests (models, metrics), which need no computation.
QUICK_S = 30.0
#: Seconds between two bytes of an answer.
IDLE_S = 300.0


@dataclass(frozen=True)
class Client:
    """A server.

    Attributes:
        url: without /v1.
        model: its name for the model; "" is the first one in most calls.
        timeout: seconds for one answer, to its last byte.
        key: API key, "" for none.
    """

    url: str
    model: str = ""
    timeout: float = 300.0
    key: str = ""

    def models(self) -> list[dict[str, Any]]:
        """The server's list of models: objects whose `id` is text."""
        served = self._parsed("GET", "/v1/models")
        with self._checked("/v1/models"):
            models: list[dict[str, Any]] = served["data"]
            for model in models:
                ServedModel.model_validate(model)
            return models

    def entry(self) -> dict[str, Any]:
        """The server's entry of the model `self.model`, or of its first model if that is empty.

        Raises:
            ConfigError: it does not serve that model.
        """
        served = self.models()
        entry = next((model for model in served if self.model in ("", model["id"])), None)
        if entry is None:
            names = shortened(", ".join(model["id"] for model in served), 200)
            raise ConfigError(
                f"{self.url} does not serve {self.model or 'any model'!r}", f"it serves {names or 'none'}"
            )
        return entry

    def named(self) -> Client:
        """This client with the name of its model; errors as `entry`."""
        return replace(self, model=self.entry()["id"])

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name, summed over engines and labels; empty where the server has no metrics."""
        try:
            with self._answer("GET", "/metrics") as reply:
                text = reply.read().decode(errors="replace")
        except CheckFailedError:
            return {}
        sums: dict[str, float] = defaultdict(float)
        for name, value in re.findall(r"^([\w:]+)(?:\{[^}\n]*\})? ([-+.\deE]{1,40})$", text, re.MULTILINE):
            with contextlib.suppress(ValueError):
                sums[name] += float(value)
        return sums

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Answer:
        """Greedy unless `options` say otherwise."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 256, **options}
        answer = Answer()
        if options.get("stream"):
            for reply in self.events(body):
                answer.add(reply)
            return answer
        content = self._parsed("POST", CHAT, body)
        with self._checked(CHAT):
            reply = ChatReply.model_validate(content)
            answer.add(reply)
            answer.prompt_ids, answer.token_ids = reply.prompt_token_ids or [], reply.choices[0].token_ids or []
        return answer

    def events(self, request: dict[str, Any]) -> Iterator[ChatReply]:
        """The server-sent events of a streamed chat completion, each as soon as its line is complete."""
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        with self._answer("POST", CHAT, body) as reply:
            for line in reply.lines():
                with self._checked(CHAT):
                    name, _, text = line.decode().partition(":")
                    if name != "data":  # a keep-alive comment, an event's name, an empty line
                        continue
                    if text.strip() == "[DONE]":
                        return
                    event = parse_json(text)
                    if not isinstance(event, dict) or event.get("error"):
                        raise CheckFailedError(f"{self.url}{CHAT}: {shown(event, 300)}", "see the server's log")
                    piece = ChatReply.model_validate(event)
                yield piece
        raise CheckFailedError(f"{self.url}{CHAT}: the stream ends without [DONE]", "see the server's log")

    def complete(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        """The first choice of /v1/completions for token ids; greedy unless `options` say otherwise."""
        path = "/v1/completions"
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **options}
        probabilities = len(prompt) * ((options.get("prompt_logprobs") or 0) + 1)
        reply = self._parsed("POST", path, body, MAX_BYTES + probabilities * LOGPROB_BYTES)
        with self._checked(path):
            choice: dict[str, Any] = {**reply["choices"][0]}
        return choice

    def prompt_probabilities(self, prompt: list[int], k: int) -> dict[str, Any]:
        """SGLang's `meta_info` of a prompt: log-probabilities of its ids and of the `k` best ids per position."""
        path = "/generate"
        body: dict[str, Any] = {
            "input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True,
            "logprob_start_len": 0, "top_logprobs_num": k,
        }  # fmt: skip
        reply = self._parsed("POST", path, body, MAX_BYTES + len(prompt) * (k + 1) * LOGPROB_BYTES)
        with self._checked(path):
            meta: dict[str, Any] = {**reply["meta_info"]}
        return meta

    def is_sglang(self) -> bool:
        """True if the server has SGLang's description of its model, which vLLM does not have."""
        try:
            description = self._parsed("GET", "/model_info")
        except CheckFailedError:
            return False
        return isinstance(description, dict) and "is_generation" in description

    def score(self, prompt: list[int], tokens: list[int]) -> list[float] | None:
        """Log-probability of each of `tokens` after `prompt`, in nats; None if the server does not return them."""
        entries = self.complete([*prompt, *tokens], max_tokens=1, prompt_logprobs=0).get("prompt_logprobs")
        if not entries:
            return None
        with self._checked("/v1/completions"):
            pairs = zip(tokens, entries[len(prompt) :], strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in pairs]

    def _parsed(self, method: str, path: str, body: dict[str, Any] | None = None, max_bytes: int | None = None) -> Any:
        with self._answer(method, path, body, max_bytes) as reply:
            data = reply.read()
        try:
            return parse_json(data)
        except ValueError as error:
            raise CheckFailedError(
                f"{self.url}{path}: the answer is not JSON: {shortened(str(error), 160)}", "see the server's log"
            ) from None

    @contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None, max_bytes: int | None = None
    ) -> Iterator[BoundedReply]:
        timeout = min(self.timeout, QUICK_S) if method == "GET" else self.timeout
        bounds = timeout, min(timeout, IDLE_S), max_bytes or MAX_BYTES
        with exchange(method, self.url + path, body, self.key, *bounds) as reply:
            yield reply

    @contextmanager
    def _checked(self, path: str) -> Iterator[None]:
        """Turn errors in the block into `CheckFailedError`: the answer does not have the form of the API."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise CheckFailedError(
                f"{self.url}{path}: the answer does not have the form of the OpenAI API: {shortened(str(error), 160)}",
                "is this a vLLM or SGLang server? see its log",
            ) from None
