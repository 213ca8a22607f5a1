"""Writing files so that a full disk, a kill or somebody's link costs nothing: aside first, then renamed.

`drop_links` keeps a folder of ours free of names that lead to somebody else's data.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def write_bytes(path: Path, data: bytes) -> None:
    """The whole file or none: a link of this name is replaced, what it points to stays.

    Raises:
        OSError: of the file system; nothing of the new content is left.
    """
    aside = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """`write_bytes` in UTF-8."""
    write_bytes(path, text.encode())


def write_for_user(path: Path, text: str) -> None:
    """A file that the user has named: links are followed, what is no file (/dev/stdout, a pipe) is written to as it is.

    Raises:
        OSError: of the file system; a file of this name is as it was.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    write_text(target, text)


def drop_links(folder: Path) -> None:
    """Remove what a folder of ours cannot hold: links, second names of a file, pipes; and files half written at a kill.

    What they lead to stays. Folders stay, whoever made them.
    """
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place) / name
            found = path.lstat()
            plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not _TEMPORARY.fullmatch(name)
            if not plain and not stat.S_ISDIR(found.st_mode):
                path.unlink()
