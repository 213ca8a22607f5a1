"""Times of first tokens and decode steps of a running server, by streamed completions of random tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from glm5_ascend.errors import CheckFailedError
from glm5_ascend.serve.client import Client

#: Lengths of prompts for the time of the first token; numbers of requests of STEP_PROMPT tokens for decode steps.
PROMPTS = (128, 256, 512)
BATCHES = (1, 2, 4)
STEP_PROMPT, NEW_TOKENS = 256, 64
ANSWERS = (NEW_TOKENS, 2 * NEW_TOKENS, 4 * NEW_TOKENS)
#: Flags of the server: no prefix cache.
FLAGS = ("--no-enable-prefix-caching", "--max-num-seqs", "8", "--max-model-len", "2048")


@dataclass(frozen=True)
class Served:
    """Seconds, medians over the rounds. first: by prompt tokens. step: by concurrent requests."""

    first: dict[int, float]
    step: dict[int, float]
    rounds: int

    @property
    def step_context(self) -> float:
        """Mean cached tokens of a request during the timed steps."""
        return STEP_PROMPT + NEW_TOKENS / 2


class Timer:
    """Measures one server with random prompts of the first `vocabulary` token ids."""

    def __init__(self, url: str, vocabulary: int) -> None:
        self.client, self.vocabulary, self.random = Client(url, timeout=600), vocabulary, random.Random(0)

    def measure(self, rounds: int, warm: bool = True) -> Served:
        """Measure all sizes in turn, `rounds` times (`warm`: after one more), so that other load affects all sizes."""
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
            {length: statistics.median(seconds) for length, seconds in first.items()},
            {batch: statistics.median(seconds) for batch, seconds in step.items()},
            rounds,
        )

    def first_token(self, length: int) -> float:
        start = time.perf_counter()
        return self.arrivals(self.prompt(length), 1)[0] - start

    def step(self, batch: int) -> float:
        """Seconds between tokens while all requests decode.

        On a busy machine a request may end before another one starts: then the answers get longer.

        Raises:
            CheckFailedError: the requests never decoded together.
        """
        for tokens in ANSWERS:
            if (seconds := self._step(batch, tokens)) is not None:
                return seconds
        raise CheckFailedError("the requests did not decode together", "measure when less else runs")

    def _step(self, batch: int, tokens: int) -> float | None:
        prompts = [self.prompt(STEP_PROMPT) for _ in range(batch)]
        with ThreadPoolExecutor(batch) as pool:
            times = list(pool.map(lambda prompt: self.arrivals(prompt, tokens), prompts))
        start, end = max(arrivals[0] for arrivals in times), min(arrivals[-1] for arrivals in times)
        steps = [sum(start < moment <= end for moment in arrivals) for arrivals in times]
        return (end - start) / statistics.mean(steps) if all(steps) else None

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(length)]

    def arrivals(self, prompt: Sequence[int], new_tokens: int) -> list[float]:
        """Arrival time of each token, by time.perf_counter.

        Raises:
            CheckFailedError: a token is missing.
        """
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
            raise CheckFailedError(f"{len(times)} of {new_tokens} tokens arrived", "see the server's log")
        return times
