"""Writers of files: atomic; our own never through a link, those that the user names through it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from glm5_ascend.errors import OutputError

#: Suffix of unfinished files.
PARTIAL = ".glm5-ascend-partial"
_PIECE = 1024**2


def disk_error(path: Path, error: OSError) -> OutputError:
    """Return the one-line error for an OSError while writing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"{path}: no space left on the disk", "free space or choose another output directory")
    return OutputError(f"{path}: cannot be written: {error.strerror}", "check permissions and the disk")


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` atomically when the block ends; not after an error.

    A device or a pipe that the user names, such as /dev/stdout, is written as it is.

    Raises:
        OutputError: it cannot be written; no partial file is left.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as file:
                yield file
            return
        aside = path.parent / f".{path.name[:100]}.{os.getpid()}-{os.urandom(4).hex()}{PARTIAL}"
        descriptor = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise
    except OSError as error:
        raise disk_error(path, error) from None


def write_file(path: Path, content: str | bytes) -> None:
    """`new_file` with this content; text as UTF-8, names that are not UTF-8 as escapes. Raises OutputError."""
    with new_file(path) as file:
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


def write_named(path: Path, content: str | bytes) -> None:
    """`write_file` for a file that the user names: a symbolic link stays, and the file that it names is written.

    Raises:
        OutputError: it cannot be written, or the link leads to itself.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OutputError(f"{path}: a link to itself", "name another file")
    write_file(target, content)


def copy_file(source: Path, path: Path) -> None:
    """Copy the content of `source`. Raises OutputError."""
    try:
        with source.open("rb") as read, new_file(path) as file:
            shutil.copyfileobj(read, file, _PIECE)
    except OSError as error:
        raise OutputError(f"{source}: cannot be read: {error.strerror}", "check permissions and the disk") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that becomes `path` (absent or empty before) when the block ends; not after an error.

    Raises:
        OutputError: it cannot be written; no partial file is left.
    """
    created = [parent for parent in path.absolute().parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parent_dir = path.absolute() if path.is_dir() else path.absolute().parent
        aside = parent_dir / f".{path.absolute().name[:100]}.{os.getpid()}-{os.urandom(4).hex()}{PARTIAL}"
        try:
            aside.mkdir()
            yield aside
            sync_tree(aside)
            if parent_dir == path.absolute():  # it may be the working directory of a process: keep it, and fill it
                for entry in aside.iterdir():
                    entry.rename(path / entry.name)
                aside.rmdir()
            else:
                aside.rename(path)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    except BaseException as error:
        with suppress(OSError):
            for parent in created:
                parent.rmdir()
        if isinstance(error, OSError):
            raise disk_error(path, error) from None
        raise


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def open_own(path: Path, flags: int = 0) -> int:
    """Open a file of this tool to read and write, created if it is missing; a link in its place is removed."""
    if path.is_symlink():
        path.unlink()
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | flags, 0o644)


def make_folder(path: Path) -> None:
    """Create a folder if it is missing; OutputError if the path is something else, such as a link."""
    try:
        with suppress(FileExistsError):
            path.mkdir()
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise OutputError(f"{path}: already exists and is not a folder", "move it away")
    except OSError as error:
        raise disk_error(path, error) from None


def checksum(descriptor: int, offset: int, length: int, before: int = 0) -> int:
    """Return the CRC-32 of bytes of an open file, continued from `before`; OSError if the file is shorter."""
    buffer = memoryview(bytearray(min(_PIECE, length)))
    end = offset + length
    while offset < end:
        count = os.preadv(descriptor, [buffer[: end - offset]], offset)
        if not count:
            raise OSError(errno.EIO, "shorter than it was")
        before = zlib.crc32(buffer[:count], before)
        offset += count
    return before


def file_checksum(path: Path) -> str | None:
    """Return the CRC-32 of a file in eight hexadecimal digits; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return f"{checksum(file.fileno(), 0, os.fstat(file.fileno()).st_size):08x}"
    except OSError:
        return None
