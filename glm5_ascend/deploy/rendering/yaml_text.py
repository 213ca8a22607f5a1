"""Objects of Kubernetes, and YAML for reviewers: multi-line texts as `|` blocks, no anchors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

#: Numbers for Go's YAML parser that PyYAML takes for words and writes without quotes, as 1e3 and 0o17.
_NUMBER = re.compile(r"[-+]?(0o[0-7_]+|\.?[0-9][0-9_.]*(e[-+]?[0-9]+)?)", re.IGNORECASE)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _NUMBER.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Plain.add_representer(str, _text)


def dumped(objects: Iterable[Any]) -> str:
    """One or several YAML documents; keys keep their order."""
    text: str = yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)
    return text


def manifest(version: str, kind: str, name: str, **body: Any) -> dict[str, Any]:
    """An object of Kubernetes. `version` is its apiVersion."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **body}
