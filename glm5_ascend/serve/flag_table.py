"""Flags of the engines: names and types, and the parser that argparse makes of them.

The tables in deploy/flags were written by the engines' own parsers (`python -m glm5_ascend.deploy.flag_tables`). Where
another version is installed, its parser is asked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from packaging.version import Version

from glm5_ascend.engine_lines import CPU, VLLM_CPU_032, EngineLine, vllm_ascend_line
from glm5_ascend.errors import ConfigError, shortened, shown
from glm5_ascend.files.resources import data_dir, near
from glm5_ascend.files.untrusted import parse_json, read_json_object
from glm5_ascend.serve import engine_parser
from glm5_ascend.serve.environment import version_of

#: Seconds for an engine to import itself and build its parser: 10 on a CPU; an Atlas starts its runtime, too.
PARSER_LIMIT = 120
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
#: Type of a JSON key -> Python's.
_KEY_TYPES = {"int": int, "float": float, "str": str, "list": list, "ints": list[int], "object": dict}
#: vLLM reads its numbers from text, too: "kv_port": "30000".
_NUMBERS_AS_TEXT = "kv-transfer-config"
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
        flags: flag without dashes -> type: a word (`engine_parser.flags` writes them), the allowed values, or the types
            of the keys of its JSON.
        aliases: other spelling with its dashes -> flag.
        dashed_keys: flags whose JSON keys may have dashes for underscores.
        underscores: `--a_b` is `--a-b`, and `--a.b` sets a key, as vLLM reads them.
        complete: a flag that is not here is an error.
        note: who checks the flags, where the table is of another version than the engine; else empty.
    """

    engine: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    dashed_keys: Sequence[str] = ()
    underscores: bool = True
    complete: bool = True
    note: str = ""

    @cached_property
    def _parser(self) -> _Parser:
        parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS, conflict_handler="resolve")
        for flag, flag_type in self.flags.items():
            spellings = [f"--{flag}", *(alias for alias, name in self.aliases.items() if name == flag)]
            action = _ACTIONS.get(flag_type) if isinstance(flag_type, str) else None
            parser.add_argument(*spellings, dest=flag, **(action or {"type": self._reader(flag, flag_type)}))
        return parser

    def _reader(self, flag: str, flag_type: Any) -> Callable[[str], Any]:
        return lambda word: self._value(flag, flag_type, word)

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
        if flag_type in ("object", "json") or isinstance(flag_type, dict):
            return self._json(flag, flag_type, word)
        if flag_type == "json or str":
            return self._json(flag, flag_type, word) if word.strip().startswith("{") else word
        try:
            if isinstance(flag_type, list):
                return {str(choice): choice for choice in flag_type}[word]
            return number(flag_type, word) if flag_type in _EXPECTED else word
        except (ValueError, KeyError):
            choices = f"one of {', '.join(map(str, flag_type))}" if isinstance(flag_type, list) else ""
            expected = shortened(choices or _EXPECTED[flag_type], 200)
            raise ConfigError(f"--{flag} is {shown(word)}, expected {expected}", "correct the value") from None

    def _json(self, flag: str, flag_type: Any, word: str) -> Any:
        try:
            value = parse_json(word)
        except ValueError as error:
            problem = f"--{flag} is {shown(word)}, expected a JSON object: {error}"
            raise ConfigError(problem, "quote it for the shell: '{\"key\": 1}'") from None
        if not isinstance(value, dict) and flag_type != "json":
            raise ConfigError(f"--{flag} is {shown(word)}, expected a JSON object", "write '{\"key\": value}'")
        if flag in self.dashed_keys:
            value = {key.replace("-", "_"): item for key, item in value.items()}
        if isinstance(flag_type, dict):
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


def _check_keys(flag: str, keys: Mapping[str, Any], value: Any) -> None:
    """Raise `ConfigError` for a key of the wrong type, or, but in `_OPEN`, for an unknown key. Null fits each."""
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(_typed(keys, flag)).validate_python(value, strict=flag != _NUMBERS_AS_TEXT)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            for key in first["loc"][:-1]:
                keys = keys[str(key)]
            raise ConfigError(
                f"--{flag}: unknown key {shown(name)}", near(str(first["loc"][-1]), keys, "keys")
            ) from None
        expected = shortened(first["msg"].removeprefix("Input should be "), 200)
        value = shortened(json.dumps(first["input"]))
        raise ConfigError(f"--{flag}: key {name} is {value}, expected {expected}", "correct the value") from None


def _typed(key_type: Any, flag: str) -> Any:
    from pydantic import BeforeValidator, ConfigDict, with_config
    from typing_extensions import TypedDict

    if isinstance(key_type, dict):
        fields = {key: _typed(inner, flag) | None for key, inner in key_type.items()}
        extra: Literal["allow", "forbid"] = "allow" if flag == _OPEN else "forbid"
        return with_config(ConfigDict(extra=extra))(TypedDict("_Keys", fields, total=False))  # type: ignore[operator]
    if isinstance(key_type, list):  # names of an enumeration are read in any case
        upper = lambda word: str(word).upper() if str(word).upper() in key_type else word  # noqa: E731
        return Annotated[Literal[tuple(key_type)], BeforeValidator(upper)]
    if key_type == "bool":
        return Annotated[bool, BeforeValidator(lambda item: bool(item) if item in (0, 1) else item)]
    return _KEY_TYPES.get(key_type, Any)


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


def line_here() -> EngineLine:
    """The engine line of this machine: of the installed vllm-ascend, or vLLM's for CPUs."""
    installed = version_of("vllm-ascend")
    return VLLM_CPU_032 if installed is None else vllm_ascend_line(Version(installed))


def installed_table(line: EngineLine) -> FlagTable:
    """The table of a line, or, where its engine is installed in a version of another line, that engine's own flags.

    If that engine's parser cannot be asked, the line's table without a check of flags that it does not have.
    """
    table = flag_table(line.flags)
    for name in (line.distribution, "vllm") if line.platform == CPU else (line.distribution,):
        version = version_of(name)
        if version is not None and not line.covers(Version(version)):
            versions = f"{name} {version} is installed, our table of flags is of {table.engine}"
            answer = asked_table(sys.executable, line.engine)
            if isinstance(answer, FlagTable):
                return replace(answer, note=f"{versions}: the flags are checked by the engine's own parser")
            note = (
                f"{versions}: flags that it does not have pass, because the engine's parser gives no answer ({answer})"
            )
            return replace(table, complete=False, note=note)
    return table


@cache
def asked_table(python: str, engine: str) -> FlagTable | str:
    """The flags that the parser of an interpreter's engine takes, or why they cannot be read, as half a sentence."""
    with tempfile.TemporaryDirectory(prefix="glm5-parser-") as name:
        folder = Path(name)
        (folder / engine_parser.NAME).symlink_to(engine_parser.FOLDER)
        argv = [python, "-m", f"{engine_parser.NAME}.flags", str(folder / "flags.json"), engine]
        path = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH"))))
        variables = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, env=variables, timeout=PARSER_LIMIT, check=False, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return f"none within {PARSER_LIMIT} s"
        if done.returncode:
            return done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
        return FlagTable(**parse_json((folder / "flags.json").read_bytes()))
