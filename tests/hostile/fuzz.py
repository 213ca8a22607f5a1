"""Feeds a reader with what its own coverage makes of the corpus: `python -m tests.hostile.fuzz TARGET --minutes 20`.

Needs `pip install atheris`. New inputs go into `corpora/TARGET.tar.xz`, which `--replay` runs again without atheris
(`test_fuzzed_inputs.py`). An input that breaks a target is left as `crash-*` in the current folder.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import resource
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Never

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Longer inputs are cut: what matters to a parser comes early.
MAX_BYTES = 4096
#: What the process that reads tokenizers has, less: an input is to fail soon.
MEMORY_BYTES, CPU_SECONDS = 4 * 2**30, 10
STARTS_SOMETHING = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")


#: Targets see another one, see `limit`.
really_end = os._exit


class Ended(BaseException):
    """The process would have ended itself here, as its parent expects."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("target", choices=("safetensors", "recipe", "journal", "template"))
    arguments.add_argument("--minutes", type=float, default=20)
    arguments.add_argument("--replay", action="store_true", help="run the stored inputs, no new ones")
    given = arguments.parse_args()
    limit()
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch, "corpus")
        unpack(given.target, corpus)
        if given.replay:
            from tests.hostile.targets import TARGETS

            inputs = sorted(corpus.iterdir())
            for path in inputs:
                guarded(TARGETS[given.target], path.read_bytes(), Path(scratch))
            print(f"{given.target}: {len(inputs)} inputs, nothing wrong")
            return 0
        child = os.fork()  # libFuzzer ends its process
        if child == 0:
            try:
                fuzz(given.target, given.minutes, corpus, Path(scratch))
            finally:
                really_end(1)  # where libFuzzer raises instead, the folder is still the parent's
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        pack(given.target, corpus)
        return code


def limit() -> None:
    """An input that takes all memory or never ends is one that the reader's process is ended for."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def ended(code: int) -> Never:
        raise Ended(code)

    def too_long(signum: int, frame: FrameType | None) -> Never:
        raise Ended(f"{CPU_SECONDS} s")

    os._exit = ended
    signal.signal(signal.SIGVTALRM, too_long)


def guarded(target: Any, data: bytes, scratch: Path) -> None:
    """One input in an empty folder of its own; starting a program or writing elsewhere is an error."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        try:
            with suppress(Ended), watched(folder):
                target(data, Path(folder))
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@contextmanager
def watched(folder: str) -> Iterator[None]:
    """Note what this process starts, and what it opens for writing outside of `folder`."""
    global _seen
    _seen, seen = (found := [], folder), found
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked.append(True)
    try:
        yield
    finally:
        _seen = None
    assert not seen, seen


def _hook(event: str, details: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    found, folder = _seen
    if event in STARTS_SOMETHING:
        found.append(f"{event} {details!r:.200}")
    if event == "open" and isinstance(details[0], str) and not details[0].startswith((folder, "/dev/null")):
        mode, flags = details[1] or "", details[2] or 0
        if set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            found.append(f"open {details!r:.200}")


_seen: tuple[list[str], str] | None = None
_hooked: list[bool] = []


def fuzz(name: str, minutes: float, corpus: Path, scratch: Path) -> None:
    """New inputs for so long; does not return."""
    import atheris  # type: ignore[import-not-found]  # has no place among our requirements

    with atheris.instrument_imports(include=["glm5_ascend", "yaml", "json", "jinja2", "tests.hostile.targets"]):
        import jinja2  # noqa: F401
        import yaml  # noqa: F401

        from tests.hostile.targets import TARGETS

    words = scratch / "words"
    found = {word for path in corpus.iterdir() for word in re.findall(rb"[A-Za-z_]{2,24}", path.read_bytes())}
    words.write_text("".join(f'"{word.decode()}"\n' for word in sorted(found)))
    options = [f"-max_total_time={minutes * 60:.0f}", f"-max_len={MAX_BYTES}", f"-dict={words}", "-timeout=60",
               "-rss_limit_mb=0", "-print_final_stats=1"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: guarded(TARGETS[name], data, scratch))
    atheris.Fuzz()


def unpack(name: str, corpus: Path) -> None:
    """The stored inputs, and what is known to be sound."""
    corpus.mkdir()
    with suppress(FileNotFoundError), tarfile.open(stored_inputs(name)) as stored:
        stored.extractall(corpus, filter="data")
    for number, data in enumerate(seeds(name)):
        (corpus / f"seed-{number}").write_bytes(data[:MAX_BYTES])


def pack(name: str, corpus: Path) -> None:
    """Keep what reached something new; without dates, so that equal inputs give an equal file."""
    inputs = [path for path in sorted(corpus.iterdir()) if not path.name.startswith("seed-")]
    stored_inputs(name).parent.mkdir(exist_ok=True)
    with tarfile.open(stored_inputs(name), "w:xz") as stored:
        for path in inputs:
            member = tarfile.TarInfo(path.name)
            member.size = path.stat().st_size
            stored.addfile(member, io.BytesIO(path.read_bytes()))
    print(f"{name}: {len(inputs)} inputs kept")


def stored_inputs(name: str) -> Path:
    return HERE / "corpora" / f"{name}.tar.xz"


def seeds(name: str) -> Iterator[bytes]:
    """Sound inputs of a target, and what was once found."""
    if name == "safetensors":
        yield b"\x0e\0\0\0\0\0\0\0" + b'{"a\\fb": 0}    '  # a name with a form feed, which some take for a line end
        yield b"\x3c\0\0\0\0\0\0\0" + b'{"a":{"dtype":"I8","shape":[2,2],"data_offsets":[0,4]}}     ' + bytes(4)
    elif name == "recipe":
        yield from (path.read_bytes() for path in sorted((ROOT / "quant_recipes").rglob("*.yaml")))
    elif name == "journal":
        yield b'{"unit": "layer 0"}\n{"checksum": "ab", "errors": {"W4A8": [0.1, 2.0]}, "unit": "layer 1 expert 2"}\n'
        yield b'\0{"format": 3, "recipe": "b", "seed": 0, "source": "a"}\n{"cold": true, "unit": "layer 1 backbone"}\n'
    else:
        yield from (path.read_bytes() for path in sorted((ROOT / "glm5_ascend").rglob("*.jinja")))
        yield b"{% for m in messages %}{{ m.role }}{{ m.content | tojson }}{% endfor %}{{ tools[0].function.name }}"


if __name__ == "__main__":
    sys.exit(main())
