"""The exact environment and command of a profile's role on one machine, and the lines of a script that runs it."""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from packaging.version import Version

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.engine_lines import SGLANG, VLLM, VLLM_ASCEND_LINES, EngineLine, vllm_ascend_line
from glm5_ascend.errors import ConfigError, shell_word, shown
from glm5_ascend.serve.environment import version_of
from glm5_ascend.serve.flag_table import flag_table, installed_table
from glm5_ascend.serve.flags import KEY_VARIABLE, MASK, SPECULATIVE, ServerCommand, given_flags, normal_form, without
from glm5_ascend.serve.options import ServeOptions

#: Words in braces that only the user knows -> option of `serve` that gives the value, and its meaning.
ASKED = {
    "head": ("--head", "address of this role's node 0"),
    "store": ("--head", "address of the machine with the memory store: the first of prefill"),
    "ip": ("--ip", "this machine's address"),
    "nic": ("--nic", "network interface that has the address"),
}
#: All words in braces that a profile may use.
WORDS = (*ASKED, "node", "start_rank", "rank", "devices", "port")
#: The API key in a line for a shell, which ends if there is none.
_KEY = f'"${{{KEY_VARIABLE}:?set it, or anyone may use the server}}"'
#: Words before the model; after it come only flags.
_HEADS = {VLLM: ("vllm", "serve"), SGLANG: ("python", "-m", "sglang.launch_server", "--model-path")}
_HOST = re.compile(r"[A-Za-z0-9._:@-]{0,253}")
_WORD = re.compile(r"\{(" + "|".join(WORDS) + r")\}")


def verify_name(engine: str, platform: str) -> str:
    """Name of the engine for `verify --engine`."""
    return engine if engine == SGLANG or platform == "cpu" else "vllm-ascend"


def as_flag(engine: str, name: str, value: Any) -> list[str]:
    """A flag of a profile as words. SGLang has no `--no-x` and takes lists as several words."""
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [] if engine == SGLANG else [f"--no-{name}"]
    if isinstance(value, list) and engine == SGLANG:
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def user_flags(profile: Profile, extra: Sequence[str]) -> tuple[EngineLine, list[str]]:
    """The engine line that a profile runs on here, and the user's flags in its normal form.

    The line is that of the installed vllm-ascend. Without one it is the profile's, or a newer line that alone takes the
    user's flags.

    Raises:
        ConfigError: the engine would refuse one of the flags.
    """
    line, installed = profile.line, version_of("vllm-ascend")
    if line in VLLM_ASCEND_LINES:
        if installed is not None:
            line = vllm_ascend_line(Version(installed))
            return line, normal_form(extra, installed_table(line))
        for newer in VLLM_ASCEND_LINES:
            if newer.release >= line.release:
                with suppress(ConfigError):
                    return newer, normal_form(extra, flag_table(newer.flags))
    return line, normal_form(extra, installed_table(line))


def open_command(role: Role, model: str, extra: list[str], host: str | None = None) -> ServerCommand:
    """The command with its `{words}` unfilled. `extra` comes last; its flags replace the profile's."""
    flags = {"host": role.args.get("host", "127.0.0.1"), "port": "{port}"}
    if host is not None:
        flags["host"] = host
    overridden = given_flags(extra)
    argv = [*_HEADS[role.engine], model]
    for name, value in {**flags, **{k: v for k, v in role.args.items() if k != "host"}}.items():
        if name == "speculative-config":  # vLLM refuses a key that is given twice
            spoken = {key for flag, key in SPECULATIVE.items() if f"--{flag}" in overridden}
            value = {key: item for key, item in value.items() if key not in spoken}
        if f"--{name}" not in overridden:
            argv += as_flag(role.engine, name, value)
    return ServerCommand(dict(role.env), argv + extra)


