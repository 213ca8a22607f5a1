"""Command lines of engines in one normal form, which every command that reads flags of an engine uses."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.errors import ConfigError, shown
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.flag_types import WITHOUT_VALUE, FlagTable, json_value, value_of_words

#: Environment variable of vLLM's API key.
KEY_VARIABLE = "VLLM_API_KEY"
#: SGLang has the flag only.
KEY_FLAGS = ("--api-key", "--api_key")
#: Flags of vLLM that set a key of --speculative-config.
SPECULATIVE = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
#: Flags that cannot be 0.
_POSITIVE = (
    "tensor-parallel-size", "data-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size",
    "decode-context-parallel-size", "block-size", "max-num-seqs", "max-num-batched-tokens", "max-model-len",
    "cp-kv-cache-interleave-size",
)  # fmt: skip
#: Flags that are a share of the memory of a device.
_SHARES = ("gpu-memory-utilization", "mem-fraction-static")


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


@dataclass(frozen=True)
class _FlagWords:
    """A flag as it stands on a command line; keys: of `--flag.a.b`, with a `+` at the end of one that is added to."""

    flag: str
    off: bool
    keys: tuple[str, ...]
    values: list[str]


def normal_form(words: Sequence[str], table: FlagTable) -> list[str]:
    """Flags in one spelling: long, with dashes, one word per value, each flag once, numbers written out.

    It means what the engine's parser reads: the last one of a flag counts; `--a.b value` sets a key of the JSON object
    in `--a`, and replaces such an object that is given as a whole.

    Raises:
        ConfigError: names the flag, its key, what is expected and what stands there.
    """
    plain: dict[str, list[str]] = {}
    keyed: dict[str, dict[str, Any]] = {}
    for one in _split(words, table):
        kind = table.flags.get(one.flag, "")
        if one.flag in ("model", "model-path"):
            raise ConfigError(f"--{one.flag}: DIR is the checkpoint already", f"remove --{one.flag}")
        if one.keys:
            _set(keyed.setdefault(one.flag, {}), one)
            continue
        before = plain.pop(one.flag, [])
        if one.off:
            plain[one.flag] = [f"--no-{one.flag}", *one.values]
            value_of_words(f"no-{one.flag}", "switch" if table.engine else "list", one.values)
            continue
        texts = _checked(one, kind, table)
        plain[one.flag] = [*(before if kind == "append" else ()), f"--{one.flag}", *texts]
    for flag, value in keyed.items():
        if table.engine and not isinstance(table.flags[flag], dict) and "json" not in str(table.flags[flag]):
            raise ConfigError(f"--{flag}.{next(iter(value))}: --{flag} takes no JSON", f"give --{flag} VALUE")
        plain.pop(flag, None)
        plain[flag] = [f"--{flag}", json.dumps(_checked_keys(flag, value, table))]
    for flag, key in SPECULATIVE.items():
        if flag in plain and key in parsed_flags(plain.get("speculative-config", ()), table).get(
            "speculative-config", ()
        ):
            raise ConfigError(f"--{flag} and {key} of --speculative-config: vLLM takes one of them", "remove one")
    return [word for flag_words in plain.values() for word in flag_words]


def _split(words: Sequence[str], table: FlagTable) -> Iterator[_FlagWords]:
    """Split a command line at its flags. Raises `ConfigError` for a word that belongs to none."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        optimization = re.fullmatch(r"-O=?(\d?)", word)
        if optimization:
            groups.append(("--optimization-level", [*optimization[1]]))
        elif _is_flag(word, table):
            name, equals, value = word.partition("=")
            groups.append((name, [value] if equals else []))
        elif not groups:
            raise ConfigError(f"{shown(word)} is no flag of the engine", "flags begin with --; DIR is the checkpoint")
        else:
            groups[-1][1].append(word)
    for name, values in groups:
        base, *keys = name.split(".") if table.underscores else [name]
        flag, off = table.flag_of(base)
        if flag == "config" and table.underscores and table.engine:
            yield from _split([*_words_of_file(Path(" ".join(values)))], table)
        else:
            yield _FlagWords(flag, off, tuple(keys), values)


def _is_flag(word: str, table: FlagTable) -> bool:
    name = word.partition("=")[0].partition(".")[0]
    return (word.startswith("--") and len(word) > 2) or name in table.aliases


