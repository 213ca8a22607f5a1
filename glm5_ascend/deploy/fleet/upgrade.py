"""A rolling upgrade: each replica is drained, restarted, asked canaries, and let in, before the next one leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm5_ascend.errors import EXIT_OK, CheckFailedError, ConfigError, MissingEnvironmentError
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.router import RunningRouter, requests_of
from glm5_ascend.serve.smoke import user
from glm5_ascend.serve.watching.api import watch

#: Readings of "no request" in a row: one may be on its way from the router when it is told.
IDLE_READINGS = 3
PAUSE_S = 1.0
Say = Callable[[str], object]


@dataclass(frozen=True)
class UpgradeLimits:
    """Seconds. drain: until the requests that were begun have ended; start: until the new server answers."""

    drain: float = 3600.0
    start: float = 5400.0
    answer: float = 300.0


@dataclass
class UpgradedReplica:
    """One replica: most requests it was seen with after it had left the router, and seconds of each phase."""

    url: str
    in_flight: float = 0.0
    drained_s: float = 0.0
    restarted_s: float = 0.0
    checked_s: float = 0.0


@dataclass
class FleetUpgrade:
    """replicas: those that are done, in order."""

    router: str
    replicas: list[UpgradedReplica] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": 1, "command": "deploy upgrade", "ok": True, "exit_code": EXIT_OK, "router": self.router,
            "replicas": [asdict(each) for each in self.replicas],
        }  # fmt: skip


def upgrade(
    router: RunningRouter,
    restart: Callable[[str], object],
    *,
    workers: Sequence[str] = (),
    canaries: Path | None = None,
    limits: UpgradeLimits | None = None,
    key: str = "",
    say: Say = lambda line: None,
) -> FleetUpgrade:
    """Upgrade the servers behind a router without losing a request.

    Args:
        restart: called with a server's URL when nothing runs on it any more; on its return the old one has ended.
        workers: URLs as the router lists them; all of them if empty.
        canaries: file for `watch`; None asks three sums.
        key: the servers' API key. say: gets a line per phase.
    Raises:
        ConfigError: the router does not know a server, or has a single one. CheckFailedError: a server is not drained
            in time (it is let in again), or its successor does not answer or answers garbage (it stays outside, and
            the upgrade ends: the others go on serving what they have).
    """
    limits = limits or UpgradeLimits()
    known = router.workers()
    chosen = list(workers) or known
    for each in chosen:
        if each not in known:
            raise ConfigError(f"{router.url} has no server {each}", f"it has {', '.join(known) or 'none'}")
    if len(known) < 2:
        raise ConfigError(f"{router.url} has {len(known)} server: without it nobody answers", "add a second one first")
    done = FleetUpgrade(router.url)
    for each in chosen:
        client, replica = Client(each, timeout=limits.answer, key=key), UpgradedReplica(each)
        _drain(router, client, replica, limits.drain, say)
        say(f"{each}: {replica.in_flight:.0f} requests were in flight and have ended; restart")
        replica.restarted_s = _timed(lambda each=each, client=client: _restart(each, restart, client, limits.start))  # type: ignore[misc]
        replica.checked_s = _timed(lambda each=each: _check(each, canaries, limits.answer, key))  # type: ignore[misc]
        router.add(each)
        done.replicas.append(replica)
        times = f"drained {replica.drained_s} s, started {replica.restarted_s} s, checked {replica.checked_s} s"
        say(f"{each}: in again; {times}")
    return done


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return round(time.monotonic() - began, 1)


def _drain(router: RunningRouter, client: Client, replica: UpgradedReplica, seconds: float, say: Say) -> None:
    """Take it out and wait until it holds no request."""
    router.remove(replica.url)
    say(f"{replica.url}: out of the router")
    began, idle = time.monotonic(), 0
    while idle < IDLE_READINGS:
        held = _held(client)
        if held is None:
            router.add(replica.url)
            raise CheckFailedError(f"{replica.url}/metrics does not count requests", "is this a vLLM server?")
        replica.in_flight = max(replica.in_flight, held)
        idle = idle + 1 if held == 0 else 0
        if idle < IDLE_READINGS and time.monotonic() - began > seconds:
            router.add(replica.url)
            raise CheckFailedError(
                f"{replica.url}: {held:.0f} requests still run after {seconds:.0f} s", "give them longer: --drain S"
            )
        time.sleep(PAUSE_S)
    replica.drained_s = round(time.monotonic() - began, 1)


def _held(client: Client) -> float | None:
    """Requests that a server has, none where it has ended; None where it does not count them.

    vLLM counts them anew when a step ends, which with a long prompt may take many seconds: until then a request that
    has just come is in no count. An answer to a question of ours says that a step has ended since.
    """
    try:
        client.chat(user("Hello"), max_tokens=1)
    except CheckFailedError:
        pass  # it does not like the question: its count stands all the same
    except MissingEnvironmentError:
        return _counted(client, 1.0)  # no answer in time: not idle, whatever it counts
    return _counted(client, 0.0)


def _counted(client: Client, least: float) -> float | None:
    try:
        held = requests_of(client)
    except MissingEnvironmentError:
        return 0.0  # it has ended already
    return None if held is None else max(held, least)


def _restart(url: str, restart: Callable[[str], object], client: Client, seconds: float) -> None:
    restart(url)
    began = time.monotonic()
    while True:
        try:
            client.entry()
            return
        except (MissingEnvironmentError, CheckFailedError) as error:
            if time.monotonic() - began > seconds:
                raise CheckFailedError(
                    f"{url} does not answer {seconds:.0f} s after its restart: {error.message}",
                    "see its log; it is out of the router, the others serve",
                ) from None
        time.sleep(PAUSE_S)


def _check(url: str, canaries: Path | None, timeout: float, key: str) -> None:
    report = watch(url, canaries=canaries, once=True, timeout=timeout, key=key)
    if report.exit_code != EXIT_OK:
        raise CheckFailedError(
            f"{url} answers, but not well: {report.verdict}", "it is out of the router, the others serve what they had"
        )
