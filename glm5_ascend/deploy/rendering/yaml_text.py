"""YAML as people review it: texts of several lines as `|` blocks, nothing by anchors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def dumped(objects: Iterable[Any]) -> str:
    """One or several documents, keys in their order."""
    text: str = yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)
    return text
