"""Flags of the engines' own parsers: the type of each flag, and of each key of a flag that takes JSON.

The tables are the files of deploy/flags, which `python -m glm5_ascend.deploy.flag_tables` writes from an installed
engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from glm5_ascend.errors import ConfigError, shortened, shown
from glm5_ascend.files.resources import data_dir, near
from glm5_ascend.files.untrusted import parse_json, read_json_object

#: Word of a table -> the expected value, for messages.
EXPECTED = {
    "int": "a whole number", "human": "a whole number, such as 16384 or 16k", "float": "a number",
    "human or auto": "a whole number, such as 131072 or 128k, or auto", "bool": "true or false", "str": "text",
    "object": "a JSON object", "list": "a list", "ints": "a list of whole numbers", "append": "text",
    "optional": "at most one value", "switch": "no value", "json": "JSON", "json or str": "text, or a JSON object",
}  # fmt: skip
#: Types of flags without a value; `--no-x` switches a "bool" off.
WITHOUT_VALUE = ("bool", "switch")
#: Types of flags that take JSON, besides those with the types of its keys.
JSON = ("object", "json")
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_CLOSE = 5
#: A flag whose numbers are documented as text: "kv_port": "30000".
_AS_TEXT = "kv-transfer-config"


@dataclass(frozen=True)
class FlagTable:
    """Flags of one version of an engine.

    Attributes:
        engine: name and version, for messages; empty: an unknown engine, whose flags are not checked.
        flags: flag without dashes -> type: a word of `EXPECTED`, the allowed values, or the types of JSON keys.
        aliases: other spelling with its dashes -> flag.
        dashed_keys: flags whose JSON keys may have dashes for underscores.
        underscores: `--a_b` is `--a-b`, and `--a.b` sets a key, as vLLM reads them.
    """

    engine: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    dashed_keys: tuple[str, ...] = ()
    underscores: bool = True

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> FlagTable:
        """The table in the JSON that `engine_parser.flags` writes."""
        return cls(**{**content, "dashed_keys": tuple(content.get("dashed_keys", ()))})

    def flag_of(self, word: str) -> tuple[str, bool]:
        """The flag of a spelling without `=` and keys, and whether the spelling switches it off.

        Raises:
            ConfigError: no such flag, or an abbreviation of several.
        """
        if word in self.aliases:
            return self.aliases[word], False
        name = word.removeprefix("--").replace("_", "-") if self.underscores else word.removeprefix("--")
        spellings = {f"--{flag}": (flag, False) for flag in self.flags}
        spellings |= {alias: (flag, False) for alias, flag in self.aliases.items()}
        spellings |= {f"--no-{flag}": (flag, True) for flag, kind in self.flags.items() if kind == "bool"}
        if f"--{name}" in spellings:
            return spellings[f"--{name}"]
        if not self.engine:
            return (name.removeprefix("no-"), True) if name.startswith("no-") else (name, False)
        starts = sorted(spelling for spelling in spellings if spelling.startswith(f"--{name}") and name)
        if len({spellings[spelling] for spelling in starts}) == 1:
            return spellings[starts[0]]
        if starts:
            raise ConfigError(f"{word}: an abbreviation of {', '.join(starts[:_CLOSE])}", "write the whole flag")
        raise ConfigError(f"{word}: {self.engine} has no such flag", _closest(f"--{name}", spellings))

    def loosened(self) -> FlagTable:
        """The table for a version that was not tried: unknown flags, keys and values of a list pass."""
        flags = {
            flag: "object" if isinstance(kind, dict) else "str" if isinstance(kind, list) else kind
            for flag, kind in self.flags.items()
        }
        return FlagTable("", flags, self.aliases, self.dashed_keys, self.underscores)


def _closest(word: str, spellings: Iterable[str]) -> str:
    tip = near(word, spellings).partition("known:")[0].strip()
    return tip or "remove it; the engine's --help lists its flags"


@cache
def flag_table(name: str) -> FlagTable:
    """The table in deploy/flags/NAME.json; an empty name is the table of an unknown engine."""
    if not name:
        return FlagTable()
    content = read_json_object(data_dir("data/deploy/flags") / f"{name}.json")
    return FlagTable.of(content)


def value_of_words(flag: str, kind: Any, words: Sequence[str]) -> Any:
    """The value of a flag from its words. kind: its type in a `FlagTable`.

    Raises:
        ConfigError: names the flag, its key, what is expected and what stands there.
    """
    if kind in WITHOUT_VALUE:
        if words:
            raise ConfigError(f"--{flag} takes no value, {shown(words[0])} follows it", f"write --{flag} alone")
        return True
    if kind in ("list", "ints"):
        return list(words)
    if kind == "optional" and not words:
        return True
    if len(words) != 1:
        what = "has no value" if not words else f"has {len(words)} values ({shown(' '.join(words))})"
        raise ConfigError(f"--{flag} {what}, expected {expected(kind)}", f"give it one value: --{flag} VALUE")
    if isinstance(kind, dict) or kind in JSON or (kind == "json or str" and words[0].strip().startswith("{")):
        return json_value(flag, kind, words[0])
    try:
        return _scalar(kind, words[0])
    except ValueError:
        raise ConfigError(f"--{flag} is {shown(words[0])}, expected {expected(kind)}", _fix(kind, words[0])) from None


def _fix(kind: Any, word: str) -> str:
    try:
        return f"write {_scalar('human', word)}" if kind == "int" else "correct the value"
    except ValueError:
        return "correct the value"


def json_value(flag: str, kind: Any, text: str) -> Any:
    """The JSON of a flag, its keys checked; all kinds but "json" must be objects. Raises as `value_of_words`."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f"--{flag} is {shown(text)}, expected a JSON object: {error}", "quote it for the shell: '{\"key\": 1}'"
        ) from None
    if not isinstance(value, dict):
        if kind == "json":
            return value
        raise ConfigError(f"--{flag} is {shown(text)}, expected a JSON object", "write '{\"key\": value}'")
    check_keys(flag, kind, value)
    return value


