"""Where compiled kernels are kept between processes, and what is said while one is compiled.

numba keeps compiled code beside the source or in the user's home and refuses to compile where it can write neither, as
in a container with a read-only root or under a user without a home. So a folder is chosen here before the first
`njit(cache=True)`: NUMBA_CACHE_DIR, beside the source, the user's cache folder, a folder of ours in the temporary one,
shared memory; where nothing can be written, kernels are compiled in every process anew.

An image can hold compiled kernels: with NUMBA_CACHE_DIR at `glm5-ascend warm-up` and when it runs. If that folder can
then only be read, its contents are copied to the folder chosen, because numba uses no cache that it cannot write.
"""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "NUMBA_CACHE_DIR"
PACKAGE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")
MESSAGE = "compiling kernels for this processor, once: about 20 s in all"
#: Files of numba's cache: an index per function, and the code it names.
INDEX, CODE = ".nbi", ".nbc"


@dataclass(frozen=True)
class Place:
    """folder: None where nothing can be written. beside: each file's __pycache__, numba's own choice.

    seed: a folder named by NUMBA_CACHE_DIR that can only be read.
    """

    folder: Path | None
    why: str
    beside: bool = False
    seed: Path | None = None


def choose() -> Place:
    """The folder for compiled kernels; makes it, compiles nothing, imports no numba."""
    given = os.environ.get(VARIABLE)
    seed = Path(given) if given and Path(given).is_dir() else None
    if given and _usable(Path(given)):
        return Place(Path(given), VARIABLE)
    if _beside_is_writable():
        return Place(PACKAGE, "beside the source", beside=True)
    for folder, why in _candidates():
        if _usable(folder, private=True):
            return Place(folder, why, seed=seed)
    return Place(None, "neither the package, nor the home, nor a temporary folder can be written")


def _candidates() -> Iterator[tuple[Path, str]]:
    with suppress(ImportError):
        from platformdirs import user_cache_path

        yield user_cache_path("glm5-ascend") / "kernels", "the user's cache folder"
    ours = f"glm5-kernels-{os.geteuid()}"
    with suppress(OSError):  # there is none that can be written
        yield Path(tempfile.gettempdir()) / ours, "a temporary folder"
    yield SHARED_MEMORY / ours, "shared memory"


def _beside_is_writable() -> bool:
    """Whether every __pycache__ of the package can be written, or made."""
    for folder in (PACKAGE, *(path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())):
        made = folder / "__pycache__"
        if not os.access(made if made.is_dir() else folder, os.W_OK):
            return False
    return True


def _usable(folder: Path, private: bool = False) -> bool:
    """Whether files can be written there; it is made if it is not there.

    private: nobody else may be able to write it, because numba executes what it finds.
    """
    # A home that nobody knows stays "~", and tempfile's last resort is the current folder: litter, not a cache.
    if private and (not folder.is_absolute() or folder.parent == Path.cwd()):
        return False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if private and (found.st_uid != os.geteuid() or found.st_mode & 0o022 or not stat.S_ISDIR(found.st_mode)):
            return False
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@cache
def prepare() -> Place:
    """Choose the folder, tell numba, and say when it compiles; to be called before the first `njit(cache=True)`."""
    place = choose()
    if place.folder is None:
        _compile_without_cache()
    elif not place.beside:
        from numba.core import config

        os.environ[VARIABLE] = str(place.folder)  # for child processes, and when numba reads its settings again
        config.CACHE_DIR = str(place.folder)
        if place.seed is not None:
            with suppress(OSError):  # then they are compiled
                copy_compiled(place.seed, place.folder)
    _forget_what_is_stale()
    _listen()
    return place


def copy_compiled(source: Path, folder: Path) -> None:
    """Copy the compiled functions that `folder` lacks; the code first, so that no index names what is not there."""
    for index in source.rglob(f"*{INDEX}"):
        target = folder / index.relative_to(source)
        if target.exists():
            continue
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (*index.parent.glob(f"{index.stem}.*{CODE}"), index):
            half = target.parent / f"{path.name}.{os.getpid()}"
            shutil.copyfile(path, half)
            half.replace(target.parent / path.name)


def count_compiled(place: Place) -> tuple[int, int]:
    """Compiled functions in a place and their bytes."""
    if place.folder is None:
        return 0, 0
    found = [path for path in place.folder.rglob("*") if path.suffix in (INDEX, CODE)]
    return sum(path.suffix == CODE for path in found), sum(path.stat().st_size for path in found)


def _compile_without_cache() -> None:
    from numba.core.dispatcher import Dispatcher

    Dispatcher.enable_caching = lambda self: None


def _forget_what_is_stale() -> None:
    """numba reads an index before it looks whether the source has changed since: a class that is gone or has another
    name by now would end the process there. Such an index counts as empty, and the function is compiled again."""
    from numba.core.caching import IndexDataCacheFile

    load = IndexDataCacheFile._load_index

    def tolerant(self: Any) -> Any:
        try:
            return load(self)
        except (AttributeError, ImportError, EOFError, pickle.UnpicklingError):
            return {}

    IndexDataCacheFile._load_index = tolerant


def _say(message: str) -> None:
    with suppress(OSError, ValueError):  # stderr is closed
        if sys.stderr is not None and sys.stderr.isatty():
            print(message, file=sys.stderr, flush=True)


class Compilation:
    """What this process compiled. While it does, Python looks for no circles of garbage: that took a sixth of the time,
    because millions of objects of torch's and numba's own are looked at again and again.

    Attributes:
        say: is given one message at the first compilation; prints it on a terminal.
        functions, seconds: compiled so far, and how long it took; for estimates that leave it out.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = _say
        self.functions, self.seconds = 0, 0.0
        self._lock, self._of_thread = threading.Lock(), threading.local()
        self._running, self._collects = 0, False  # threads that compile; whether garbage is to be looked for afterwards

    def began(self) -> None:
        depth = getattr(self._of_thread, "depth", 0)
        self._of_thread.depth = depth + 1
        if depth == 0:  # what a function calls is compiled within it
            self._of_thread.at = time.monotonic()
        with self._lock:
            self.functions += 1
            first = self.functions == 1
            if depth == 0:
                if self._running == 0:
                    self._collects = gc.isenabled()
                    gc.disable()
                self._running += 1
        if first:
            self.say(MESSAGE)

    def ended(self) -> None:
        self._of_thread.depth -= 1
        if self._of_thread.depth == 0:
            with self._lock:
                self.seconds += time.monotonic() - self._of_thread.at
                self._running -= 1
                if self._running == 0 and self._collects:
                    gc.enable()


compilation = Compilation()


def _listen() -> None:
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: object) -> None:
            compilation.began()

        def on_end(self, event: object) -> None:
            compilation.ended()

    event.register("numba:compile", Listener())
