"""The templates of deploy/templates. A value is quoted for the file that it is written into, whatever it holds.

`{{ value }}` is a YAML value in NAME.yaml.j2, and a word of the shell elsewhere.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined
from jinja2.filters import do_indent
from markupsafe import Markup

from glm5_ascend.deploy.profiles.command import WORDS, call
from glm5_ascend.files.resources import data_dir

#: Numbers for Go's YAML parser that PyYAML takes for words and writes without quotes, as 1e3 and 0o17.
_NUMBER = re.compile(r"[-+]?(0o[0-7_]+|\.?[0-9][0-9_.]*(e[-+]?[0-9]+)?)", re.IGNORECASE)
#: Line breaks of YAML, which PyYAML does not preserve between single quotes.
_BREAK = re.compile("[\r\n\x85\u2028\u2029]")
_WORD = re.compile(r"\{(" + "|".join([*WORDS, "model"]) + r")\}")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _BREAK.search(text) else "'" if _NUMBER.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def rendered(template: str, **values: Any) -> str:
    """The text of a template; raises jinja2.UndefinedError for a name that no value has."""
    return _environment(".yaml." in template).get_template(template).render(values)


@cache
def _environment(is_yaml: bool) -> Environment:
    """Values that are Markup were quoted by a filter or a macro; all others are quoted by `finalize`."""
    environment = Environment(
        loader=FileSystemLoader(data_dir("data/deploy/templates")), undefined=StrictUndefined,
        autoescape=True, finalize=yaml_value if is_yaml else shell_word,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "block": block, "command": command, "digest": digest, "inner": inner, "merged": operator.or_, "named": named,
        "unless_set": unless_set, "words": words,
    }  # fmt: skip
    return environment


def yaml_value(value: Any) -> Markup:
    """A value on one line, as it may stand in block and in flow style."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, Undefined):
        str(value)  # raises
    text = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**9)
    return Markup(text.strip()[1:-1])


def shell_word(value: Any) -> Markup:
    """A word of a script; a plain word stays unquoted."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    return Markup(text) if re.fullmatch(r"[\w@%+=:,./-]+", text) else Markup(f'"{inner(text)}"')


def inner(text: str) -> Markup:
    """Text between double quotes; words in braces become shell variables."""
    escaped = re.sub(r'([\\"$`])', r"\\\1", text)
    return Markup(_WORD.sub(lambda match: f"${{{match[1].upper()}}}", escaped))


def unless_set(text: str, variable: str) -> Markup:
    """The value of a variable that is set, else the text."""
    return Markup(f'"${{{variable}:-{inner(text)}}}"')


def words(values: Sequence[str]) -> Markup:
    return Markup(" ".join(map(shell_word, values)))


def command(argv: list[str], end: str) -> Markup:
    """A command with a flag per line; `end` is its last line as it stands."""
    return Markup("\n".join(call(argv, shell_word, end)))


def block(text: str, width: int) -> Markup:
    """A text of several lines as a YAML block, indented by `width` spaces."""
    return Markup("|\n" + do_indent(text.rstrip("\n"), width, first=True))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def named(names: Sequence[str]) -> list[dict[str, str]]:
    """References of Kubernetes to objects by their names."""
    return [{"name": name} for name in names]
