"""The life of each replica by its heartbeat: one that hangs leaves the router, as one that is dead does.

A server whose engine hangs still answers /health: its HTTP process lives. Here a server is alive if it finishes steps
while it has requests, and answers a question of ours while it has none. A busy one is never disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from glm5_ascend.errors import EXIT_OK, Glm5Error
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.router import RunningRouter
from glm5_ascend.serve.smoke import user
from glm5_ascend.serve.watching.api import watch

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
#: Tokens count at the end of a prompt, however long it is; meanwhile its parts fill the cache.
PROGRESS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc")
Say = Callable[[str], object]


@dataclass
class ReplicaLife:
    """misses: beats in a row without a sign of life. out: not in the router, by us."""

    client: Client
    progress: float = -1.0
    misses: int = 0
    out: bool = False
    said: str = ""


@dataclass
class FleetHeartbeat:
    """Beats for some servers of a router.

    Attributes:
        patience: misses in a row after which a server is taken out. timeout: seconds for one sign of life.
        on_hung: called with the URL of a server that was taken out: it should end it, or its requests wait on;
            None leaves it alone.
        canaries: for `watch`, before a server is let in again; None asks three sums.
    """

    router: RunningRouter
    patience: int = 3
    timeout: float = 10.0
    on_hung: Callable[[str], object] | None = None
    canaries: Path | None = None
    key: str = ""
    say: Say = print
    lives: dict[str, ReplicaLife] = field(default_factory=dict)

    def follow(self, workers: Sequence[str]) -> None:
        """These servers from now on, too."""
        for url in workers:
            self.lives.setdefault(url, ReplicaLife(Client(url, timeout=self.timeout, key=self.key)))

    def beat(self) -> None:
        """One beat for all at once; takes out and lets in.

        A server that joins the router is followed. One that somebody else took out, as an upgrade does, is theirs.
        """
        within = self.router.workers()
        self.follow(within)
        ours = {url: life for url, life in self.lives.items() if url in within or life.out}
        self.lives = ours
        with ThreadPoolExecutor(max(1, len(ours))) as pool:
            alive = list(pool.map(self._alive, ours.values()))
        for (url, life), lives in zip(ours.items(), alive, strict=True):
            life.misses = 0 if lives else life.misses + 1
            life.out = life.out and url not in within  # let in by somebody else
            if life.misses >= self.patience and not life.out:
                self._take_out(url, life)
            elif lives and life.out:
                self._let_in(url, life)

    def run(self, interval: float, beats: int = 0) -> None:
        """A beat every `interval` seconds; `beats` of them, 0: without end. What the router refuses is said."""
        number = 0
        while True:
            began = time.monotonic()
            try:
                self.beat()
            except Glm5Error as error:
                self.say(f"no beat: {error.message}")
            number += 1
            if number == beats:
                return
            time.sleep(max(0.0, began + interval - time.monotonic()))

    def _alive(self, life: ReplicaLife) -> bool:
        try:
            counted = life.client.metrics()
            before, life.progress = life.progress, sum(counted.get(name, 0.0) for name in PROGRESS)
            if counted.get(RUNNING, 0.0) + counted.get(WAITING, 0.0) > 0:
                life.said = "requests are there, and no step ends"
                return life.progress != before
            life.client.chat(user("Hello"), max_tokens=1)
        except Glm5Error as error:
            life.said = error.message
            return False
        return True

    def _take_out(self, url: str, life: ReplicaLife) -> None:
        if not [other for other, its in self.lives.items() if other != url and not its.out]:
            self.say(f"{url}: no sign of life ({life.said}), but it is the last one: stays")
            return
        if url not in self.router.workers():  # taken out by somebody else just now
            return
        self.router.remove(url)
        life.out = True
        self.say(f"{url}: out, {life.misses} beats without a sign of life: {life.said}")
        if self.on_hung is not None:
            try:
                self.on_hung(url)
            except Glm5Error as error:
                self.say(f"{url}: {error.message}")

    def _let_in(self, url: str, life: ReplicaLife) -> None:
        found = watch(url, canaries=self.canaries, once=True, timeout=max(60.0, self.timeout), key=self.key)
        if found.exit_code == EXIT_OK:
            self.router.add(url)
            life.out = False
        self.say(f"{url}: {'in again' if not life.out else 'stays out: ' + found.verdict}")
