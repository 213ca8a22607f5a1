"""Heartbeats of the servers behind a router: a server that hangs is removed from the router.

A server whose engine hangs still answers /health, because its HTTP process is alive. Here a server is alive if it
finishes steps while it has requests, and if it answers a short question while it has none. A busy server is not asked.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from glm5_ascend.errors import EXIT_OK, CheckFailedError, ConfigError, Glm5Error, shown
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.router import RunningRouter
from glm5_ascend.serve.smoke import user
from glm5_ascend.serve.watching.api import watch

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
#: Tokens are counted at the end of a prompt. Until then the parts of a long prompt fill the cache.
PROGRESS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc")
Report = Callable[[str], object]


@dataclass
class ServerState:
    """One server. misses: failed heartbeats in a row. removed: this heartbeat removed it from the router."""

    client: Client
    progress: float = -1.0
    misses: int = 0
    removed: bool = False
    error: str = ""


@dataclass
class FleetHeartbeat:
    """Heartbeats of all servers of a router.

    Attributes:
        patience: failed heartbeats in a row after which a server is removed. timeout: seconds for one heartbeat.
        on_hung: called with the URL of a removed server. It should end the server: its requests wait until then.
    """

    router: RunningRouter
    patience: int = 3
    timeout: float = 10.0
    on_hung: Callable[[str], object] | None = None
    key: str = ""
    report: Report = print
    servers: dict[str, ServerState] = field(default_factory=dict)

    def follow(self, workers: Sequence[str]) -> None:
        """Add servers to the heartbeat."""
        for url in workers:
            self.servers.setdefault(url, ServerState(Client(url, timeout=self.timeout, key=self.key)))

    def beat(self) -> None:
        """One heartbeat of all servers; remove those that hang, add those that recovered.

        A server that joins the router is followed. A server that someone else removed is left alone.
        """
        routed = self.router.workers()
        self.follow(routed)
        self.servers = {url: server for url, server in self.servers.items() if url in routed or server.removed}
        with ThreadPoolExecutor(max(1, len(self.servers))) as pool:
            answers = list(pool.map(self._alive, self.servers.values()))
        for (url, server), alive in zip(self.servers.items(), answers, strict=True):
            server.misses = 0 if alive else server.misses + 1
            server.removed = server.removed and url not in routed  # someone else added it again
            if server.misses >= self.patience and not server.removed:
                self._remove(url, server)
            elif alive and server.removed:
                self._add(url, server)

    def run(self, interval: float, beats: int = 0) -> None:
        """Beat every `interval` seconds, `beats` times; 0: until interrupted. Errors of the router are reported."""
        count = 0
        while True:
            began = time.monotonic()
            try:
                self.beat()
            except Glm5Error as error:
                self.report(f"no heartbeat: {error.message}")
            count += 1
            if count == beats:
                return
            time.sleep(max(0.0, began + interval - time.monotonic()))

    def _alive(self, server: ServerState) -> bool:
        try:
            counted = server.client.metrics()
            before, server.progress = server.progress, sum(counted.get(name, 0.0) for name in PROGRESS)
            if counted.get(RUNNING, 0.0) + counted.get(WAITING, 0.0) > 0:
                server.error = "it has requests and finishes no step"
                return server.progress != before
            server.client.chat(user("Hello"), max_tokens=1)
        except Glm5Error as error:
            server.error = error.message
            return False
        return True

    def _remove(self, url: str, server: ServerState) -> None:
        if not [other for other, state in self.servers.items() if other != url and not state.removed]:
            self.report(f"{url}: no heartbeat ({server.error}), but it is the last server: it stays in the router")
            return
        if url not in self.router.workers():  # someone else removed it just now
            return
        self.router.remove(url)
        server.removed = True
        self.report(f"{url}: removed after {server.misses} failed heartbeats: {server.error}")
        if self.on_hung is not None:
            try:
                self.on_hung(url)
            except Glm5Error as error:
                self.report(f"{url}: {error.message}")

    def _add(self, url: str, server: ServerState) -> None:
        health = watch(url, polls=2, interval=0, timeout=max(60.0, self.timeout), key=self.key)
        if health.exit_code == EXIT_OK:
            self.router.add(url)
            server.removed = False
        self.report(f"{url}: {'not added: ' + health.verdict if server.removed else 'added again'}")


def fill_command(command: str, worker: str) -> list[str]:
    """Split a command into words and fill in {url}, {host} and {port} of a server. No shell reads it.

    Raises:
        ConfigError: the command is empty, has an open quote, or has other words in braces.
    """
    parts = urlsplit(worker)
    fields = {"url": worker, "host": parts.hostname or "", "port": str(parts.port or 80)}
    try:
        words = [word.format(**fields) for word in shlex.split(command)]
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"command {shown(command)}: {error}", "words in braces: {url} {host} {port}") from None
    if not words:
        raise ConfigError("the command is empty", "as in 'ssh {host} systemctl restart glm5'")
    return words


def run_command(command: str, worker: str) -> None:
    """Run a command for a server and wait for its end.

    Raises:
        CheckFailedError: it failed; its last line is quoted. ConfigError: it cannot be started.
    """
    words = fill_command(command, worker)
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ConfigError(f"{words[0]}: {error.strerror}", "name an installed program") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise CheckFailedError(f"{words[0]} for {worker} ended with exit code {done.returncode}: {last[:300]}")
