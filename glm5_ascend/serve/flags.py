"""vLLM command lines: which flags one holds, and the value each has in the end."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm5_ascend.files.untrusted import parse_json

#: vLLM takes its API key from here, too.
KEY_VARIABLE = "VLLM_API_KEY"
#: SGLang takes it from the command line alone.
KEY_FLAGS = ("--api-key", "--api_key")


@dataclass(frozen=True)
class ServerCommand:
    """A server that can be started. env: variables to set; argv: program and flags.

    A profile's command may hold `{words}` that its place gives (see `deploy.profiles.command`).
    """

    env: dict[str, str]
    argv: list[str]

    def without_key(self) -> ServerCommand:
        """The same with the API key in the environment, because everyone on the machine can read a command line."""
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
        """`line` without the API key, for logs and terminals."""
        return self.masked().line

    def masked(self) -> ServerCommand:
        """The same with stars in the place of the API key."""
        argv = [
            "***" if before in KEY_FLAGS else re.sub(r"(?s)^(--api[-_]key=).*", r"\1***", arg)
            for before, arg in zip(["", *self.argv], self.argv, strict=False)
        ]
        return ServerCommand({name: "***" if name == KEY_VARIABLE else v for name, v in self.env.items()}, argv)

    @property
    def line(self) -> str:
        """As one line that a shell takes."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])

    def to_dict(self) -> dict[str, Any]:
        """The data of `serve --dry-run --json`."""
        return {
            "schema_version": 1, "command": "serve", "ok": True, "exit_code": 0, "env": self.masked().env,
            "argv": self.argv,
        }  # fmt: skip


def given_flags(extra: Sequence[str]) -> set[str]:
    """The flags in a vLLM command line, spelled as our defaults spell them."""
    flags = {arg.split("=", 1)[0].replace("_", "-") for arg in extra if arg.startswith("--")}
    flags |= {"--" + flag.removeprefix("--no-") for flag in flags if flag.startswith("--no-")}
    return flags | ({"--quantization"} if "-q" in extra else set())


def value_of(argv: Sequence[str], flag: str) -> str:
    """The value a flag has in the end: the last one given."""
    value = ""
    for arg, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, inline = arg.partition("=")
        if name.replace("_", "-") == flag:
            value = inline if equals else following
    return value


def json_of(argv: Sequence[str], flag: str) -> dict[str, Any]:
    """The JSON object that a flag holds; an empty one for what vLLM would refuse itself."""
    try:
        found = parse_json(value_of(argv, flag) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
