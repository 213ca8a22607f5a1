"""First tokens and steps of a running server, by streamed completions of random tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from glm5_ascend.errors import CheckFailedError
from glm5_ascend.serve.client import Client

#: Prompts whose first token is timed, alone; requests at once whose steps are timed, of STEP_PROMPT tokens each.
PROMPTS = (128, 256, 512)
BATCHES = (1, 2, 4)
STEP_PROMPT, NEW_TOKENS = 256, 64
ANSWERS = (NEW_TOKENS, 2 * NEW_TOKENS, 4 * NEW_TOKENS)
#: Flags of the server: no answer may come from a cache.
FLAGS = ("--no-enable-prefix-caching", "--max-num-seqs", "8", "--max-model-len", "2048")


@dataclass(frozen=True)
class Served:
    """Seconds, medians over the rounds. first: by prompt tokens. step: by requests at once."""

    first: dict[int, float]
    step: dict[int, float]
    rounds: int

    @property
    def step_context(self) -> float:
        """Mean tokens in the cache of a request whose steps were timed."""
        return STEP_PROMPT + NEW_TOKENS / 2


class Timer:
    """Asks one server; `vocabulary`: token ids to draw prompts from."""

    def __init__(self, url: str, vocabulary: int) -> None:
        self.client, self.vocabulary, self.random = Client(url, timeout=600), vocabulary, random.Random(0)

    def measure(self, rounds: int, warm: bool = True) -> Served:
        """All sizes in turn, `rounds` times, with `warm` after one more: what else runs hits all alike."""
        first: dict[int, list[float]] = {length: [] for length in PROMPTS}
        step: dict[int, list[float]] = {batch: [] for batch in BATCHES}
        for number in range(0 if warm else 1, rounds + 1):
            for length in PROMPTS:
                seconds = self.first_token(length)
                if number:
                    first[length].append(seconds)
            for batch in BATCHES:
                seconds = self.step(batch)
                if number:
                    step[batch].append(seconds)
        return Served(
            {length: statistics.median(found) for length, found in first.items()},
            {batch: statistics.median(found) for batch, found in step.items()},
            rounds,
        )

    def first_token(self, length: int) -> float:
        began = time.perf_counter()
        return self.arrivals(self.prompt(length), 1)[0] - began

    def step(self, batch: int) -> float:
        """Seconds between tokens while all requests decode. On a busy machine one may end before another begins: then
        with longer answers."""
        for tokens in ANSWERS:
            if (seconds := self._step(batch, tokens)) is not None:
                return seconds
        raise CheckFailedError("the requests did not decode together", "measure when less else runs")

    def _step(self, batch: int, tokens: int) -> float | None:
        prompts = [self.prompt(STEP_PROMPT) for _ in range(batch)]
        with ThreadPoolExecutor(batch) as pool:
            times = list(pool.map(lambda prompt: self.arrivals(prompt, tokens), prompts))
        began, ended = max(found[0] for found in times), min(found[-1] for found in times)
        inside = [sum(began < moment <= ended for moment in found) for found in times]
        return (ended - began) / statistics.mean(inside) if all(inside) else None

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(length)]

    def arrivals(self, prompt: Sequence[int], new_tokens: int) -> list[float]:
        """When each token came, by time.perf_counter."""
        body = {
            "model": "glm-5", "prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        times: list[float] = []
        for event in self.client.stream("/v1/completions", body):
            now = time.perf_counter()
            for choice in event["choices"]:
                times += [now] * len(choice.get("token_ids") or ())
        if len(times) != new_tokens:
            raise CheckFailedError(f"{len(times)} of {new_tokens} tokens came", "see the server's log")
        return times
