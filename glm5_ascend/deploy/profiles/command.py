"""Profile, role and place -> the exact environment and command of the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from glm5_ascend.deploy.profiles.engines import as_flag, head
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.engine_lines import SGLANG
from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.flags import ServerCommand, given_flags

#: Words a profile may leave open, and the option of `serve` that gives each.
WORDS = {
    "head": "--head", "ip": "--ip", "nic": "--nic", "node": "--node", "start_rank": "--node",
    "rank": "--node and --rank", "devices": "--rank", "port": "--rank", "store": "--head",
}  # fmt: skip
_WORD = re.compile(r"\{(" + "|".join(WORDS) + r")\}")


@dataclass(frozen=True)
class ServerPlace:
    """Where a command runs.

    Attributes:
        node: number of the machine within its role, from 0.
        rank: for roles with a server per DP rank: its number on the machine, from 0.
        head: address of node 0 of the role, or of the machine with SGLang's memory store.
        ip, nic: this machine's own address and network interface.
        host, port: where the server listens, the profile's if None; with `rank`, `port` is the first server's.
    """

    node: int = 0
    rank: int = 0
    head: str = ""
    ip: str = ""
    nic: str = ""
    host: str | None = None
    port: int | None = None


def open_command(role: Role, model: str, extra: list[str], host: str | None = None) -> ServerCommand:
    """The command with its `{words}` left open. `extra` goes last; a flag in it takes the place of ours."""
    flags = {"host": role.args.get("host", "127.0.0.1"), "port": "{port}"}
    if host is not None:
        flags["host"] = host
    given = given_flags(extra)
    argv = head(role.engine, model)
    for name, value in {**flags, **{k: v for k, v in role.args.items() if k != "host"}}.items():
        if f"--{name}" not in given:
            argv += as_flag(role.engine, name, value)
    return ServerCommand(dict(role.env), argv + extra)


def command(profile: Profile, role: Role, place: ServerPlace, model: str, extra: list[str]) -> ServerCommand:
    """The command of one place, nothing left open.

    Raises:
        ConfigError: the place does not exist in the profile, or the command needs a word that `place` does not give.
    """
    check_place(profile, role, place)
    first = role.port if place.port is None else place.port
    words = {
        "head": place.head,
        "ip": place.ip,
        "nic": place.nic,
        "node": str(place.node),
        "store": place.head,
        "start_rank": str(place.node * role.local_ranks),
        "rank": str(place.node * role.local_ranks + place.rank),
        "devices": ",".join(str(place.rank * role.rank_dies + i) for i in range(role.rank_dies)),
        "port": str(first + place.rank),
    }
    left_open = open_command(role, model, extra, place.host)
    env = {name: fill(value, words, profile) for name, value in left_open.env.items()}
    return ServerCommand(env, [*headless(role, place.node, [fill(arg, words, profile) for arg in left_open.argv])])


def headless(role: Role, node: int, argv: list[str]) -> list[str]:
    """Nodes after the first of a common command take no requests of their own; SGLang knows them by their rank."""
    if role.engine == SGLANG or role.per_rank or node == 0 or role.nodes == 1:
        return argv
    return [*argv[:3], "--headless", *without(argv[3:], ("--api-server-count",))]


def without(argv: list[str], flags: tuple[str, ...]) -> list[str]:
    """argv without some flags and the value behind each."""
    kept: list[str] = []
    skip = False
    for arg in argv:
        if skip:
            skip = False
        elif arg in flags:
            skip = True
        else:
            kept.append(arg)
    return kept


def fill(text: str, words: Mapping[str, str], profile: Profile) -> str:
    """Text with its words filled in."""

    def filled(match: re.Match[str]) -> str:
        value = words[match[1]]
        if not value:
            raise ConfigError(
                f"profile {profile.name} needs to know {match[1]!r} ({MEANING[match[1]]})",
                f"give it with {WORDS[match[1]]}",
            )
        return value

    return _WORD.sub(filled, text)


MEANING = {
    "head": "address of this role's node 0",
    "store": "address of the machine with the memory store, the first of prefill",
    "ip": "this machine's address",
    "nic": "network interface that has the address",
}


def check_place(profile: Profile, role: Role, place: ServerPlace) -> None:
    if place.node >= role.nodes:
        raise ConfigError(
            f"--node {place.node}: role {role.name} of {profile.name} has nodes 0 to {role.nodes - 1}",
            _choices("--node", role.nodes),
        )
    ranks = role.local_ranks if role.per_rank else 1
    if place.rank >= ranks:
        hint = f"has servers 0 to {ranks - 1} on each node" if role.per_rank else "has one server per node"
        raise ConfigError(f"--rank {place.rank}: role {role.name} of {profile.name} {hint}", _choices("--rank", ranks))


def _choices(option: str, count: int) -> str:
    return f"{option} {' or '.join(map(str, range(count)))}"