def check_keys(flag: str, kind: Any, value: Mapping[str, Any], path: str = "") -> None:
    """Raise `ConfigError` for a key of the wrong type, or, but in --additional-config, for an unknown key."""
    if not isinstance(kind, dict):
        return
    for key, item in value.items():
        name = f"{path}{key}"
        if key not in kind:
            if flag != "additional-config":
                raise ConfigError(f"--{flag}: unknown key {shown(name)}", near(str(key), kind, "keys"))
            continue
        inner = kind[key]
        if isinstance(inner, dict) and isinstance(item, Mapping):
            check_keys(flag, inner, item, f"{name}.")
        elif not _fits(inner, item) and not (flag == _AS_TEXT and inner == "int" and str(item).isdecimal()):
            raise ConfigError(
                f"--{flag}: key {name} is {shortened(json.dumps(item))}, expected {expected(inner)}",
                "write true or false without quotes" if inner == "bool" else "correct the value",
            )


def expected(kind: Any) -> str:
    """A type in words."""
    if isinstance(kind, dict):
        return "a JSON object"
    if isinstance(kind, list):
        return f"one of {', '.join(map(str, kind))}" if len(kind) <= 2 * _CLOSE else f"another value, such as {kind[0]}"
    return EXPECTED.get(kind, "another value")


def _fits(kind: Any, value: Any) -> bool:
    """True if a JSON value has a type of a table; null fits each, and 0 and 1 fit "bool"."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if value is None or kind == "any":
        return True
    if isinstance(kind, list):
        same = value in kind and type(value) in {type(choice) for choice in kind}
        return same or (isinstance(value, str) and value.upper() in kind)
    if kind == "ints":
        return isinstance(value, list) and all(type(item) is int for item in value)
    answers: dict[str, bool] = {
        "bool": isinstance(value, bool) or (number and value in (0, 1)), "int": number,
        "float": number or isinstance(value, float), "str": isinstance(value, str), "list": isinstance(value, list),
        "object": isinstance(value, dict),
    }  # fmt: skip
    return not isinstance(kind, dict) and answers.get(kind, True)


def _scalar(kind: Any, word: str) -> Any:
    """Raises ValueError for a word that is not of this type."""
    if isinstance(kind, list):
        by_word = {str(choice): choice for choice in kind}
        if word not in by_word:
            raise ValueError(word)
        return by_word[word]
    if kind == "human or auto" and word.strip().lower() in ("auto", "-1"):
        return -1
    if kind in ("human", "human or auto") and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kKmMgGtT])\s*", word)):
        scale = _SCALES[match[2]]
        if match[2].isupper():
            return int(match[1]) * scale
        return int(float(match[1]) * scale)
    if kind in ("int", "human", "human or auto"):
        return int(word)
    return float(word) if kind == "float" else word
