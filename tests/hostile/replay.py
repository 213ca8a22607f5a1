"""Runs the stored inputs of one target under limits: `python -m tests.hostile.replay TARGET`.

`corpora/TARGET.tar.xz` has inputs that a coverage-guided fuzzer (atheris) once found to reach new code;
every second one is run.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Never

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Less than the process that reads tokenizers has, so that an input fails soon.
MEMORY_BYTES, CPU_SECONDS = 4 * 2**30, 10
STARTS_SOMETHING = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")
_folder: str | None = None
_events: list[str] = []


class ProcessEnd(BaseException):
    """Raised where a target would have ended its process, as its parent expects."""


def main(target: str) -> None:
    from tests.hostile.targets import TARGETS

    limit()
    sys.addaudithook(_hook)
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(HERE / "corpora" / f"{target}.tar.xz") as stored:
        stored.extractall(Path(scratch, "corpus"), filter="data")
        inputs = [path.read_bytes() for path in sorted(Path(scratch, "corpus").iterdir())[::2]]
        for data in (*inputs, *seeds(target)):
            guarded(TARGETS[target], data, Path(scratch))


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def end(code: int) -> Never:
        raise ProcessEnd(code)

    def too_long(signum: int, frame: FrameType | None) -> Never:
        raise ProcessEnd(f"{CPU_SECONDS} s")

    os._exit = end
    signal.signal(signal.SIGVTALRM, too_long)


def guarded(target: Callable[[bytes, Path], None], data: bytes, scratch: Path) -> None:
    """Run one input in a folder of its own; starting a program or writing elsewhere is an error."""
    global _folder
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        _folder = folder
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        try:
            with suppress(ProcessEnd):
                target(data, Path(folder))
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            _folder = None
    assert not _events, _events


def _hook(event: str, details: tuple[Any, ...]) -> None:
    """Record programs that a target starts, and files outside of its folder that it opens for writing."""
    if _folder is None:
        return
    if event in STARTS_SOMETHING:
        _events.append(f"{event} {details!r:.200}")
    if event == "open" and isinstance(details[0], str) and not details[0].startswith((_folder, "/dev/null")):
        mode, flags = details[1] or "", details[2] or 0
        if set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _events.append(f"open {details!r:.200}")


def seeds(target: str) -> Iterator[bytes]:
    """Valid inputs of a target, and inputs that once failed."""
    if target == "safetensors":
        yield b"\x0e\0\0\0\0\0\0\0" + b'{"a\\fb": 0}    '  # a form feed, which some readers take for a line end
        yield b"\x3c\0\0\0\0\0\0\0" + b'{"a":{"dtype":"I8","shape":[2,2],"data_offsets":[0,4]}}     ' + bytes(4)
    else:
        yield from (path.read_bytes() for path in sorted((ROOT / "glm5_ascend").rglob("*.jinja")))
        yield b"{% for m in messages %}{{ m.role }}{{ m.content | tojson }}{% endfor %}{{ tools[0].function.name }}"


if __name__ == "__main__":
    main(sys.argv[1])
