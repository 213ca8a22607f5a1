"""Command lines of engines: their flags and the values of the flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm5_ascend.files.untrusted import parse_json

#: Environment variable of vLLM's API key.
KEY_VARIABLE = "VLLM_API_KEY"
#: SGLang has the flag only.
KEY_FLAGS = ("--api-key", "--api_key")
#: vLLM's short flags.
SHORT = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
}


@dataclass(frozen=True)
class ServerCommand:
    """Command line of a server. env: variables to set; argv: program and flags.

    A profile's command may contain `{words}`, which `deploy.profiles.command` fills in.
    """

    env: dict[str, str]
    argv: list[str]

    def without_key(self) -> ServerCommand:
        """Move the API key to the environment, because every user of the machine can read a command line."""
        argv, env, key = [], dict(self.env), False
        for arg in self.argv:
            name, equals, value = arg.partition("=")
            if key:
                env[KEY_VARIABLE], key = arg, False
            elif name.replace("_", "-") == "--api-key":
                if equals:
                    env[KEY_VARIABLE] = value
                key = not equals
            else:
                argv.append(arg)
        return ServerCommand(env, argv)

    @property
    def shown(self) -> str:
        """The command as one line without the API key, for logs and terminals."""
        return self.masked().line

    def masked(self) -> ServerCommand:
        """Replace the API key by stars."""
        argv = [
            "***" if before in KEY_FLAGS else re.sub(r"(?s)^(--api[-_]key=).*", r"\1***", arg)
            for before, arg in zip(["", *self.argv], self.argv, strict=False)
        ]
        return ServerCommand({name: "***" if name == KEY_VARIABLE else v for name, v in self.env.items()}, argv)

    @property
    def line(self) -> str:
        """The command as one line for a shell."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])

    def to_dict(self) -> dict[str, Any]:
        """JSON of `serve --dry-run --json`."""
        return {
            "schema_version": 1, "command": "serve", "ok": True, "exit_code": 0, "env": self.masked().env,
            "argv": self.argv,
        }  # fmt: skip


def flag_groups(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split a command line into (flag in the spelling `--a-b`, its words). Words before the first flag: flag ""."""
    groups: list[tuple[str, list[str]]] = [("", [])]
    for word in argv:
        if word.startswith("--") or word in SHORT:
            name = word.partition("=")[0].replace("_", "-")
            groups.append((SHORT.get(name, name), []))
        groups[-1][1].append(word)
    return groups


def without(argv: Sequence[str], *flags: str) -> list[str]:
    """Remove flags and their values."""
    return [word for name, words in flag_groups(argv) if name not in flags for word in words]


def parsed_flags(argv: Sequence[str]) -> dict[str, Any]:
    """Flags of a command line by name without dashes; the last one of a name counts.

    `--no-x` is x: False, a flag without a value True. JSON is parsed, so numbers are numbers; several words are a list.
    `--a.b value` sets the key b of the object a, as vLLM reads it.
    """
    flags: dict[str, Any] = {}
    for name, words in flag_groups(argv)[1:]:
        inline = words[0].partition("=")
        values = [_parsed(word) for word in [*([inline[2]] if inline[1] else []), *words[1:]]]
        value = values if len(values) > 1 else values[0] if values else True
        flag, _, key = name.removeprefix("--").partition(".")
        if key:
            whole = flags.get(flag)
            value = {**(whole if isinstance(whole, dict) else {}), key.replace("-", "_"): value}
        elif flag.startswith("no-") and not values:
            flag, value = flag.removeprefix("no-"), False
        flags[flag] = value
    return flags


def _parsed(word: str) -> Any:
    try:
        return parse_json(word)
    except ValueError:
        return word


def given_flags(extra: Sequence[str]) -> set[str]:
    """Flags of a command line in the spelling `--a-b`; `--no-x` counts as `--x`, too."""
    names = {name for name, _ in flag_groups(extra)[1:]}
    return names | {"--" + name.removeprefix("--no-") for name in names if name.startswith("--no-")}


def value_of(argv: Sequence[str], flag: str) -> str:
    """Value of a flag; the last one counts. Empty without the flag or its value."""
    words = next((words for name, words in reversed(flag_groups(argv)) if name == flag), [""])
    _, equals, inline = words[0].partition("=")
    return inline if equals else words[1] if len(words) > 1 else ""


def json_of(argv: Sequence[str], flag: str) -> dict[str, Any]:
    """JSON object in a flag; an empty one for a value that vLLM itself refuses."""
    value = parsed_flags(argv).get(flag.removeprefix("--"))
    return value if isinstance(value, dict) else {}
