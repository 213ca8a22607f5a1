"""Command lines of engines in one normal form, which every command that reads flags of an engine uses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5_ascend.errors import ConfigError, json_frame, shell_word, shown
from glm5_ascend.serve.flag_table import FlagTable, flag_groups, guessed, number

#: Environment variable of vLLM's API key.
KEY_VARIABLE = "VLLM_API_KEY"
#: What is shown in the place of a key.
MASK = "***"
#: SGLang has the flag only.
KEY_FLAGS = ("--api-key", "--api_key")
#: Flags of vLLM that set a key of --speculative-config.
SPECULATIVE = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
#: Keys of --additional-config for int8 caches (C8), which some lines of vllm-ascend and our CPU server read; others
#: have flags of vLLM, see `with_flags`.
SFA_KEY, LI_KEY = "enable_sparse_sfa_c8", "enable_sparse_li_c8"
#: A word that begins a flag; -0.5 and {"a": 1} are values.
_FLAG = re.compile(r"--?[A-Za-z]")


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
        masked = self.masked()
        words = [f"{name}={shell_word(value)}" for name, value in masked.env.items()]
        return " ".join([*words, *map(shell_word, masked.argv)])

    def masked(self) -> ServerCommand:
        """Replace the API key by stars."""
        argv = [
            MASK if before in KEY_FLAGS else re.sub(r"(?s)^(--api[-_]key=).*", rf"\1{MASK}", arg)
            for before, arg in zip(["", *self.argv], self.argv, strict=False)
        ]
        return ServerCommand({name: MASK if name == KEY_VARIABLE else v for name, v in self.env.items()}, argv)

    def to_dict(self) -> dict[str, Any]:
        """JSON of `serve --dry-run --json`."""
        return json_frame("serve") | {"env": self.masked().env, "argv": self.argv}


def normal_form(words: Sequence[str], table: FlagTable) -> list[str]:
    """Flags in one spelling: long, with dashes, one word per value, each flag once, numbers written out.

    It means what the engine's parser reads: the last one of a flag counts; `--a.b value` sets a key of the JSON object
    in `--a`, and replaces such an object that is given as a whole.

    Raises:
        ConfigError: the engine would refuse the flags; names the flag, its key and what stands there.
    """
    values = table.parse(_spelled_out(words) if table.underscores else words)
    for flag in values.keys() & {"model", "model-path"}:
        raise ConfigError(f"--{flag}: DIR is the checkpoint already", f"remove --{flag}")
    if "config" in values:
        raise ConfigError("--config: flags of a file cannot be checked", "give the flags themselves")
    return table.words(values)


def _spelled_out(words: Sequence[str]) -> list[str]:
    """Do what vLLM's parser does before argparse: dashes for underscores, `-O3`, `--a.b`."""
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        base, *keys = name.split(".") if _FLAG.match(name) else [name]
        if base.startswith("--"):
            base = base.replace("_", "-")
        if optimization := re.fullmatch(r"-O=?(\d?)", word):
            plain += ["--optimization-level", *optimization[1]]
        elif keys:
            if not equals and (not rest or _FLAG.match(rest[0])):
                raise ConfigError(f"{shown(name)} has no value, expected one", "give it one value")
            _set_key(objects.setdefault(base, {}), keys, value if equals else rest.pop(0))
        else:
            plain.append(base + equals + value)
    return [*plain, *(word for base, whole in objects.items() for word in (base, json.dumps(whole)))]


def _set_key(whole: dict[str, Any], keys: Sequence[str], text: str) -> None:
    """Set a key of JSON by its path; numbers may be written as 16k, and a `+` at the end adds to a list."""
    *path, last = keys
    for key in path:
        inner = whole.setdefault(key, {})
        whole = inner if isinstance(inner, dict) else whole
    if last.endswith("+"):
        items = whole.setdefault(last[:-1], [])
        whole[last[:-1]] = [*(items if isinstance(items, list) else []), *text.split(",")]
        return
    try:
        whole[last] = number("human", text)
    except ValueError:
        whole[last] = guessed([text])


def without(argv: Sequence[str], *flags: str) -> list[str]:
    """Remove flags and their values from a command line in normal form."""
    rest, removes = [], False
    for word in argv:
        removes = word in flags if word.startswith("--") else removes
        rest += [] if removes else [word]
    return rest


def parsed_flags(argv: Sequence[str], table: FlagTable) -> dict[str, Any]:
    """Values of the flags of a command line by name without dashes, after `normal_form`.

    `--no-x` is x: False, a flag without a value True. A value that is no value of its type, such as a `{word}` of a
    profile, stays text.
    """
    flags: dict[str, Any] = {}
    for name, values in flag_groups(argv):
        try:
            flags |= table.parse([name, *values])
        except ConfigError:
            flags[name.removeprefix("--")] = guessed(values) if values else True
    return flags


def given_flags(extra: Sequence[str]) -> set[str]:
    """Flags of a command line in the spelling `--a-b`; `--no-x` counts as `--x`, too."""
    names = {name for name, _ in flag_groups(extra)}
    return names | {"--" + name.removeprefix("--no-") for name in names if name.startswith("--no-")}


def value_of(argv: Sequence[str], flag: str) -> str:
    """Value of a flag; the last one counts. Empty without the flag or its value."""
    groups = [values for name, values in flag_groups(argv) if name == flag]
    return groups[-1][0] if groups and groups[-1] else ""


def number_of(argv: Sequence[str], flag: str, default: int = 0) -> int:
    """Value of a flag that is a whole number; the default without the flag, or where it is none."""
    text = value_of(argv, flag)
    return int(text) if text.isdecimal() else default


def with_flags(args: Mapping[str, Any]) -> dict[str, Any]:
    """A profile's arguments (flags without dashes) with enabled int8 caches as flags instead of keys.

    A line of vllm-ascend that reads keys refuses the flags. One that reads flags overwrites the keys without a message,
    so its caches would be bf16.
    """
    additional = dict(args.get("additional-config") or {})
    latents, keys = (additional.pop(name, None) is True for name in (SFA_KEY, LI_KEY))
    if additional == (args.get("additional-config") or {}):
        return dict(args)
    written = {name: value for name, value in args.items() if name != "additional-config"}
    written |= {"additional-config": additional} if additional else {}
    written |= {"kv-cache-dtype": "int8"} if latents else {}
    attention = {**(args.get("attention-config") or {}), "indexer_kv_dtype": "int8"}
    return written | ({"attention-config": attention} if keys else {})
