"""Package indexes on 127.0.0.1 with small wheels: names, versions and dependencies of real ones, next to no code."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tests.support.listening import listening


def wheel(
    index: Path, name: str, version: str, requires: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> None:
    """Put a wheel for any platform into the index; `files` are by their path in site-packages."""
    stem = f"{name.replace('-', '_')}-{version}"
    contents = dict(files if files is not None else {f"{name.replace('-', '_')}/__init__.py": ""})
    fields = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    contents[f"{stem}.dist-info/METADATA"] = "\n".join(fields) + "\n"
    contents[f"{stem}.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    _write(index, name, f"{stem}-py3-none-any.whl", {path: text.encode() for path, text in contents.items()})


def real_wheel(index: Path, name: str) -> None:
    """Put a wheel into the index made of the files of a pure package that is installed here."""
    found = importlib.metadata.distribution(name)
    contents = {
        str(path): Path(str(found.locate_file(path))).read_bytes()
        for path in found.files or []
        if path.suffix != ".pyc" and ".." not in path.parts and path.name not in ("RECORD", "INSTALLER", "REQUESTED")
    }
    _write(index, name, f"{name}-{found.version}-py3-none-any.whl", contents)


def _write(index: Path, name: str, file: str, contents: Mapping[str, bytes]) -> None:
    folder = index / canonicalize_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    (info,) = {path.split("/")[0] for path in contents if path.split("/")[0].endswith(".dist-info")}
    lines = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for path, data in contents.items()
    ]
    with zipfile.ZipFile(folder / file, "w") as packed:
        for path, data in contents.items():
            packed.writestr(path, data)
        packed.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]) + "\n")


def served(folder: Path) -> AbstractContextManager[str]:
    """URL of an index: a folder per package, whose listing is a page of links as PEP 503 wants it."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

    return listening(Handler)
