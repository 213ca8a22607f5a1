"""vLLM command lines: their flags and the values of the flags."""

from __future__ import annotations

import itertools
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


def given_flags(extra: Sequence[str]) -> set[str]:
    """Flags of a vLLM command line, in the spelling of our defaults."""
    flags = {arg.split("=", 1)[0].replace("_", "-") for arg in extra if arg.startswith("--")}
    flags |= {"--" + flag.removeprefix("--no-") for flag in flags if flag.startswith("--no-")}
    return flags | ({"--quantization"} if "-q" in extra else set())


def value_of(argv: Sequence[str], flag: str) -> str:
    """Value of a flag; the last one counts."""
    value = ""
    for arg, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, inline = arg.partition("=")
        if name.replace("_", "-") == flag:
            value = inline if equals else following
    return value


def json_of(argv: Sequence[str], flag: str) -> dict[str, Any]:
    """JSON object in a flag; an empty one for a value that vLLM itself refuses."""
    try:
        value = parse_json(value_of(argv, flag) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
