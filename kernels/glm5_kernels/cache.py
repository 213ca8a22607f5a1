"""The folder in which numba keeps compiled kernels, and what this process has compiled.

NUMBA_CACHE_DIR names the folder. The default is a folder in the user's cache whose name depends on the sources, because
numba's index cannot be read any more after a class in a signature is renamed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

VARIABLE = "NUMBA_CACHE_DIR"
MESSAGE = "compiling kernels for this processor, once: about 20 s in all"


def folder() -> Path | None:
    """The folder for compiled kernels, created if it is missing. Imports neither numba nor torch.

    Returns:
        NUMBA_CACHE_DIR, or the default if that cannot be written. None if neither can: then every process compiles the
        kernels that it calls.
    """
    paths = [_default_folder()]
    if os.environ.get(VARIABLE):
        paths.insert(0, Path(os.environ[VARIABLE]))
    return next((path for path in paths if _is_writable(path)), None)


def _is_writable(path: Path) -> bool:
    if str(path).startswith("~"):  # the home directory is unknown
        return False
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True


def _default_folder() -> Path:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "glm5-ascend" / f"kernels-{digest.hexdigest()[:12]}"


@cache
def prepare() -> Path | None:
    """Tell numba the folder. Call this before the first function is decorated.

    Returns:
        The folder. None if it cannot be written: decorate with `cache=False` then, because numba raises otherwise.
    """
    from numba.core import config, event

    path = folder()
    if path is not None:
        os.environ[VARIABLE] = config.CACHE_DIR = str(path)  # numba reads the variable again when it compiles
    event.register("numba:compile", _listener())
    return path


def count_compiled(path: Path) -> tuple[int, int]:
    """Number of compiled functions in a cache folder, and the bytes of all its files."""
    files = [file for file in path.rglob("*.nb?") if file.is_file()]
    return sum(file.suffix == ".nbc" for file in files), sum(file.stat().st_size for file in files)


def _print_on_terminal(message: str) -> None:
    with suppress(OSError, ValueError):  # stderr is closed
        if sys.stderr is not None and sys.stderr.isatty():
            print(message, file=sys.stderr, flush=True)


class Compilation:
    """Statistics of the functions that this process has compiled.

    Attributes:
        say: called with `MESSAGE` at the first compilation; the default prints it on a terminal.
        functions: compiled so far.
        seconds: spent on that, for estimates that leave it out.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = _print_on_terminal
        self.functions, self.seconds = 0, 0.0


compilation = Compilation()


def _listener() -> object:
    from numba.core import event

    class Listener(event.TimingListener):  # type: ignore[misc]
        """numba compiles under one lock; a callee is compiled within its caller, which this class counts once."""

        def on_start(self, started: object) -> None:
            super().on_start(started)
            compilation.functions += 1
            if compilation.functions == 1:
                compilation.say(MESSAGE)

        def on_end(self, ended: object) -> None:
            super().on_end(ended)
            compilation.seconds = self.duration if self.done else compilation.seconds

    return Listener()
