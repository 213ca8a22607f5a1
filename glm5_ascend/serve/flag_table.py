"""Flags of the engines: names and types, and the parser that argparse makes of them.

The tables in deploy/flags were written by the engines' own parsers (`python -m glm5_ascend.deploy.flag_tables`).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, NoReturn

from packaging.version import Version

from glm5_ascend.engine_lines import CPU, EngineLine
from glm5_ascend.errors import ConfigError, shortened, shown
from glm5_ascend.files.resources import data_dir, near
from glm5_ascend.files.untrusted import parse_json, read_json_object
from glm5_ascend.serve.environment import version_of

#: Scalar type of a table -> what it expects, for messages.
_EXPECTED = {
    "int": "a whole number", "human": "a whole number, such as 16384 or 16k", "float": "a number",
    "human or auto": "a whole number, such as 131072 or 128k, or auto",
}  # fmt: skip
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: Type of a table -> argparse's arguments. A type that is not here takes one value.
_ACTIONS: dict[str, dict[str, Any]] = {
    "bool": {"action": argparse.BooleanOptionalAction}, "switch": {"action": "store_true"},
    "append": {"action": "append"}, "optional": {"nargs": "?", "const": True}, "list": {"nargs": "*"},
}  # fmt: skip
#: vllm-ascend's settings, whose unknown keys are a rule of `doctor`.
_OPEN = "additional-config"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(shortened(message.removeprefix("argument "), 300), "correct the flag")


@dataclass(frozen=True)
class FlagTable:
    """Flags of one version of an engine.

    Attributes:
        engine: name and version, for messages.
        flags: flag without dashes -> type: a word, the allowed values, or the keys of its JSON with the keys below
            each, where they are known.
        aliases: other spelling with its dashes -> flag.
        underscores: `--a_b` is `--a-b`, and `--a.b` sets a key, as vLLM reads them.
        complete: what is not here is an error.
    """

    engine: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    underscores: bool = True
    complete: bool = True

    @cached_property
    def _parser(self) -> _Parser:
        parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS, conflict_handler="resolve")
        for flag, flag_type in self.flags.items():
            spellings = [f"--{flag}", *(alias for alias, name in self.aliases.items() if name == flag)]
            action = _ACTIONS.get(flag_type) if isinstance(flag_type, str) else None
            parser.add_argument(*spellings, dest=flag, **(action or {"type": partial(self._value, flag, flag_type)}))
        return parser

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Values by flag without dashes; the last one of a flag counts. `--no-x` is x: False, a lone flag True.

        Raises:
            ConfigError: the engine would refuse the flags; names the flag, its key and what stands there.
        """
        namespace, rest = self._parser.parse_known_args(list(words))
        values = vars(namespace)
        if not rest:
            return values
        if self.complete or not rest[0].startswith("--"):
            word = rest[0].partition("=")[0]
            if not word.startswith("-"):
                raise ConfigError(f"{shown(word)} is no value of a flag of the engine", "DIR is the checkpoint")
            spellings = [*(f"--{flag}" for flag in self.flags), *self.aliases]
            tip = near(word, spellings).partition("known:")[0].strip() or "the engine's --help lists its flags"
            raise ConfigError(f"{shortened(word)}: {self.engine} has no such flag", tip)
        for name, texts in flag_groups(rest):
            flag = name.removeprefix("--")
            values[flag.removeprefix("no-")] = guessed(texts) if texts else not flag.startswith("no-")
        return values

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """The command line of `parse`'s values: long flags, numbers written out, JSON in one word."""
        words: list[str] = []
        for flag, value in values.items():
            flag_type = self.flags.get(flag)
            if value is False and flag_type != "json":
                words.append(f"--no-{flag}")
            elif isinstance(value, dict) or flag_type == "json":
                words += [f"--{flag}", json.dumps(value)]
            elif flag_type == "append":
                words += [word for item in value for word in (f"--{flag}", item)]
            else:
                items = value if isinstance(value, list) else [] if value is True else [value]
                words += [f"--{flag}", *map(str, items)]
        return words

    def _value(self, flag: str, flag_type: Any, word: str) -> Any:
        if flag_type == "json" or isinstance(flag_type, dict):
            return self._json(flag, flag_type, word)
        if flag_type == "json or str":
            return self._json(flag, flag_type, word) if word.strip().startswith("{") else word
        try:
            if isinstance(flag_type, list):
                choices = {str(choice): choice for choice in flag_type}
                return choices[word] if self.complete else choices.get(word, word)
            return number(flag_type, word) if flag_type in _EXPECTED else word
        except (ValueError, KeyError):
            is_choice = isinstance(flag_type, list)
            expected = f"one of {', '.join(map(str, flag_type))}" if is_choice else _EXPECTED[flag_type]
            problem = f"--{flag} is {shown(word)}, expected {shortened(expected, 200)}"
            raise ConfigError(problem, "correct the value") from None

    def _json(self, flag: str, flag_type: Any, word: str) -> Any:
        try:
            value = parse_json(word)
        except ValueError as error:
            problem = f"--{flag} is {shown(word)}, expected a JSON object: {error}"
            raise ConfigError(problem, "quote it for the shell: '{\"key\": 1}'") from None
        if not isinstance(value, dict) and flag_type != "json":
            raise ConfigError(f"--{flag} is {shown(word)}, expected a JSON object", "write '{\"key\": value}'")
        if isinstance(flag_type, dict) and self.complete and flag != _OPEN:
            _check_keys(flag, flag_type, value)
        return value


def number(flag_type: str, word: str) -> int | float | str:
    """The number in a word; of "human" ones with a unit, such as 16k. Raises ValueError if it is none of this type."""
    if flag_type == "float":
        return float(word)
    if flag_type == "human or auto" and word.strip().lower() == "auto":
        return word
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kKmMgGtT])\s*", word) if flag_type != "int" else None
    if match is None:
        return int(word)
    return int(match[1]) * _SCALES[match[2]] if match[2].isupper() else int(float(match[1]) * _SCALES[match[2]])


def _check_keys(flag: str, keys: Mapping[str, Any], value: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a key that is not known."""
    for key, item in value.items():
        if key not in keys:
            raise ConfigError(f"--{flag}: unknown key {shown(key)}", near(key, keys, "keys"))
        if isinstance(item, dict) and keys[key]:
            _check_keys(flag, keys[key], item)


def flag_groups(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split a command line at its flags: (flag in the spelling `--a-b`, its values). What stands before is left out."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            groups.append((name.replace("_", "-"), [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
    return groups


def guessed(words: Sequence[str]) -> Any:
    """The value of a flag of unknown type: JSON if it is JSON, else text; several words are a list."""
    values: list[Any] = []
    for word in words:
        try:
            values.append(parse_json(word))
        except ValueError:
            values.append(word)
    return values if len(values) > 1 else values[0]


@cache
def flag_table(name: str) -> FlagTable:
    """The table in deploy/flags/NAME.json."""
    return FlagTable(**read_json_object(data_dir("data/deploy/flags") / f"{name}.json"))


def installed_table(line: EngineLine) -> FlagTable:
    """The table of a line. Where its engine is installed in another version, that engine judges its flags itself."""
    names = (line.distribution, "vllm") if line.platform == CPU else (line.distribution,)
    versions = filter(None, map(version_of, names))
    return replace(flag_table(line.flags), complete=all(line.covers(Version(version)) for version in versions))