def _words_of_file(path: Path) -> Iterator[str]:
    """Flags of the YAML file of vLLM's `--config`."""
    from glm5_ascend.files.yaml_file import yaml_content

    content = yaml_content(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a map of flags", "one flag per line: max-num-seqs: 16")
    for flag, value in content.items():
        if flag == "config":
            raise ConfigError(f"{path}: config names another file", "one file of flags")
        if value is not False:
            yield f"--{flag}"
        elif value is False:
            yield f"--no-{flag}"
        if isinstance(value, dict):
            yield json.dumps(value)
        elif isinstance(value, list):
            yield from map(str, value)
        elif not isinstance(value, bool):
            yield str(value)


def _set(whole: dict[str, Any], one: _FlagWords) -> None:
    """Set the key of `--flag.a.b value`; numbers may be written as 16k, and `+` adds to a list."""
    text = one.values[-1] if one.values else ""
    if len(one.values) != 1:
        name = ".".join((one.flag, *one.keys))
        raise ConfigError(f"--{name} has {len(one.values) or 'no'} values, expected one", f"--{name} VALUE")
    *path, last = one.keys
    for key in path:
        inner = whole.setdefault(key, {})
        whole = inner if isinstance(inner, dict) else whole
    if last.endswith("+"):
        items = whole.setdefault(last[:-1], [])
        whole[last[:-1]] = [*(items if isinstance(items, list) else []), *text.split(",")]
        return
    value: Any = text
    try:
        value = parse_json(text)
    except ValueError:
        with suppress(ConfigError):
            value = value_of_words(last, "human", [text])
    whole[last] = value


def _checked(one: _FlagWords, kind: Any, table: FlagTable) -> list[str]:
    """The words of a flag's values after a check of its type; JSON as one line, and numbers written out."""
    value = value_of_words(one.flag, kind or ("list" if len(one.values) != 1 else "str"), one.values)
    if isinstance(kind, dict):
        return [json.dumps(_checked_keys(one.flag, value, table))]
    if type(value) is int and one.flag in _POSITIVE and value < 1 and one.values != ["auto"]:
        raise ConfigError(f"--{one.flag} is {value}, expected a whole number above 0", "correct the value")
    if one.flag in _SHARES and isinstance(value, float) and not 0 < value <= 1:
        raise ConfigError(f"--{one.flag} is {value:g}, expected a share above 0, at most 1", "0.9 is usual")
    return [str(value)] if kind in ("human", "human or auto") and value != -1 else one.values


def _checked_keys(flag: str, value: dict[str, Any], table: FlagTable) -> dict[str, Any]:
    if flag in table.dashed_keys:
        value = {key.replace("-", "_"): item for key, item in value.items()}
    checked: dict[str, Any] = json_value(flag, table.flags.get(flag, "object"), json.dumps(value))
    return checked


def flag_groups(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split a command line into (flag in the spelling `--a-b`, its words). Words before the first flag: flag ""."""
    groups: list[tuple[str, list[str]]] = [("", [])]
    for word in argv:
        if word.startswith("--"):
            groups.append((word.partition("=")[0].replace("_", "-"), []))
        groups[-1][1].append(word)
    return groups


def without(argv: Sequence[str], *flags: str) -> list[str]:
    """Remove flags and their values from a command line in normal form."""
    return [word for name, words in flag_groups(argv) if name not in flags for word in words]


def parsed_flags(argv: Sequence[str], table: FlagTable) -> dict[str, Any]:
    """Values of the flags of a command line by name without dashes, after `normal_form`.

    `--no-x` is x: False, a flag without a value True. A value that is no value of its type, such as a `{word}` of a
    profile, stays text.
    """
    flags: dict[str, Any] = {}
    for name, words in flag_groups(argv)[1:]:
        flag, values, off = name.removeprefix("--"), words[1:], False
        with suppress(ConfigError):
            flag, off = table.flag_of(name)
        kind = table.flags.get(flag)
        try:
            if off or (not values and kind in (None, *WITHOUT_VALUE)):
                flags[flag] = not off
            else:
                flags[flag] = _guessed(values) if kind is None else value_of_words(flag, kind, values)
        except ConfigError:
            flags[flag] = _guessed(values) if isinstance(kind, dict) and values else " ".join(values)
    return flags


def _guessed(words: list[str]) -> Any:
    """The value of a flag of unknown type: JSON if it is JSON, else text; several words are a list."""
    values: list[Any] = []
    for word in words:
        try:
            values.append(parse_json(word))
        except ValueError:
            values.append(word)
    return values if len(values) > 1 else values[0]


def given_flags(extra: Sequence[str]) -> set[str]:
    """Flags of a command line in the spelling `--a-b`; `--no-x` counts as `--x`, too."""
    names = {name for name, _ in flag_groups(extra)[1:]}
    return names | {"--" + name.removeprefix("--no-") for name in names if name.startswith("--no-")}


def value_of(argv: Sequence[str], flag: str) -> str:
    """Value of a flag; the last one counts. Empty without the flag or its value."""
    words = next((words for name, words in reversed(flag_groups(argv)) if name == flag), [""])
    _, equals, inline = words[0].partition("=")
    return inline if equals else words[1] if len(words) > 1 else ""