def command(profile: Profile, role: Role, options: ServeOptions, model: str, extra: list[str]) -> ServerCommand:
    """The command of one server, with all words filled in. options: machine, rank and address.

    Raises:
        ConfigError: the profile has no such server, or the command needs a word that `options` does not give.
    """
    check_options(profile, role, options)
    first = role.port if options.port is None else options.port
    words = {
        "head": options.head,
        "ip": options.ip,
        "nic": options.nic,
        "node": str(options.node),
        "store": options.head,
        "start_rank": str(options.node * role.local_ranks),
        "rank": str(options.node * role.local_ranks + options.rank),
        "devices": ",".join(str(options.rank * role.rank_dies + i) for i in range(role.rank_dies)),
        "port": str(first + options.rank),
    }
    unfilled = open_command(role, model, extra, options.host)
    env = {name: fill(value, words, profile) for name, value in unfilled.env.items()}
    return ServerCommand(env, headless(role, options.node, [fill(arg, words, profile) for arg in unfilled.argv]))


def headless(role: Role, node: int, argv: list[str]) -> list[str]:
    """Add --headless on all nodes of a common command but the first. SGLang tells them apart by --node-rank."""
    if role.engine == SGLANG or role.per_rank or node == 0 or role.nodes == 1:
        return argv
    return [*argv[:3], "--headless", *without(argv[3:], "--api-server-count")]


def fill(text: str, words: Mapping[str, str], profile: Profile) -> str:
    """Replace the words in braces by their values."""

    def filled(match: re.Match[str]) -> str:
        value = words[match[1]]
        if not value:
            option, meaning = ASKED[match[1]]
            raise ConfigError(
                f"profile {profile.name} needs to know {match[1]!r} ({meaning})", f"give it with {option}"
            )
        return value

    return _WORD.sub(filled, text)


def check_options(profile: Profile, role: Role, options: ServeOptions) -> None:
    """Raises `ConfigError` if the role has no such node or rank, or for an address or interface that is none."""
    for option, value in (("--head", options.head), ("--host", options.host or ""), ("--nic", options.nic)):
        if not _HOST.fullmatch(value):
            raise ConfigError(f"{option} {shown(value)}: not a name or address", "letters, digits and . : _ - @ only")
    if options.ip:
        try:
            ipaddress.ip_address(options.ip)
        except ValueError:
            raise ConfigError(f"--ip {shown(options.ip)}: not an IP address", "such as 10.0.0.2") from None
    if options.node >= role.nodes:
        raise ConfigError(
            f"--node {options.node}: role {role.name} of {profile.name} has nodes 0 to {role.nodes - 1}",
            "give one of them",
        )
    ranks = role.local_ranks if role.per_rank else 1
    if options.rank >= ranks:
        hint = f"has servers 0 to {ranks - 1} on each node" if role.per_rank else "has one server per node"
        raise ConfigError(f"--rank {options.rank}: role {role.name} of {profile.name} {hint}", "give one of them")


def heading(profile: Profile) -> list[str]:
    """Title, status and source of the profile as comments."""
    return [
        f"# {profile.name}: {profile.title}",
        f"# for {profile.line.name}; {profile.status}",
        f"# source: {profile.source}",
        *(f"# on {VLLM_ASCEND_LINES[-1].name}: {line}" for line in profile.on_next),
    ]


def call(argv: list[str], quote: Callable[[str], str] = shlex.quote, end: str = "") -> list[str]:
    """One flag per line, joined by backslashes."""
    groups: list[list[str]] = []
    for position, arg in enumerate(argv):
        if position == 0 or arg.startswith("--"):
            groups.append([])
        groups[-1].append(quote(arg))
    lines = [" ".join(group) for group in groups]
    if end:
        lines.append(end)
    return [("  " if i else "") + line + (" \\" if i < len(lines) - 1 else "") for i, line in enumerate(lines)]


def script(profile: Profile, command: ServerCommand, needs_key: bool = False) -> str:
    """A script that runs a command as it is shown: without the API key, which it takes from VLLM_API_KEY.

    Args:
        needs_key: without a key the server would answer anyone.
    """
    env = {name: shell_word(value) for name, value in command.env.items()}
    argv = [_KEY if word == MASK else shell_word(word) for word in command.argv]
    if needs_key or KEY_VARIABLE in env:
        env[KEY_VARIABLE] = _KEY
        if profile.engine == SGLANG and _KEY not in argv:
            model = len(_HEADS[SGLANG])
            argv[model + 1 : model + 1] = ["--api-key", _KEY]
    exports = (f"export {name}={value}" for name, value in env.items())
    return "\n".join([*heading(profile), *exports, *call(argv, quote=str)])
